"""The kinds of action, and what there is to say of each: the table that everything else asks.

A kind of op is a row of `OPS`, a kind of transfer one of `TRANSFERS`. What an op makes has the name
of a kind as well: an activation is `F`, the gradient of a stage's input `B`, whether a whole
backward makes it or an input half, and the gradient of its weights `W`.
"""

from enum import IntEnum

from attrs import frozen

#: The kinds of action, by their text in a plan. Torch's action tables spell them the same way: `B`
#: is a whole backward, `I` its input-gradient half, `W` its weight-gradient half; `R` recomputes a
#: forward whose activations were dropped; `U` is the optimizer step; OFFLOAD copies activations to
#: the memory of the host, or of another rank, and RELOAD brings them back. UNSHARD gathers a
#: stage's weights from its replicas, RESHARD lets go of them, and REDUCE_GRAD sums its gradients
#: over the replicas. SEND_WEIGHTS and SEND_GRADIENTS pass those of a stage on to its next replica,
#: where the RECVs take them. No plan has a WAIT_SEND: only tables of torch do.
Kind = IntEnum(
    "Kind",
    "F B I W R U OFFLOAD RELOAD UNSHARD RESHARD REDUCE_GRAD "
    "SEND_WEIGHTS RECV_WEIGHTS SEND_GRADIENTS RECV_GRADIENTS "
    "SEND_F RECV_F SEND_B RECV_B WAIT_SEND_F WAIT_SEND_B",
)
#: How many rows a table has that is looked up by kind; its first is of none.
ROWS = max(Kind) + 1


@frozen
class Op:
    """What there is to say of a kind of op.

    `word` is how a program writes it, `name` what messages and legends call it, and `cost` the
    field of `Costs` that says how long it takes, or empty where it takes none. It `makes` what is
    there once it has ended. `follows` is what it needs of its own stage and microbatch, whatever
    the layout; the needs that depend on the layout are in `schedlang.schedule.needs`.

    An op that `reads` what the stages around it made, activations or gradients, runs the stage's
    module, forward or backward: it uses the stage's weights.

    In a building block it takes so many `slots`. `holds` is 1 where it puts activations into the
    memory of its rank, and -1 where it is their last use. While a copy (`is_copy`) to the host or
    back goes on, so does the rank; and while replicas of a stage make one gather, one sum, or one
    hop from one of them to the next (`is_collective`), which is of the whole stage, and of no
    microbatch.
    """

    word: str
    name: str
    cost: str
    makes: tuple[Kind, ...]
    follows: Kind | None = None
    reads: Kind | None = None
    slots: int = 0
    holds: int = 0
    is_copy: bool = False
    is_collective: bool = False


OPS: dict[int, Op] = {
    Kind.F: Op(
        "F", "forward", "forward", makes=(Kind.F,), reads=Kind.F, slots=1, holds=1
    ),
    Kind.B: Op(
        "B",
        "backward",
        "backward",
        makes=(Kind.B, Kind.W),
        reads=Kind.B,
        slots=2,
        holds=-1,
    ),
    Kind.I: Op("I", "input gradient", "input", makes=(Kind.B,), reads=Kind.B, slots=1),
    Kind.W: Op(
        "W",
        "weight gradient",
        "weight",
        makes=(Kind.W,),
        follows=Kind.B,
        reads=Kind.B,
        slots=1,
        holds=-1,
    ),
    Kind.R: Op(
        "R",
        "recomputation",
        "recompute",
        makes=(Kind.R,),
        follows=Kind.F,
        reads=Kind.F,
        slots=1,
        holds=1,
    ),
    Kind.U: Op("U", "optimizer step", "update", makes=(Kind.U,)),
    Kind.OFFLOAD: Op(
        "offload",
        "offload",
        "offload",
        makes=(Kind.OFFLOAD,),
        follows=Kind.F,
        holds=-1,
        is_copy=True,
    ),
    Kind.RELOAD: Op(
        "reload",
        "reload",
        "reload",
        makes=(Kind.RELOAD,),
        follows=Kind.OFFLOAD,
        holds=1,
        is_copy=True,
    ),
    Kind.UNSHARD: Op("unshard", "gather", "gather", makes=(), is_collective=True),
    # It is no collective by itself: it ends what a gather or a receive began.
    Kind.RESHARD: Op("reshard", "release", "", makes=(), is_collective=True),
    Kind.REDUCE_GRAD: Op("reduce", "sum", "sum", makes=(), is_collective=True),
    Kind.SEND_WEIGHTS: Op(
        "send weights", "weights out", "gather", makes=(), is_collective=True
    ),
    Kind.RECV_WEIGHTS: Op(
        "recv weights", "weights in", "gather", makes=(), is_collective=True
    ),
    Kind.SEND_GRADIENTS: Op(
        "send gradients", "gradients out", "sum", makes=(), is_collective=True
    ),
    Kind.RECV_GRADIENTS: Op(
        "recv gradients", "gradients in", "sum", makes=(), is_collective=True
    ),
}

#: The kinds of op that are of a whole stage, and of no microbatch.
OF_STAGE = frozenset(
    {Kind.U, *(Kind(kind) for kind, op in OPS.items() if op.is_collective)}
)

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
HOPS = {Kind.SEND_WEIGHTS: Kind.RECV_WEIGHTS, Kind.SEND_GRADIENTS: Kind.RECV_GRADIENTS}
#: Both sides of all hops.
OF_HOPS = frozenset({*HOPS, *HOPS.values()})
#: What says where a stage's weights are: brings them, passes them on, and lets go of them.
GATHERS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.SEND_WEIGHTS, Kind.RECV_WEIGHTS})
#: What brings the gradients of replicas together.
SUMS = frozenset({Kind.REDUCE_GRAD, Kind.SEND_GRADIENTS, Kind.RECV_GRADIENTS})
#: The kinds of an inference: forwards, and the transfers of what they make.
FORWARD = frozenset({Kind.F, SENDS[Kind.F], RECEIVES[Kind.F]})
