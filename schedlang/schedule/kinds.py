"""The kinds of action, and the tables of what their rows in `schedlang.schedule.ops` say.

A kind of op is a row of `OPS`, a kind of transfer one of `TRANSFERS`.
"""

from attrs import frozen

from schedlang.schedule.ops import OPS as OPS
from schedlang.schedule.ops import Kind as Kind
from schedlang.schedule.ops import Op as Op
from schedlang.schedule.ops import kinds_of as kinds_of
from schedlang.schedule.ops import op_of as op_of

#: How many rows a table has that is looked up by kind; its first is of none.
ROWS = max(Kind) + 1

#: The kinds of op that are of a whole stage, and of no microbatch.
OF_STAGE = frozenset(kinds_of(lambda op: op.is_of_stage))

#: The optimizer's steps.
STEPS = kinds_of(lambda op: op.is_update)
#: The halves of backwards that leave the gradients of the weights to others.
INPUT_HALVES = kinds_of(lambda op: op.owes)
#: The ops that make activations again, which were dropped.
REPEATS = kinds_of(lambda op: op.repeats)
#: The copies by which activations leave their rank, and those by which they come back.
AWAY = kinds_of(lambda op: op.is_copy and op.holds < 0)
BACK = kinds_of(lambda op: op.is_copy and op.holds > 0)

#: The ops that meet others, on the ranks of replicas of their stage.
MEETS = kinds_of(lambda op: op.meets)
#: The ops that change, between two stages of their rank, what one of them hands to the other.
BETWEEN = kinds_of(lambda op: op.of != "own")
#: What sums the gradients of all replicas of a stage.
REDUCES = kinds_of(lambda op: op.gradients == "sum")

#: For each thing that is made, the kinds of op that make it.
MAKERS: dict[int, tuple[Kind, ...]] = {
    made: tuple(Kind(kind) for kind in OPS if made in OPS[kind].makes)
    for made in OPS
    if made in OPS[made].makes
}


@frozen
class Transfer:
    """What there is to say of a kind of transfer: how a program writes it, and of which kind its
    other end is, so many stages further on.
    """

    word: str
    other_end: Kind
    distance: int


#   stage s                     stage s + 1
#     F ── SEND_F ──────▶ RECV_F ── F
#     B ── RECV_B ◀────── SEND_B ── B
TRANSFERS: dict[int, Transfer] = {
    Kind.SEND_F: Transfer("send F", Kind.RECV_F, 1),
    Kind.RECV_F: Transfer("recv F", Kind.SEND_F, -1),
    Kind.SEND_B: Transfer("send B", Kind.RECV_B, -1),
    Kind.RECV_B: Transfer("recv B", Kind.SEND_B, 1),
}

#: The send that brings what was made to another rank, and its receive there; gradients of weights
#: have none: they are summed.
SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
RECEIVES: dict[int, Kind] = {
    made: TRANSFERS[send].other_end for made, send in SENDS.items()
}

#: The action that holds its rank until a send of its is over, for each kind of send.
WAITS = {Kind.SEND_F: Kind.WAIT_SEND_F, Kind.SEND_B: Kind.WAIT_SEND_B}

#: The send of what an op makes, where another rank needs it.
HANDS_ON: dict[int, Kind] = {
    kind: send for made, send in SENDS.items() for kind in MAKERS[made]
}
#: The receive of what an op reads, where another rank makes it.
READS: dict[int, Kind] = {
    kind: RECEIVES[op.reads] for kind, op in OPS.items() if op.reads is not None
}
#: The receive that an op waits for: what it follows has waited for the same message.
AWAITS = {kind: receive for kind, receive in READS.items() if OPS[kind].follows is None}
#: The ops that run their stage's module.
USES_WEIGHTS = frozenset(READS)
#: The two sides of a hop: what a stage sends to its next replica, and that one receives.
HOPS = {
    kind: op.other_end
    for kind, op in OPS.items()
    if op.meets == "next" and op.other_end is not None
}
#: Both sides of all hops.
OF_HOPS = frozenset(kinds_of(lambda op: op.is_hop))
#: What says where a stage's weights are: brings them, passes them on, and lets go of them.
GATHERS = frozenset(kinds_of(lambda op: op.weights and not op.is_update))
#: What gathers a stage's weights from its replicas, and what frees these.
GATHER = kinds_of(lambda op: op.weights == "bring" and op.meets == "replicas")[0]
FREE = kinds_of(lambda op: op.weights == "drop")[0]
#: What sums a stage's gradients over its replicas.
SUM = kinds_of(lambda op: op.gradients == "sum")[0]
#: What brings the gradients of replicas together.
SUMS = frozenset(kinds_of(lambda op: op.gradients))
#: The kinds of an inference: forwards, the transfers of what they make, and what they wait for.
FORWARD = frozenset(
    {
        Kind.F,
        SENDS[Kind.F],
        RECEIVES[Kind.F],
        *kinds_of(lambda op: Kind.F in op.before),
    }
)
