"""The kinds of action."""

from enum import IntEnum

#: The kinds of action, by their text in a plan. Torch's action tables spell them the same way: `B`
#: is a whole backward, `I` its input-gradient half, `W` its weight-gradient half; `R` recomputes a
#: forward whose activations were dropped; `U` is the optimizer step; OFFLOAD copies activations to
#: the host's memory and RELOAD brings them back.
Kind = IntEnum("Kind", "F B I W R U OFFLOAD RELOAD SEND_F RECV_F SEND_B RECV_B")

#: How many rows a table has that is looked up by kind; its first is of none.
ROWS = max(Kind) + 1

#: How many slots of a time grid an op takes: the unit costs; what takes none comes first in its
#: slot.
WIDTH: dict[int, int] = {
    Kind.F: 1,
    Kind.B: 2,
    Kind.I: 1,
    Kind.W: 1,
    Kind.R: 1,
    Kind.U: 0,
    Kind.OFFLOAD: 0,
    Kind.RELOAD: 0,
}
