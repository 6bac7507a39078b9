"""The rows of the kinds of op, each of which says all there is to say of a kind.

Everything else asks the row: language, proof, costs, pictures, tables of torch and runtime. What an
op makes has the name of a kind as well: an activation is `F`, the gradient of a stage's input `B`,
whether a whole backward makes it or an input half, and the gradient of its weights `W`.

`add_kind` adds a row from outside, before anything else of schedlang is imported.
"""

import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal

from attrs import evolve, frozen

#: The kinds of action, by their text in a plan. Torch's action tables spell them the same way. No
#: plan has a WAIT_SEND: only tables of torch do.
Kind = IntEnum(
    "Kind",
    "F B I W R U OFFLOAD RELOAD EXCHANGE_F EXCHANGE_B UNSHARD RESHARD REDUCE_GRAD "
    "SEND_WEIGHTS RECV_WEIGHTS SEND_GRADIENTS RECV_GRADIENTS "
    "SEND_F RECV_F SEND_B RECV_B WAIT_SEND_F WAIT_SEND_B",
)

#: The stream of a rank on which it runs its ops one after the other. Ops on another stream run
#: beside these: the rank begins such an op where it stands in its order, and goes on.
COMPUTE = "compute"
#: The streams on which activations are copied to the host or another rank, and back.
COPIES_OUT = "copies out"
COPIES_IN = "copies in"


@frozen
class Op:
    """All there is to say of a kind of op.

    `word` is how a program writes it, and `name` what messages and legends call it. `cost` is the
    field of `Costs` with its duration; without one it takes no time.

    An op `makes` products, each at most once for a stage and microbatch; products with
    `is_required` are made exactly once. The op `follows` another one of its microbatch: one of its
    own stage, or `of` the stages "before" it or "after" it, which are then on its rank. Needs that
    depend on the layout are in `schedlang.schedule.needs`. An op that `reads` activations or
    gradients of neighbouring stages runs the stage's module, and so uses its weights. It is over
    `before` other ops of its stage and microbatch: these wait for it where it is there. A half of a
    backward `owes` what it leaves to another op; an op that `repeats` another makes again what that
    one made.

    In a building block the op takes `slots`. It `holds` 1 if it puts activations into the memory of
    its rank, -1 if it is their last use.

    `stream` is where the op runs on its rank. On it the op `meets` the same op of all `replicas` of
    its stage, or passes a message to its `next` replica, whose op is the `other_end`, or takes one
    from its `previous` one. `weights` says what the op does with the weights of its stage,
    `gradients` what it does with their sum; such an op is of a whole stage, and of no microbatch.

    `colours` are the light and the dark end of the band of its chunks' colours. A `pattern` is
    drawn in its boxes where these have no room for its letter. Torch's tables have a row for ops
    that are `in_torch`. `method` names the runtime's method that does the op, or is a function of a
    stage and a microbatch.
    """

    word: str
    name: str
    cost: str
    method: str | Callable[[Any, int], None]
    colours: tuple[str, str]
    makes: tuple[Kind, ...] = ()
    is_required: bool = False
    follows: Kind | None = None
    of: Literal["own", "before", "after"] = "own"
    before: tuple[Kind, ...] = ()
    reads: Kind | None = None
    repeats: Kind | None = None
    slots: int = 0
    holds: int = 0
    stream: str = COMPUTE
    meets: Literal["", "replicas", "next", "previous"] = ""
    other_end: Kind | None = None
    owes: Kind | None = None
    weights: Literal["", "bring", "pass on", "drop", "change"] = ""
    gradients: Literal["", "sum", "pass on", "take"] = ""
    pattern: str = "plain"
    in_torch: bool = False

    @property
    def is_beside(self) -> bool:
        """Whether the rank goes on while the op runs."""
        return self.stream != COMPUTE

    @property
    def is_hatched(self) -> bool:
        """Whether its boxes have its pattern however wide they are: beside a row there are no
        letters, and what repeats an op has its colours.
        """
        return self.is_beside or self.repeats is not None

    @property
    def is_of_stage(self) -> bool:
        """Whether the op is of a whole stage, and of no microbatch."""
        return bool(self.weights or self.gradients)

    @property
    def is_update(self) -> bool:
        """Whether the op is the optimizer's step, which makes a new version of the weights."""
        return self.weights == "change"

    @property
    def is_collective(self) -> bool:
        """Whether the op moves weights or gradients of a stage between its replicas, or lets go of
        weights that came so.
        """
        return self.is_of_stage and self.is_beside

    @property
    def is_copy(self) -> bool:
        """Whether the op moves activations between the rank and where they are kept meanwhile."""
        return self.stream in (COPIES_OUT, COPIES_IN)

    @property
    def is_background(self) -> bool:
        """Whether the op is of a microbatch and runs beside the ops of its rank, as copies do."""
        return self.is_beside and not self.is_of_stage

    @property
    def is_hop(self) -> bool:
        """Whether the op is one end of a message from a replica to the next one."""
        return self.meets in ("next", "previous")


OPS: dict[int, Op] = {
    Kind.F: Op(
        word="F",
        name="forward",
        cost="forward",
        method="forward",
        colours=("#97d0f1", "#69a6f3"),
        makes=(Kind.F,),
        is_required=True,
        reads=Kind.F,
        slots=1,
        holds=1,
        in_torch=True,
    ),
    # The whole backward.
    Kind.B: Op(
        word="B",
        name="backward",
        cost="backward",
        method="backward",
        colours=("#317e42", "#07492c"),
        makes=(Kind.B, Kind.W),
        is_required=True,
        reads=Kind.B,
        slots=2,
        holds=-1,
        in_torch=True,
    ),
    # Its two halves.
    Kind.I: Op(
        word="I",
        name="input gradient",
        cost="input",
        method="backward",
        colours=("#3fab8b", "#008c98"),
        pattern="dashes",
        makes=(Kind.B,),
        owes=Kind.W,
        reads=Kind.B,
        slots=1,
        in_torch=True,
    ),
    Kind.W: Op(
        word="W",
        name="weight gradient",
        cost="weight",
        method="backward_weight",
        colours=("#faefad", "#ffc86b"),
        pattern="crosses",
        makes=(Kind.W,),
        is_required=True,
        follows=Kind.B,
        reads=Kind.B,
        slots=1,
        holds=-1,
        in_torch=True,
    ),
    # Runs a forward again whose activations were dropped.
    Kind.R: Op(
        word="R",
        name="recomputation",
        cost="recompute",
        method="recompute",
        colours=("#97d0f1", "#69a6f3"),
        pattern="rising",
        makes=(Kind.R,),
        follows=Kind.F,
        reads=Kind.F,
        repeats=Kind.F,
        slots=1,
        holds=1,
    ),
    Kind.U: Op(
        word="U",
        name="optimizer step",
        cost="update",
        method="update",
        colours=("#10151c", "#10151c"),
        makes=(Kind.U,),
        weights="change",
    ),
    # Copies activations to the memory of the host, or of another rank; and brings them back.
    Kind.OFFLOAD: Op(
        word="offload",
        name="offload",
        cost="offload",
        method="offload",
        colours=("#c882c2", "#c882c2"),
        pattern="upright",
        makes=(Kind.OFFLOAD,),
        follows=Kind.F,
        holds=-1,
        stream=COPIES_OUT,
    ),
    Kind.RELOAD: Op(
        word="reload",
        name="reload",
        cost="reload",
        method="reload",
        colours=("#a45b9f", "#a45b9f"),
        pattern="level",
        makes=(Kind.RELOAD,),
        follows=Kind.OFFLOAD,
        holds=1,
        stream=COPIES_IN,
    ),
    # What a stage is about to take is exchanged over the processes of a group, as tokens are with
    # those that have their experts: activations before a forward, gradients before a backward.
    Kind.EXCHANGE_F: Op(
        word="exchange F",
        name="exchange",
        cost="exchange",
        method="exchange_activations",
        colours=("#e8a0a8", "#e8a0a8"),
        pattern="dashes",
        makes=(Kind.EXCHANGE_F,),
        follows=Kind.F,
        of="before",
        before=(Kind.F,),
        stream="exchanges",
        meets="replicas",
    ),
    Kind.EXCHANGE_B: Op(
        word="exchange B",
        name="exchange back",
        cost="exchange_back",
        method="exchange_gradients",
        colours=("#b0505c", "#b0505c"),
        pattern="crosses",
        makes=(Kind.EXCHANGE_B,),
        follows=Kind.B,
        of="after",
        before=(Kind.B, Kind.I),
        stream="exchanges",
        meets="replicas",
    ),
    # Weights that are sharded over the replicas: an all-gather, and the end of its memory.
    Kind.UNSHARD: Op(
        word="unshard",
        name="gather",
        cost="gather",
        method="unshard",
        colours=("#c5bb87", "#c5bb87"),
        stream="gathers",
        meets="replicas",
        weights="bring",
        in_torch=True,
    ),
    Kind.RESHARD: Op(
        word="reshard",
        name="release",
        cost="",
        method="reshard",
        colours=("#f2a65a", "#f2a65a"),
        stream="releases",
        weights="drop",
        in_torch=True,
    ),
    Kind.REDUCE_GRAD: Op(
        word="reduce",
        name="sum",
        cost="sum",
        method="reduce",
        colours=("#494036", "#494036"),
        stream="sums",
        meets="replicas",
        gradients="sum",
        in_torch=True,
    ),
    # Weights, and sums of gradients, that travel from each replica of a stage to the next.
    Kind.SEND_WEIGHTS: Op(
        word="send weights",
        name="weights out",
        cost="gather",
        method="send_weights",
        colours=("#69a103", "#69a103"),
        pattern="rising",
        stream="hops out",
        meets="next",
        other_end=Kind.RECV_WEIGHTS,
        weights="pass on",
    ),
    Kind.RECV_WEIGHTS: Op(
        word="recv weights",
        name="weights in",
        cost="gather",
        method="receive_weights",
        colours=("#bde912", "#bde912"),
        pattern="falling",
        stream="hops in",
        meets="previous",
        other_end=Kind.SEND_WEIGHTS,
        weights="bring",
    ),
    Kind.SEND_GRADIENTS: Op(
        word="send gradients",
        name="gradients out",
        cost="sum",
        method="send_gradients",
        colours=("#3a1207", "#3a1207"),
        pattern="rising",
        stream="hops out",
        meets="next",
        other_end=Kind.RECV_GRADIENTS,
        gradients="pass on",
    ),
    Kind.RECV_GRADIENTS: Op(
        word="recv gradients",
        name="gradients in",
        cost="sum",
        method="receive_gradients",
        colours=("#a62419", "#a62419"),
        pattern="falling",
        stream="hops in",
        meets="previous",
        other_end=Kind.SEND_GRADIENTS,
        gradients="take",
    ),
}


#: What there is to say of an action that is no op.
_NO_OP = Op("", "", "", "", ("", ""))


def op_of(kind: int) -> Op:
    """The row of a kind of action: a transfer has an empty one."""
    return OPS.get(kind, _NO_OP)


def kinds_of(has: Callable[[Op], object]) -> tuple[Kind, ...]:
    """The kinds of op whose row has a property."""
    return tuple(Kind(kind) for kind, op in OPS.items() if has(op))


def add_kind(name: str, op: Op) -> Kind:
    """Add a kind of op of microbatches, which makes what nothing else makes; its `name` is how a
    plan spells it. RuntimeError once there are tables of kinds.
    """
    if "schedlang.schedule.kinds" in sys.modules:
        raise RuntimeError(f"`{name}` comes too late: import its file before schedlang")
    # `IntEnum` has no way to grow: this is what it does itself for each name.
    kind = int.__new__(Kind, len(Kind) + 1)
    kind._name_ = name
    kind._value_ = int(kind)
    Kind._member_names_.append(name)
    Kind._member_map_[name] = kind
    Kind._value2member_map_[int(kind)] = kind
    OPS[kind] = evolve(op, makes=(kind,))
    return kind
