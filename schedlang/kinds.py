"""The kinds of action."""

from enum import IntEnum

#: The kinds of action, by their text in a plan. Torch's action tables spell them the same way: `B` is a whole
#: backward, `I` its input-gradient half, `W` its weight-gradient half; `R` recomputes a forward whose activations were
#: dropped; `U` is the optimizer step.
Kind = IntEnum("Kind", "F B I W R U SEND_F RECV_F SEND_B RECV_B")
