"""Syntax tree + parameters → schedule: the program is run once per rank, and its ops are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

from attrs import define, field

from schedlang import syntax
from schedlang.arithmetic import multiply, quotient, require, rest
from schedlang.codegen import Codegen, variable
from schedlang.costs import UNIT, Costs
from schedlang.diagnostics import CompileError, Diagnostic, Label
from schedlang.faults import Fault, Met, values_at, values_text
from schedlang.findings import ranks_text
from schedlang.names import check_names
from schedlang.passes import fill_weights, fill_within, recompute, reorder, squeeze
from schedlang.pricing import program_costs, program_objective
from schedlang.recorder import Recorder, make_stream, place_op
from schedlang.schedule import Claim, Layout, Pipeline, Schedule, WeightRule
from schedlang.scopes import nearest
from schedlang.source import Source

_ORDERS = syntax.Rank | syntax.Repeated
_PASSES = syntax.Pass | syntax.Fill | syntax.Recompute
_COSTS = syntax.Cost | syntax.Objective

#: The most loop rounds and ops that a program may ask for, all ranks together.
MOST_STEPS = 20_000_000


def expand(source: Source, tree: syntax.Schedule, params: Mapping[str, int], costs: Costs = UNIT) -> Schedule:
    """The schedule that a program describes for some parameters; CompileError with everything wrong with it.

    Where `costs` leave something open, it is as the program gives it.
    """
    found = check_names(source, tree) + _check_params(source, tree, params)
    if found:
        raise CompileError(found)
    try:
        return _Expansion(source, tree, params, costs).schedule()
    except (RecursionError, MemoryError, SyntaxError):
        place = Label(tree.name.span)
        raise CompileError([Diagnostic("nesting", "the program is nested too deeply", (place,), source)]) from None


def _check_params(source: Source, tree: syntax.Schedule, params: Mapping[str, int]) -> list[Diagnostic]:
    declared = {item.name.text: item for item in tree.items if isinstance(item, syntax.Param)}
    found = []
    for name in params.keys() - declared.keys():
        message = f"the schedule `{tree.name.text}` has no parameter `{name}`"
        help = nearest(name, declared) or f"it has {', '.join(f'`{each}`' for each in declared)}"
        found.append(Diagnostic("unknown-parameter", message, (Label(tree.name.span),), source, help=help))
    for name, param in declared.items():
        if param.default is None and name not in params:
            message, help = f"the parameter `{name}` has no value", f"give one: -p {name}=4"
            found.append(Diagnostic("missing-parameter", message, (Label(param.name.span),), source, help=help))
    return found


@define
class _Expansion:
    """One run of a program: the names it has bound so far, the faults met, the steps left."""

    source: Source
    tree: syntax.Schedule
    given: Mapping[str, int]
    costs: Costs
    params: dict[str, int] = field(factory=dict)
    codegen: Codegen = field(factory=Codegen)
    names: dict[str, Any] = field(factory=dict)
    placement: list[int] = field(factory=list)
    pipelines: list[Pipeline] = field(factory=list)
    claims: list[Claim] = field(factory=list)
    rules: list[syntax.Weights] = field(factory=list)
    faults: list[Met] = field(factory=list)
    steps: int = MOST_STEPS

    def schedule(self) -> Schedule:
        """Run the items in order, then the rank block for every rank."""
        self.codegen.place(self.tree.name)  # the first place stands for the schedule as a whole
        self.names |= {
            "divide_quotient": quotient, "divide_rest": rest, "multiply": multiply, "require": require,
            "count": self.count, "repeat": self.repeat, "claim": self.claim,
        }  # fmt: skip
        try:
            for item in self.tree.items:
                if not isinstance(item, _ORDERS | _PASSES | _COSTS):
                    self.item(item)
            layout = self.layout()
            (order,) = (item for item in self.tree.items if isinstance(item, _ORDERS))
            recorders = self.record(order, layout)
            schedule = Schedule(
                name=self.tree.name.text,
                params=self.params,
                layout=layout,
                ranks=tuple(recorder.actions for recorder in recorders),
                source=self.source,
                spans=tuple(self.codegen.spans),
                weights=self.weights(layout),
                slots=tuple(tuple(each.slots) for each in recorders) if isinstance(order, syntax.Repeated) else None,
                stream=make_stream(recorders),
                claims=tuple(self.claims),
                costs=self.costs.over(self.own_costs(recorders[0].splits_backward)),
                objective=program_objective(self.tree.items),
            )
            return reduce(self.apply, (item for item in self.tree.items if isinstance(item, _PASSES)), schedule)
        except Fault as fault:
            raise CompileError([self.diagnostic([Met(fault, None, values_text(self.params))])]) from None

    def item(self, item: syntax.Node) -> None:
        """Bind a parameter, a value or a function, check a requirement, or lay out stages."""
        match item:
            case syntax.Param():
                self.param(item)
            case syntax.Stage():
                self.pipeline("", item, self.params["microbatches"])
            case syntax.Pipeline(name, microbatches, stage):
                self.pipeline(name.text, stage, self.evaluate(microbatches))
            case syntax.Weights():
                self.rules.append(item)
            case _:
                exec("\n".join(self.codegen.statement(item)), self.names)

    def param(self, item: syntax.Param) -> None:
        name = item.name.text
        value = self.given[name] if name in self.given else self.evaluate(item.default)
        if name in ("ranks", "microbatches", "slices") and value < 1:
            raise Fault("parameter", f"`{name}` is {value}, it must be 1 or more", self.codegen.place(item))
        if abs(value) > 10**9:
            raise Fault("parameter", f"`{name}` is {value}, it must be within ±10^9", self.codegen.place(item))
        self.params[name] = self.names[variable(name)] = int(value)

    def evaluate(self, node: syntax.Node | None) -> int:
        assert node is not None
        return eval(self.codegen.expression(node), self.names)  # type: ignore[no-any-return]

    def function(self, parameter: syntax.Name | None, body: syntax.Node) -> Callable[..., int]:
        """An expression as a function of a name."""
        name = variable(parameter.text) if parameter else ""
        return eval(f"lambda {name}: {self.codegen.expression(body)}", self.names)  # type: ignore[no-any-return]

    def own_costs(self, splits: bool) -> Costs:
        """The costs that the program gives."""
        return program_costs(self.tree.items, self.function, self.codegen.place, splits, len(self.placement))

    def pipeline(self, name: str, item: syntax.Stage, microbatches: int) -> None:
        """Lay out the stages of a pipeline; its name becomes the function that gives its stages' numbers."""
        start, stop = self.evaluate(item.range.start), self.evaluate(item.range.stop)
        place = self.codegen.place(item)
        if start != 0 or stop < 1:
            raise Fault("placement", f"the stages are {start} .. {stop}, they must start from 0", place)
        if (self.pipelines and not name) or (self.pipelines and not self.pipelines[0].name):
            raise Fault("placement", "a schedule has one `stage` line, or pipelines with one each", place)
        if microbatches < 1:
            raise Fault("placement", f"the pipeline runs {microbatches} microbatches, it must run 1 or more", place)
        stages = self.count(start, stop, 1, place)
        rank_of = self.function(item.name, item.rank)
        first = len(self.placement)
        for stage in stages:
            rank = int(rank_of(stage))
            if not 0 <= rank < self.params["ranks"]:
                message = f"stage {stage} is on rank {rank}, there are ranks 0 to {self.params['ranks'] - 1}"
                raise Fault("placement", message, self.codegen.place(item.rank))
            self.placement.append(rank)
        self.pipelines.append(Pipeline(name, first, first + stop, microbatches))
        # Past the pipeline's own stages there are none, not those of the next pipeline.
        self.names[variable(name)] = lambda stage: first + stage if 0 <= stage < stop else -1

    def layout(self) -> Layout:
        """What the items have laid out; by default, one stage on each rank."""
        ranks, microbatches = self.params["ranks"], self.params["microbatches"]
        if not self.pipelines:
            self.placement = list(self.count(0, ranks, 1, 0))
            self.pipelines = [Pipeline("", 0, ranks, microbatches)]
        layout = Layout(tuple(self.placement), tuple(self.pipelines), self.params.get("slices", 1))
        if layout.microbatches != microbatches:
            message = f"the pipelines run {layout.microbatches} microbatches, `microbatches` is {microbatches}"
            raise Fault("placement", message, 0)
        return layout

    def weights(self, layout: Layout) -> tuple[WeightRule, ...]:
        """The rule of every stage; a later line overrides an earlier one."""
        rules = [WeightRule()] * len(layout.placement) if self.rules else []
        for item in self.rules:
            delay = self.evaluate(item.rule.updates) if item.rule.updates else 0
            start = self.evaluate(item.stages.start) if item.stages else 0
            stop = self.evaluate(item.stages.stop) if item.stages else len(rules)
            if delay < 0 or not 0 <= start <= stop <= len(rules):
                message = f"weights of stages {start} .. {stop} delayed by {delay}, there are stages 0 .. {len(rules)}"
                raise Fault("weights", message, self.codegen.place(item))
            rules[start:stop] = [WeightRule(item.rule.name, delay)] * (stop - start)
        return tuple(rules)

    def record(self, order: syntax.Rank | syntax.Repeated, layout: Layout) -> list[Recorder]:
        """The ops of every rank; CompileError with the faults of all ranks."""
        splits = "W" in self.codegen.words or any(isinstance(item, syntax.Fill) for item in self.tree.items)
        ranks = self.count(0, self.params["ranks"], 1, self.codegen.place(order))
        if isinstance(order, syntax.Rank):
            text = self.codegen.function("program", order.name.text, order.body)
            splits = splits or "W" in self.codegen.words
            recorders = [Recorder(rank, layout, splits, "slices" in self.params) for rank in ranks]
            exec(compile(text, "<schedule>", "exec"), self.names)
            for recorder in recorders:
                self.run_rank(recorder)
        else:
            text = self.codegen.building_block("program", order)
            splits = splits or "W" in self.codegen.words
            recorders = [Recorder(rank, layout, splits, "slices" in self.params) for rank in ranks]
            exec(compile(text, "<schedule>", "exec"), self.names)
            self.run_block(order, recorders)
        if self.faults:
            raise CompileError(self.diagnostics())
        return recorders

    def run_rank(self, recorder: Recorder) -> None:
        """Run the rank block for one rank; a fault ends that rank's run, not the others'."""
        self.names |= {
            "op": recorder.op, "transfer": recorder.transfer,
            "begin_batch": recorder.begin_batch, "end_batch": recorder.end_batch,
            "begin_part": recorder.begin_part, "end_part": recorder.end_part,
        }  # fmt: skip
        try:
            self.names["program"](recorder.rank)
        except Fault as fault:
            self.faults.append(Met(fault, recorder.rank, values_at(fault.__traceback__)))

    def run_block(self, block: syntax.Repeated, recorders: list[Recorder]) -> None:
        """Repeat a building block until all microbatches have passed; each repeat is one interval later."""
        interval, place = self.evaluate(block.interval), self.codegen.place(block.interval)
        if interval < 1:
            raise Fault("placement", f"the block repeats every {interval} slots, it must be 1 or more", place)
        together, microbatches = len(block.microbatches), self.params["microbatches"]
        for repeat in self.count(0, -(-microbatches // together), 1, place):
            self.names["place"] = partial(place_op, recorders, interval * repeat)
            self.names["program"](*range(repeat * together, (repeat + 1) * together))
        for recorder in recorders:
            recorder.sort_by_slot()

    def apply(self, schedule: Schedule, item: syntax.Node) -> Schedule:
        """Apply a pass."""
        if schedule.stream:
            raise Fault("stream", "a pass changes the order of one update: `steady` has none", self.codegen.place(item))
        match item:
            case syntax.Pass(name):
                return {"squeeze": squeeze, "reorder": reorder}[name](schedule)
            case syntax.Recompute(_, bounds):
                start, stop = self.evaluate(bounds.start), self.evaluate(bounds.stop)
                return recompute(schedule, self.count(start, stop, 1, self.codegen.place(bounds)))
            case syntax.Fill(limit) if limit is not None:
                return self.fill_within(schedule, item, self.evaluate(limit))
        return fill_weights(schedule)

    def fill_within(self, schedule: Schedule, item: syntax.Node, limit: int) -> Schedule:
        filled = fill_within(schedule, limit)
        if filled is None:
            help = "give it more, or write an order that holds less"
            raise Fault("memory", f"no order was found that holds at most {limit}", self.codegen.place(item), help)
        return filled

    def claim(self, holds: Callable[[], int], reason: str | None, place: int, names: list[str]) -> None:
        """Keep a claim for when the figures among its names are known."""
        self.claims.append(Claim(holds, reason, place, self.names, frozenset(names)))

    def count(self, start: int, stop: int, weight: int, place: int) -> range:
        """A loop's range, if it stays within the limit of steps."""
        rounds = max(stop - start, 0)
        self.steps -= rounds * weight
        if self.steps < 0:
            raise Fault("too-many-ops", f"the program has more than {MOST_STEPS:,} loop rounds and ops", place)
        return range(start, stop)

    def repeat(self, rounds: int, weight: int, place: int) -> range:
        """The range of a `repeat`."""
        if rounds < 0:
            raise Fault("negative-repeat", f"`repeat` {rounds} times", place)
        return self.count(0, rounds, weight, place)

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
            notes.append(f"and on {ranks_text([each.rank for each in group[1:] if each.rank is not None])}")
        label = Label(self.codegen.spans[first.fault.place])
        fault = first.fault
        return Diagnostic(fault.code, fault.message, (label,), self.source, tuple(notes), fault.help)
