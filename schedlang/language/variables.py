"""The values of a program's variables at an op.

Only messages need them. So they are not kept, but the order runs once more, with the values of its
names told before each statement.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attrs import define, evolve, field

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.waiting_ranks import Recorded, Stand, Values, Wait
from schedlang.diagnostics.wrong_arguments import Params
from schedlang.language import expressions, syntax
from schedlang.language.block import draw
from schedlang.language.codegen import generate, variable
from schedlang.language.declarations import Declarations, declare
from schedlang.language.faults import Fault
from schedlang.language.record import Calls, record
from schedlang.schedule.layout import Layout


@define
class Trace:
    """An order that runs once more, to record the values of its names at the `wanted` calls.

    Calls are counted from 0. After a fault, `now` has the values at its statement.
    """

    wanted: Collection[int]
    values: dict[int, Mapping[str, int]] = field(factory=dict)
    #: The least and the greatest value of each `let`, by the place of its name in the text.
    lets: dict[int, tuple[float, float]] = field(factory=dict)
    now: Mapping[str, int] = field(factory=dict)
    fault: Fault | None = None
    _calls: int = 0

    def see(self, values: Mapping[str, int]) -> None:
        """Take the values before the next statement."""
        self.now = values

    def see_let(self, place: int, value: float) -> None:
        """Take a value of a `let`."""
        least, greatest = self.lets.get(place, (value, value))
        self.lets[place] = min(least, value), max(greatest, value)

    def op(self, _: tuple[int | None, ...]) -> None:
        """Count a call, and keep the values there if it is wanted."""
        if self._calls in self.wanted:
            self.values[self._calls] = self.now
        self._calls += 1


def trace(declared: Declarations, wanted: Collection[int], *arguments: int) -> Trace:
    """Run the order of a program once more, for a rank or for a block's microbatches, up to a
    fault.
    """
    traced = Trace(wanted)
    names = {**declared.names, "see": traced.see, "see_let": traced.see_let}
    # The claims were kept in the first run.
    names["claim"] = lambda *_: None
    exec(generate(declared.tree, declared.positive, True).program, names)
    if isinstance(declared.order, syntax.Repeated):
        names["program"](*arguments, traced.op)
        return traced
    try:
        names["program"](*arguments, traced.op, *declared.stages_of_rank())
    except Fault as fault:
        traced.fault = fault
    return traced


#: The least and the greatest value that each `let` has, by the place of its name in the text.
Lets = dict[int, tuple[float, float]]


def values_of_lets(tree: syntax.Schedule, params: Params) -> tuple[Lets, list[Lets]]:
    """The least and the greatest value of each `let` of a program that compiles: of those before
    its order, and for each rank of those in it.
    """
    declared = declare(tree, params)
    layout = declared.layout()
    items = {}
    for item in tree.items:
        if isinstance(item, syntax.Let):
            value = declared.names[variable(item.name.text)]
            items[item.name.span.start] = value, value
    of_ranks: list[Lets] = []
    if isinstance(declared.order, syntax.Rank):
        for rank in range(declared.params["ranks"]):
            declared.begin(rank, layout)
            of_ranks.append(trace(declared, (), rank).lets)
    return items, of_ranks


def _values(
    declared: Declarations, wanted: Collection[Recorded]
) -> dict[Recorded, list[Values]]:
    """The loop variables at some ops, for each time that one of them is called."""
    kept: dict[Recorded, list[Values]] = {}
    layout = declared.layout()
    is_block = isinstance(declared.order, syntax.Repeated)
    runs = _block_ops(declared, layout) if is_block else _rank_ops(declared, layout)
    for arguments, ops in runs:
        calls = {index: op for index, op in ops if op in wanted}
        if calls:
            traced = trace(declared, calls, *arguments)
            for index, op in calls.items():
                kept.setdefault(op, []).append(
                    _loops(declared, op, traced.values[index])
                )
    return kept


#: What an order runs for, and the ops that it calls then, with the numbers of the calls.
_Run = tuple[Sequence[int], Iterable[tuple[int, Recorded]]]


def _rank_ops(declared: Declarations, layout: Layout) -> Iterator[_Run]:
    """The calls of each rank, with the ops that they record."""
    for rank in range(declared.params["ranks"]):
        declared.begin(rank, layout)
        calls: Calls = []
        declared.names["program"](rank, calls.extend, *declared.stages_of_rank())
        order = record(rank, layout, declared.sites, calls)
        rows = zip(order.locations, order.stages, order.microbatches, strict=True)
        yield (rank,), enumerate(rows)


def _block_ops(declared: Declarations, layout: Layout) -> Iterator[_Run]:
    """The calls of each repeat of a building block, with the ops that they record."""
    for repeat in declared.repeats(layout):
        calls: list[int] = []
        declared.names["program"](*repeat.microbatches, calls.extend)
        drawing = draw(
            layout, declared.sites, calls, [len(calls) // (declared.sites.width + 1)]
        )
        columns = drawing.columns
        rows = (columns.source, columns.stage, columns.microbatch)
        ops = zip(*(column.tolist() for column in rows), strict=True)
        yield repeat.microbatches, zip(drawing.call.tolist(), ops, strict=True)


def _loops(declared: Declarations, op: Recorded, values: Mapping[str, int]) -> Values:
    """The variables of the loops around an op."""
    return tuple((name, int(values[name])) for name in declared.sites.ops[op[0]].loops)


def _rounded(
    diagnostic: Diagnostic, tree: syntax.Schedule, params: Params
) -> Iterator[str]:
    """Notes for a missing op: quotients in the bounds of its loop that are rounded down."""
    if diagnostic.code != "missing-op" or not diagnostic.labels:
        return
    place = diagnostic.labels[0].span
    values = declare(tree, params).params
    for loop in syntax.walk(tree):
        if not isinstance(loop, syntax.For | syntax.Repeat):
            continue
        if not loop.span.start <= place.start < loop.span.end:
            continue
        bounds = loop.range if isinstance(loop, syntax.For) else loop.count
        for node in syntax.walk(bounds):
            match node:
                case expressions.Binary(
                    "/", expressions.Reference(name), expressions.Number(divisor)
                ) if values.get(name, 0) % (divisor or 1):
                    quotient = values[name] // divisor
                    yield f"`{name} / {divisor}` is {quotient}: `/` rounds down"


def with_variables(
    diagnostics: list[Diagnostic], tree: syntax.Schedule, params: Params
) -> list[Diagnostic]:
    """Diagnostics with notes from the program's run: the loop variables at ops where ranks wait,
    and quotients that are rounded down in loops whose ops are missing.
    """
    diagnostics = [
        evolve(each, notes=(*each.notes, *_rounded(each, tree, params)))
        for each in diagnostics
    ]
    waits = [wait for diagnostic in diagnostics for wait in diagnostic.waits]
    wanted: set[Recorded] = set()
    for wait in waits:
        wanted.update(wait.at.recorded)
        wanted.update(wait.until.recorded if wait.until else ())
    if not wanted:
        return diagnostics
    kept = _values(declare(tree, params), wanted)

    def with_values(stand: Stand) -> Stand:
        values = next((kept[op] for op in stand.recorded if op in kept), [])
        there = values[stand.earlier] if stand.earlier < len(values) else ()
        return evolve(stand, variables=there)

    def told(wait: Wait) -> Wait:
        until = with_values(wait.until) if wait.until else None
        return evolve(wait, at=with_values(wait.at), until=until)

    changed = []
    for diagnostic in diagnostics:
        if diagnostic.waits:
            diagnostic = diagnostic.with_waits(tuple(map(told, diagnostic.waits)))
        changed.append(diagnostic)
    return changed
