"""What a program says before its order: its parameters, values and functions, stages, weights and
links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from attrs import define, field

from schedlang.diagnostics.diagnostic import counted
from schedlang.language import syntax
from schedlang.language.arithmetic import multiply, quotient, require, rest
from schedlang.language.codegen import Codegen, variable
from schedlang.language.faults import Fault
from schedlang.schedule.layout import Layout, Pipeline, wrong_skip
from schedlang.schedule.schedule import MOST_STEPS, Claim, WeightRule

#: How many values of each function are remembered.
_REMEMBERED = 1 << 16


@define
class Declarations:
    """One run of a program: the names it has bound so far, what it has laid out, the steps left."""

    given: Mapping[str, int]
    params: dict[str, int] = field(factory=dict)
    codegen: Codegen = field(factory=Codegen)
    names: dict[str, Any] = field(factory=dict)
    placement: list[int] = field(factory=list)
    pipelines: list[Pipeline] = field(factory=list)
    claims: list[Claim] = field(factory=list)
    rules: list[syntax.Weights] = field(factory=list)
    links: tuple[int, ...] = ()
    skips: list[syntax.Skip] = field(factory=list)
    steps: int = MOST_STEPS
    #: The place where the last pipeline says how many microbatches it runs.
    share: int = 0

    def __attrs_post_init__(self) -> None:
        self.names |= {
            "divide_quotient": quotient,
            "divide_rest": rest,
            "multiply": multiply,
            "require": require,
            "count": self.count,
            "repeat": self.repeat,
            "claim": self.claim,
        }

    def item(self, item: syntax.Node) -> None:
        """Bind a parameter, a value or a function, check a requirement, or lay out stages."""
        match item:
            case syntax.Param():
                self.param(item)
            case syntax.Stage():
                self.pipeline("", item, self.params["microbatches"])
            case syntax.Pipeline(name, None, _, microbatches, stage):
                self.share = self.codegen.place(microbatches)
                self.names[variable(name.text)] = self.pipeline(
                    name.text, stage, self.evaluate(microbatches)
                )
            case syntax.Pipeline():
                self.alike_pipelines(item)
            case syntax.Weights():
                self.rules.append(item)
            case syntax.Skip():
                self.skips.append(item)
            case syntax.Link(name, number):
                ranks = self.count(0, self.params["ranks"], 1, self.codegen.place(item))
                self.links = tuple(map(int, map(self.function(name, number), ranks)))
            case syntax.Fn(name):
                exec("\n".join(self.codegen.statement(item)), self.names)
                # What it calls and refers to stays the same; ranks mostly ask for the same values.
                self.names[variable(name.text)] = lru_cache(_REMEMBERED)(
                    self.names[variable(name.text)]
                )
            case _:
                exec("\n".join(self.codegen.statement(item)), self.names)

    def param(self, item: syntax.Param) -> None:
        """Bind a parameter to the value given, or its default."""
        name = item.name.text
        value = self.given[name] if name in self.given else self.evaluate(item.default)
        if name in ("ranks", "microbatches", "slices") and value < 1:
            raise Fault(
                "parameter", f"`{name}` is {value}, it must be 1 or more", self.codegen.place(item)
            )
        if abs(value) > 10**9:
            raise Fault(
                "parameter",
                f"`{name}` is {value}, it must be within ±10^9",
                self.codegen.place(item),
            )
        self.params[name] = self.codegen.params[name] = self.names[variable(name)] = int(value)

    def evaluate(self, node: syntax.Node | None) -> int:
        """The value of an expression."""
        assert node is not None
        return eval(self.codegen.expression(node), self.names)  # type: ignore[no-any-return]

    def function(self, parameter: syntax.Name | None, body: syntax.Node) -> Callable[..., int]:
        """An expression as a function of a name."""
        name = variable(parameter.text) if parameter else ""
        return eval(f"lambda {name}: {self.codegen.expression(body)}", self.names)  # type: ignore[no-any-return]

    def alike_pipelines(self, item: syntax.Pipeline) -> None:
        """Lay out pipelines with numbers from 0."""
        assert item.number
        assert item.range
        place = self.codegen.place(item.range)
        number = variable(item.number.text)
        start = self.evaluate(item.range.start)
        stop = self.evaluate(item.range.stop)
        if start != 0 or stop < 1:
            raise Fault(
                "pipelines", f"the pipelines are {start} .. {stop}, they must start from 0", place
            )
        self.share = self.codegen.place(item.microbatches)
        stages: list[Callable[[int], int]] = []
        for each in self.count(0, stop, 1, place):
            self.names[number] = each
            stages.append(
                self.pipeline(
                    f"{item.name.text}({each})", item.stage, self.evaluate(item.microbatches)
                )
            )
        del self.names[number]
        # Past the last pipeline there are no stages.
        self.names[variable(item.name.text)] = lambda i, stage: (
            stages[i](stage) if 0 <= i < stop else -1
        )

    def pipeline(self, name: str, item: syntax.Stage, microbatches: int) -> Callable[[int], int]:
        """Lay out the stages of a pipeline; the function that gives their numbers."""
        start = self.evaluate(item.range.start)
        stop = self.evaluate(item.range.stop)
        place = self.codegen.place(item)
        if start != 0 or stop < 1:
            raise Fault(
                "placement", f"the stages are {start} .. {stop}, they must start from 0", place
            )
        if self.pipelines and not (name and self.pipelines[0].name):
            raise Fault(
                "repeated-part",
                "a schedule has one `stage` line, or pipelines with one each",
                place,
            )
        if microbatches < 1:
            raise Fault(
                "pipelines",
                f"the pipeline runs {microbatches} microbatches, it must run 1 or more",
                place,
            )
        if self.pipelines and stop != self.pipelines[0].stop:
            message = (
                f"the pipeline has {counted(stop, 'stage')}, the first one has "
                f"{self.pipelines[0].stop}"
            )
            raise Fault(
                "pipelines", message, place, "pipelines are replicas of one model: cut all alike"
            )
        stages = self.count(start, stop, 1, place)
        rank_of = self.function(item.name, item.rank)
        first = len(self.placement)
        for stage in stages:
            rank = int(rank_of(stage))
            if not 0 <= rank < self.params["ranks"]:
                message = (
                    f"stage {stage} is on rank {rank}, there are ranks 0 to "
                    f"{self.params['ranks'] - 1}"
                )
                raise Fault("no-such-rank", message, self.codegen.place(item.rank))
            self.placement.append(rank)
        self.pipelines.append(Pipeline(name, first, first + stop, microbatches))
        # Past the pipeline's own stages there are none, not those of the next pipeline.
        return lambda stage: first + stage if 0 <= stage < stop else -1

    def layout(self) -> Layout:
        """What the items have laid out; by default, one stage on each rank."""
        ranks = self.params["ranks"]
        microbatches = self.params["microbatches"]
        if not self.pipelines:
            self.placement = list(self.count(0, ranks, 1, 0))
            self.pipelines = [Pipeline("", 0, ranks, microbatches)]
        slices = self.params.get("slices", 1)
        layout = Layout(
            tuple(self.placement),
            tuple(self.pipelines),
            slices,
            links=self.links,
            skips=self._skips(),
        )
        if layout.microbatches != microbatches:
            message = (
                f"the pipelines run {layout.microbatches} microbatches, `microbatches` is "
                f"{microbatches}"
            )
            raise Fault("pipelines", message, self.share)
        return layout

    def _skips(self) -> tuple[tuple[int, int], ...]:
        """The earlier and the later stage of every skip, as all pipelines have them."""
        found: dict[tuple[int, int], None] = {}
        stages = self.pipelines[0].stop
        for item in self.skips:
            earlier = self.function(item.name, item.earlier)
            later = self.function(item.name, item.later)
            place = self.codegen.place(item)
            for number in self.count(
                self.evaluate(item.range.start), self.evaluate(item.range.stop), 1, place
            ):
                skip = int(earlier(number)), int(later(number))
                wrong = "is there already" if skip in found else wrong_skip(*skip, stages)
                if wrong:
                    raise Fault(
                        "skip", f"the skip from stage {skip[0]} to stage {skip[1]} {wrong}", place
                    )
                found[skip] = None
        return tuple(found)

    def weights(self, layout: Layout) -> tuple[WeightRule, ...]:
        """The rule of every stage; a later line overrides an earlier one."""
        rules = [WeightRule()] * len(layout.placement) if self.rules else []
        for item in self.rules:
            delay = self.evaluate(item.rule.updates) if item.rule.updates else 0
            if delay < 0:
                message = f"weights delayed by {delay} updates, it must be 0 or more"
                raise Fault("weight-version", message, self.codegen.place(item))
            for stage in self.stages(item.stages, len(rules)) if item.stages else range(len(rules)):
                rules[stage] = WeightRule(item.rule.name, delay)
        return tuple(rules)

    def stages(self, bounds: syntax.Range, count: int) -> range:
        """A range of stages, of which there are so many."""
        start = self.evaluate(bounds.start)
        stop = self.evaluate(bounds.stop)
        if not 0 <= start <= stop <= count:
            message = f"the stages {start} .. {stop}, there are stages 0 .. {count}"
            raise Fault("no-such-stage", message, self.codegen.place(bounds))
        return range(start, stop)

    def claim(
        self, holds: Callable[[], int], reason: str | None, place: int, names: list[str]
    ) -> None:
        """Keep a claim for when the figures among its names are known."""
        self.claims.append(Claim(holds, reason, place, self.names, frozenset(names)))

    def count(self, start: int, stop: int, weight: int, place: int) -> range:
        """A loop's range, if it stays within the limit of steps."""
        rounds = max(stop - start, 0)
        self.steps -= rounds * weight
        if self.steps < 0:
            raise Fault(
                "too-many-ops",
                f"the program has more than {MOST_STEPS:,} loop rounds and ops",
                place,
            )
        return range(start, stop)

    def repeat(self, rounds: int, weight: int, place: int) -> range:
        """The range of a `repeat`."""
        if rounds < 0:
            raise Fault("negative-repeat", f"`repeat` {rounds} times", place)
        return self.count(0, rounds, weight, place)
