"""The syntax tree: one class per grammar rule, its fields in the order of the rule's parts;
compares without places.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from schedlang.language.expressions import Name as Name
from schedlang.language.expressions import Node as Node
from schedlang.schedule.kinds import TRANSFERS

_TRANSFERS = frozenset(transfer.word for transfer in TRANSFERS.values())


def walk(node: Node) -> Iterator[Node]:
    """A node and all within it; what stands around others comes first."""
    yield node
    for value in node.parts:
        if isinstance(value, Node):
            yield from walk(value)
        elif isinstance(value, tuple):
            for child in value:
                yield from walk(child)


@frozen(eq=False, repr=False)
class Schedule(Node):
    """A whole program."""

    name: Name
    items: tuple[Node, ...]


@frozen(eq=False, repr=False)
class Param(Node):
    """`param name = default`, or the user must give it; `ranks`, `microbatches`, `slices` say how
    many there are.
    """

    name: Name
    default: Node | None


@frozen(eq=False, repr=False)
class Require(Node):
    """`require condition, "reason"`: what must hold of the parameters."""

    condition: Node
    reason: str | None


@frozen(eq=False, repr=False)
class Import(Node):
    """`import "file"`: the items of another file, in place of this one."""

    file: str


@frozen(eq=False, repr=False)
class Let(Node):
    """`let name = value`."""

    name: Name
    value: Node


@frozen(eq=False, repr=False)
class List(Node):
    """`let name = [values]`; or `let name[length] = [values]`, which has that many values.

    `param name[length] = [values]` is a list that a user may give; without values, the user must.
    """

    name: Name
    values: tuple[Node, ...]
    length: Node | None
    is_param: bool


@frozen(eq=False, repr=False)
class Fn(Node):
    """`fn name(params) = body`."""

    name: Name
    params: tuple[Name, ...]
    body: Node


@frozen(eq=False, repr=False)
class Seq(Node):
    """`seq name(params) { … }`: statements with a name."""

    name: Name
    params: tuple[Name, ...]
    body: Block


@frozen(eq=False, repr=False)
class Range(Node):
    """`start .. stop`, without `stop`."""

    start: Node
    stop: Node


@frozen(eq=False, repr=False)
class Stage(Node):
    """`stage name in range on rank`: how many stages there are, and which rank holds each."""

    name: Name
    range: Range
    rank: Node


@frozen(eq=False, repr=False)
class Pipeline(Node):
    """`pipeline name runs microbatches stage …`: one of several pipelines, which are replicas, or
    `model name runs …`, one of several models; `name(s)` is its stage s.

    `pipeline name(i) in range runs …` are as many as the range has numbers; `name(i, s)` is stage s
    of number i.
    """

    word: str
    name: Name
    number: Name | None
    range: Range | None
    microbatches: Node
    stage: Stage


@frozen(eq=False, repr=False)
class Block(Node):
    """Statements in braces."""

    statements: tuple[Node, ...]


@frozen(eq=False, repr=False)
class Rank(Node):
    """`rank name { … }`: what every rank does, `name` being its number."""

    name: Name
    body: Block


@frozen(eq=False, repr=False)
class Repeated(Node):
    """`block m, n every interval { … }`: a building block, the ops of some microbatches at time
    slots, repeated.
    """

    microbatches: tuple[Name, ...]
    interval: Node
    rows: tuple[Row, ...]


@frozen(eq=False, repr=False)
class Row(Node):
    """`stage name in range { … }` in a building block: the ops of some stages."""

    name: Name
    range: Range
    ops: tuple[Placed, ...]


@frozen(eq=False, repr=False)
class Placed(Node):
    """`F(s, m) at slot`."""

    op: Op
    slot: Node


@frozen(eq=False, repr=False)
class Pass(Node):
    """A pass and what it is given: `squeeze`, `reorder` and `greedy` nothing, `fill W` and `gather`
    a limit or nothing, `recompute` a range of stages.
    """

    name: str
    given: Node | None = None


@frozen(eq=False, repr=False)
class Part(Node):
    """`warmup { … }`, a rank's ops before the first update of a stream, or `steady { … }`, its ops
    of one update.
    """

    name: str
    body: Block


@frozen(eq=False, repr=False)
class Weights(Node):
    """`weights rule on range`, or `weights rule(updates) on range`: which version of their weights
    some stages read, or all of them.
    """

    rule: Name
    updates: Node | None
    stages: Range | None


@frozen(eq=False, repr=False)
class Assert(Node):
    """`assert condition for all, "reason"`: what the program claims of the schedule it describes,
    or of all that it describes for any number of microbatches.
    """

    condition: Node
    for_all: str | None
    reason: str | None


@frozen(eq=False, repr=False)
class Cost(Node):
    """`cost F = 3`, `cost F(s) = …` per stage, `cost F(s, m) = …` per microbatch, or `cost F(s, m,
    k) = …` per slice: how long an op takes; `cost overlap`, ops that overlap together; `cost send`,
    a transfer between ranks, and `cost send(r, q) = …` one from rank r to rank q; `cost sum` and
    `cost gather`, what is done with the gradients and the weights of a stage over its replicas.
    """

    word: str
    indices: tuple[Name, ...] | None
    value: Node


@frozen(eq=False, repr=False)
class Memory(Cost):
    """`memory F = 2`, `memory F(s) = …` per stage, `memory F(s, m) = …` per microbatch, or `memory
    F(s, m, k) = …` per slice: what an op adds to what its rank holds; `memory gather`, gathered
    weights; `memory send`, a message between stages.
    """


@frozen(eq=False, repr=False)
class PerRank(Cost):
    """`capacity(r) = …`, the bytes that rank r has room for; `link(r) = …`, the link to the host
    that its copies take; or `keeper(r) = …`, the rank that keeps what it offloads, in place of the
    host. Without `(r)`, the value is that of all ranks.
    """


@frozen(eq=False, repr=False)
class Choice(Node):
    """`objective span`: what passes minimise; or `send bf16`: the type to which messages between
    ranks are rounded.
    """

    word: str
    name: Name


@frozen(eq=False, repr=False)
class Edge(Node):
    """`edge name in range from earlier to later`: where what some stages make goes to; or `skip
    name …`: where something else than that goes to.
    """

    word: str
    name: Name
    range: Range
    earlier: Node
    later: Node


@frozen(eq=False, repr=False)
class Frozen(Node):
    """`frozen range`: the weights of these stages do not change; or `frozen model`, those of a
    model.
    """

    stages: Node


@frozen(eq=False, repr=False)
class For(Node):
    """`for name in range by step { … }`: without a step, through all numbers of the range."""

    name: Name
    range: Range
    step: Node | None
    body: Block


@frozen(eq=False, repr=False)
class Repeat(Node):
    """`repeat count { … }`."""

    count: Node
    body: Block


@frozen(eq=False, repr=False)
class If(Node):
    """`if condition { … } else { … }`."""

    condition: Node
    then: Block
    otherwise: If | Block | None


@frozen(eq=False, repr=False)
class Run(Node):
    """`run name(args)`: the statements of a sequence."""

    name: Name
    args: tuple[Node, ...]


@frozen(eq=False, repr=False)
class Op(Node):
    """An op, `F(s, m)`, `exchange F(s, m)` or `send F(s, m)`; kind is its word."""

    kind: str
    args: tuple[Node, ...]

    @property
    def is_transfer(self) -> bool:
        """Whether it sends or receives what a microbatch makes."""
        return self.kind in _TRANSFERS


@frozen(eq=False, repr=False)
class Overlap(Node):
    """`overlap { … }`: ops that run as one, or transfers that are issued as one batch."""

    ops: tuple[Op, ...]
