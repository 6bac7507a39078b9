"""What the variables of a program are at an op. Only messages need them: the order runs once more,
as a text that tells the values of its names before each statement.
"""

from collections.abc import Collection, Mapping
from typing import Any

from attrs import define, evolve, field

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.waits import Recorded, Stand, Values, Wait
from schedlang.language import syntax
from schedlang.language.codegen import generate
from schedlang.language.declarations import Declarations, declare
from schedlang.language.faults import Fault
from schedlang.language.record import Drawing, draw, record


@define
class Trace:
    """The calls of an order that ran once more, and the values of its names at each of them."""

    calls: list[Any] = field(factory=list)
    values: list[Mapping[str, int]] = field(factory=list)
    now: Mapping[str, int] = field(factory=dict)
    fault: Fault | None = None

    def see(self, values: Mapping[str, int]) -> None:
        """Note the values at the statement that comes next."""
        self.now = values

    def op(self, call: tuple[int | None, ...]) -> None:
        """Note a call, and the values there."""
        self.calls.extend(call)
        self.values.append(self.now)


def trace(declared: Declarations, *arguments: int) -> Trace:
    """Run the order of a program once more, for a rank or for a block's microbatches, up to a fault
    if it has one.
    """
    traced = Trace()
    names = {**declared.names, "see": traced.see, "claim": lambda *_: None}
    exec(generate(declared.tree, declared.positive, True).program, names)
    if isinstance(declared.order, syntax.Repeated):
        names["program"](*arguments, traced.op)
        return traced
    try:
        names["program"](*arguments, traced.op, *declared.stages_of_rank())
    except Fault as fault:
        traced.fault = fault
    return traced


def _values_of_ranks(
    declared: Declarations, wanted: Collection[Recorded]
) -> dict[Recorded, list[Values]]:
    """The loop variables at some ops that ranks do."""
    noted: dict[Recorded, list[Values]] = {}
    layout = declared.layout()
    for rank in range(declared.params["ranks"]):
        declared.begin(rank, layout)
        traced = trace(declared, rank)
        order = record(rank, layout, declared.sites, traced.calls)
        rows = zip(order.locations, order.stages, order.microbatches, strict=True)
        for op, values in zip(rows, traced.values, strict=False):
            if op in wanted:
                noted.setdefault(op, []).append(_loops(declared, op, values))
    return noted


def _values_of_block(
    declared: Declarations, wanted: Collection[Recorded]
) -> dict[Recorded, list[Values]]:
    """The loop variables at some ops that a building block places."""
    noted: dict[Recorded, list[Values]] = {}
    layout = declared.layout()
    width = declared.sites.width + 1
    for repeat in declared.repeats(layout):
        traced = trace(declared, *repeat.microbatches)
        drawings = [Drawing(rank) for rank in range(declared.params["ranks"])]
        draw(drawings, layout, declared.sites, traced.calls, repeat.offset)
        for _, _, stage, microbatch, location, index in (
            row for drawing in drawings for row in drawing.rows
        ):
            op = location, stage, microbatch
            if op in wanted:
                values = traced.values[index // width]
                noted.setdefault(op, []).append(_loops(declared, op, values))
    return noted


def _loops(declared: Declarations, op: Recorded, values: Mapping[str, int]) -> Values:
    """The variables of the loops around an op."""
    return tuple((name, int(values[name])) for name in declared.sites.ops[op[0]].loops)


def with_variables(
    diagnostics: list[Diagnostic], tree: syntax.Schedule, params: Mapping[str, int]
) -> list[Diagnostic]:
    """Diagnostics of ranks that wait, with the loop variables where they do."""
    stands = [
        stand
        for diagnostic in diagnostics
        for wait in diagnostic.waits
        for stand in (wait.at, wait.until)
        if stand is not None
    ]
    wanted = {op for stand in stands for op in stand.recorded}
    if not wanted:
        return diagnostics
    declared = declare(tree, params)
    is_block = isinstance(declared.order, syntax.Repeated)
    noted = (_values_of_block if is_block else _values_of_ranks)(declared, wanted)

    def filled(stand: Stand) -> Stand:
        values = next((noted[op] for op in stand.recorded if op in noted), [])
        there = values[stand.earlier] if stand.earlier < len(values) else ()
        return evolve(stand, variables=there)

    def waiting(wait: Wait) -> Wait:
        return evolve(wait, at=filled(wait.at), until=wait.until and filled(wait.until))

    return [
        diagnostic.with_waits(tuple(map(waiting, diagnostic.waits)))
        if diagnostic.waits
        else diagnostic
        for diagnostic in diagnostics
    ]
