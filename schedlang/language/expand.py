"""Syntax tree + parameters → schedule: the program is run once per rank, and its ops are
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, reduce
from typing import Any

from attrs import define, field

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source
from schedlang.diagnostics.waits import Values
from schedlang.language import syntax
from schedlang.language.calls import record
from schedlang.language.declarations import Declarations
from schedlang.language.faults import Fault, Met, values_at, values_text
from schedlang.language.names import check_names
from schedlang.language.pricing import program_costs, program_objective
from schedlang.language.recorder import Recorder, make_stream, place_op
from schedlang.language.scopes import nearest
from schedlang.language.variables import Notes, NotingRecorder
from schedlang.passes import fill_weights, fill_within, recompute, reorder, squeeze
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.findings import ranks_text
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Recorded, Schedule

_ORDERS = syntax.Rank | syntax.Repeated
_PASSES = syntax.Pass | syntax.Fill | syntax.Recompute
_COSTS = syntax.Cost | syntax.Objective


def expand(
    source: Source, tree: syntax.Schedule, params: Mapping[str, int], costs: Costs = UNIT
) -> Schedule:
    """The schedule that a program describes for some parameters; CompileError with everything wrong
    with it.

    Where `costs` leave something open, it is as the program gives it; ValueError if they are for
    other stages.
    """
    found = check_names(source, tree) + _check_params(source, tree, params)
    if found:
        raise CompileError(found)
    try:
        return _Expansion(source, tree, Declarations(params), costs).schedule()
    except (RecursionError, MemoryError, SyntaxError):
        place = Label(tree.name.span)
        raise CompileError(
            [Diagnostic("nesting", "the program is nested too deeply", (place,), source)]
        ) from None


def _recall(
    source: Source, tree: syntax.Schedule, params: Mapping[str, int], wanted: frozenset[Recorded]
) -> dict[Recorded, list[Values]]:
    """The loop variables at some ops, from another run of the program."""
    declared = Declarations(params)
    notes = Notes(tree, declared.codegen.spans, wanted)
    _Expansion(source, tree, declared, UNIT, partial(NotingRecorder, notes=notes)).recorders()
    return notes.values


def _check_params(
    source: Source, tree: syntax.Schedule, params: Mapping[str, int]
) -> list[Diagnostic]:
    declared = {item.name.text: item for item in tree.items if isinstance(item, syntax.Param)}
    found = []
    for name in params.keys() - declared.keys():
        message = f"the schedule `{tree.name.text}` has no parameter `{name}`"
        help = nearest(name, declared) or f"it has {', '.join(f'`{each}`' for each in declared)}"
        found.append(
            Diagnostic("unknown-parameter", message, (Label(tree.name.span),), source, help=help)
        )
    for name, param in declared.items():
        if param.default is None and name not in params:
            message = f"the parameter `{name}` has no value"
            help = f"give one: -p {name}=4"
            found.append(
                Diagnostic(
                    "missing-parameter", message, (Label(param.name.span),), source, help=help
                )
            )
    return found


@define
class _Expansion:
    """A program, what it has declared, and the faults met in its order."""

    source: Source
    tree: syntax.Schedule
    declared: Declarations
    costs: Costs
    make_recorder: Callable[[int, Layout, bool, bool], Recorder] = Recorder
    faults: list[Met] = field(factory=list)

    def recorders(self) -> tuple[Layout, list[Recorder]]:
        """Run the items in order, then the rank block for every rank."""
        declared = self.declared
        declared.codegen.place(self.tree.name)  # the first place stands for the schedule as a whole
        for item in self.tree.items:
            if not isinstance(item, _ORDERS | _PASSES | _COSTS):
                declared.item(item)
        layout = declared.layout()
        self.costs.check(len(layout.placement))
        return layout, self.record(self.order, layout)

    @property
    def order(self) -> syntax.Rank | syntax.Repeated:
        """The item that says what ranks do."""
        (order,) = (item for item in self.tree.items if isinstance(item, _ORDERS))
        return order

    @property
    def is_block(self) -> bool:
        """Whether ops are drawn at time slots."""
        return isinstance(self.order, syntax.Repeated)

    def schedule(self) -> Schedule:
        """The schedule with what the program says of it, after the program's passes."""
        declared = self.declared
        try:
            layout, recorders = self.recorders()
            own_costs = program_costs(self.tree.items, declared, recorders[0].splits_backward)
            schedule = Schedule(
                name=self.tree.name.text,
                params=declared.params,
                layout=layout,
                ranks=tuple(recorder.actions for recorder in recorders),
                source=self.source,
                spans=tuple(declared.codegen.spans),
                weights=declared.weights(layout),
                slots=tuple(tuple(each.slots) for each in recorders)
                if isinstance(self.order, syntax.Repeated)
                else None,
                stream=make_stream(recorders),
                claims=tuple(declared.claims),
                costs=self.costs.over(own_costs),
                objective=program_objective(self.tree.items),
                recall=partial(_recall, self.source, self.tree, dict(declared.given)),
            )
            return reduce(
                self.apply,
                (item for item in self.tree.items if isinstance(item, _PASSES)),
                schedule,
            )
        except Fault as fault:
            raise CompileError(
                [self.diagnostic([Met(fault, None, values_text(declared.params))])]
            ) from None

    def record(self, order: syntax.Rank | syntax.Repeated, layout: Layout) -> list[Recorder]:
        """The ops of every rank; CompileError with the faults of all ranks."""
        declared = self.declared
        codegen = self.declared.codegen
        text = codegen.program(order)
        splits = "W" in codegen.words or any(
            isinstance(item, syntax.Fill) for item in self.tree.items
        )
        ranks = declared.count(0, declared.params["ranks"], 1, codegen.place(order))
        recorders = [
            self.make_recorder(rank, layout, splits, "slices" in declared.params) for rank in ranks
        ]
        exec(compile(text, "<schedule>", "exec"), declared.names)
        if isinstance(order, syntax.Repeated):
            self.run_block(order, recorders)
        else:
            for recorder in recorders:
                if not self.run_plain(recorder):
                    self.run_rank(recorder)
        if self.faults:
            raise CompileError(self.diagnostics())
        return recorders

    def run_plain(self, recorder: Recorder) -> bool:
        """Run the rank block for one rank, if its ops can be recorded at once; not if any may be
        wrong.
        """
        declared = self.declared
        codegen = self.declared.codegen
        calls = list[Any]()
        if not codegen.is_plain or len(codegen.arities) != 1 or self.make_recorder is not Recorder:
            return False
        (arity,) = codegen.arities
        steps = declared.steps
        claims = len(declared.claims)
        declared.names |= {
            "op": calls.extend,
            "begin_batch": int,
            "end_batch": int,
            "bare": (None,) * arity,
        }
        with suppress(Fault):
            declared.names["program"](recorder.rank)
            if record(recorder, calls, arity, codegen.overlaps):
                return True
        declared.steps = steps
        del declared.claims[claims:]
        return False

    def run_rank(self, recorder: Recorder) -> None:
        """Run the rank block for one rank; a fault ends that rank's run, not the others'."""
        names = self.declared.names
        names |= {
            "op": recorder.op,
            "transfer": recorder.transfer,
            "bare": (),
            "begin_batch": recorder.begin_batch,
            "end_batch": recorder.end_batch,
            "begin_part": recorder.begin_part,
            "end_part": recorder.end_part,
        }
        try:
            names["program"](recorder.rank)
        except Fault as fault:
            self.faults.append(Met(fault, recorder.rank, values_at(fault.__traceback__)))

    def run_block(self, block: syntax.Repeated, recorders: list[Recorder]) -> None:
        """Repeat a building block until all microbatches have passed; each repeat is one interval
        later.
        """
        declared = self.declared
        interval = declared.evaluate(block.interval)
        place = declared.codegen.place(block.interval)
        if interval < 1:
            raise Fault(
                "block", f"the block repeats every {interval} slots, it must be 1 or more", place
            )
        together = len(block.microbatches)
        layout = recorders[0].layout
        microbatches = max(pipeline.microbatches for pipeline in layout.pipelines)
        for repeat in declared.count(0, -(-microbatches // together), 1, place):
            declared.names["place"] = partial(place_op, recorders, interval * repeat)
            declared.names["program"](*range(repeat * together, (repeat + 1) * together))
        for recorder in recorders:
            recorder.sort_by_slot()

    def apply(self, schedule: Schedule, item: syntax.Node) -> Schedule:
        """Apply a pass."""
        place = self.declared.codegen.place(item)
        if schedule.stream:
            raise Fault("pass", "a pass changes the order of one update: `steady` has none", place)
        try:
            match item:
                case syntax.Pass(name):
                    return {"squeeze": squeeze, "reorder": reorder}[name](schedule)
                case syntax.Recompute(_, bounds):
                    return recompute(
                        schedule, self.declared.stages(bounds, len(schedule.placement))
                    )
                case syntax.Fill(limit) if limit is not None:
                    return _filled_within(schedule, self.declared.evaluate(limit), place)
            return fill_weights(schedule)
        except ValueError as error:
            raise Fault("pass", f"the ops cannot be moved: {error}", place) from None

    def diagnostics(self) -> list[Diagnostic]:
        """The faults of all ranks; one mistake met on several ranks is one diagnostic."""
        groups: dict[tuple[str, int], list[Met]] = {}
        for met in self.faults:
            groups.setdefault((met.fault.code, met.fault.place), []).append(met)
        return [self.diagnostic(group) for group in groups.values()]

    def diagnostic(self, group: list[Met]) -> Diagnostic:
        first = group[0]
        notes = [f"here with {first.values}"] if first.values else []
        if len(group) > 1:
            notes.append(
                f"and on {ranks_text([each.rank for each in group[1:] if each.rank is not None])}"
            )
        label = Label(self.declared.codegen.spans[first.fault.place])
        fault = first.fault
        return Diagnostic(
            fault.code, fault.message, (label,), self.source, tuple(notes), fault.help
        )


def _filled_within(schedule: Schedule, limit: int, place: int) -> Schedule:
    filled = fill_within(schedule, limit)
    if filled is None:
        help = "give it more, or write an order that holds less"
        raise Fault("memory", f"no order was found that holds at most {limit}", place, help)
    return filled
