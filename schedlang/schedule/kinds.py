"""The kinds of action."""

from enum import IntEnum

#: The kinds of action, by their text in a plan. Torch's action tables spell them the same way: `B`
#: is a whole backward, `I` its input-gradient half, `W` its weight-gradient half; `R` recomputes a
#: forward whose activations were dropped; `U` is the optimizer step; OFFLOAD copies activations to
#: the host's memory and RELOAD brings them back.
Kind = IntEnum("Kind", "F B I W R U OFFLOAD RELOAD SEND_F RECV_F SEND_B RECV_B")

#: The kinds of an inference: forwards, and the transfers of what they make.
FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
