"""What a program says before its order: its parameters, values and functions, stages, weights and
links. The Python of a program calls what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.diagnostics.source import Span
from schedlang.diagnostics.wrong_arguments import Params
from schedlang.language import syntax
from schedlang.language.arithmetic import (
    decimal,
    divide,
    listed,
    multiply,
    quotient,
    require,
    rest,
    steps_of,
)
from schedlang.language.codegen import LARGEST_PARAMETER, Code, generate
from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.language.stages import (
    NumberedStageOf,
    StageOf,
    numbered_stage_of,
    stage_of,
    stage_range,
)
from schedlang.schedule.layout import Layout, Pipeline, of_graph, pieces_of
from schedlang.schedule.layout_rules import wrong_with
from schedlang.schedule.schedule import MOST_STEPS, Claim, Pass, WeightRule

#: The most values that an example of a list shows.
_SHOWN = 4
#: How many values of each function are remembered.
_REMEMBERED = 1 << 16
#: The parameters of how many there are of something.
SIZES = ("ranks", "microbatches", "slices")

T = TypeVar("T")
RankOf = Callable[[int], int]


class _NotPositive(Exception):
    """A parameter is less than 1, which the generated Python takes as impossible."""


@frozen
class StageLine:
    """`stage s in start .. stop on …`: the rank of each stage."""

    start: int
    stop: int
    rank_of: RankOf
    location: int
    rank_location: int


@frozen
class Price:
    """A cost that the program gives. Its function `of` has so many `indices`: none, a stage, a
    stage and a microbatch, or also a slice. A cost of transfers has two ranks, and a `capacity`, a
    `link` or a `keeper` one rank, or none.
    """

    word: str
    is_memory: bool
    of: Callable[..., Any]
    indices: int
    location: int
    value_location: int


@frozen
class _Weights:
    """A line about the weights of the stages `start` up to `stop`, or of all stages."""

    name: str
    delay: int
    start: int
    stop: int | None
    range_location: int
    location: int


@frozen
class _Edges:
    """A line about edges or skips. For each number from `start` up to `stop`, the function `ends`
    gives the two stages.
    """

    start: int
    stop: int
    ends: Callable[[int], tuple[int, int]]
    location: int


@frozen
class _Frozen:
    """A line about frozen stages: `start` up to `stop`."""

    start: int
    stop: int
    location: int


@frozen
class Repeat:
    """One repeat of a building block: its microbatches, and the slot at which it begins."""

    microbatches: range
    offset: int


@define
class Declarations:
    """One run of a program's items: the names bound so far, the layout so far, and the steps that
    are left.
    """

    tree: syntax.Schedule
    given: Params
    positive: frozenset[str]
    python: Code
    params: dict[str, int] = field(factory=dict)
    lists: dict[str, tuple[int, ...]] = field(factory=dict)
    names: dict[str, Any] = field(factory=dict)
    placement: list[int] = field(factory=list)
    pipelines: list[Pipeline] = field(factory=list)
    claims: list[Claim] = field(factory=list)
    prices: list[Price] = field(factory=list)
    _passes: list[Pass] = field(factory=list)
    steps: int = MOST_STEPS
    #: The rank that the order runs for, and its stages.
    rank: int | None = None
    held: tuple[int, ...] = ()
    _weights: list[_Weights] = field(factory=list)
    #: The link of each rank, and the keeper of each, by these words.
    _per_rank: dict[str, tuple[int, ...]] = field(factory=dict)
    _edges: list[_Edges] = field(factory=list)
    _skips: list[_Edges] = field(factory=list)
    _frozen: list[_Frozen] = field(factory=list)
    #: The locations of ranges that counted, and of those that would have to count down, with their
    #: bounds as they were first met.
    _counted: set[int] = field(factory=set)
    _backwards: dict[int, tuple[int, int]] = field(factory=dict)
    #: By the fields of the layout, the location of each item; the last one is that of the field.
    _places: dict[str, list[int]] = field(factory=dict)
    #: How many forwards the stages laid out so far have.
    _forwards: int = 0

    def __attrs_post_init__(self) -> None:
        self.names |= {
            "decimal": decimal,
            "divide": divide,
            "divide_quotient": quotient,
            "divide_rest": rest,
            "multiply": multiply,
            "listed": listed,
            "require": require,
            "remembered": lru_cache(_REMEMBERED),
            "count": self.count,
            "by_steps": self.by_steps,
            "repeat": self.repeat,
            "claim": self.claim,
            "own_stage": self.own_stage,
            "repeated_part": self.repeated_part,
            "param": self.param,
            "param_list": self.param_list,
            "check_length": self.check_length,
            "stage_line": StageLine,
            "stages": self.only_pipeline,
            "pipeline": self.pipeline,
            "pipelines": self.numbered_pipelines,
            "link": self.per_rank,
            "keeper": self.per_rank,
            # These wait until it is known how many stages there are, or until the order is there.
            "weights": _keeper(self._weights, _Weights),
            "edge": _keeper(self._edges, _Edges),
            "skip": _keeper(self._skips, _Edges),
            "frozen": _keeper(self._frozen, _Frozen),
            "frozen_model": self.frozen_model,
            "price": _keeper(self.prices, Price),
            "capacity": _keeper(self.prices, Price),
            "run_pass": _keeper(self._passes, Pass),
        }

    @property
    def spans(self) -> tuple[Span, ...]:
        """The locations in the program that faults refer to."""
        return self.python.spans

    @property
    def sites(self) -> Sites:
        """The ops and claims of the program."""
        return self.python.sites

    def run_items(self) -> None:
        """Run what stands before the order, and bind the order as a function."""
        exec(self.python.items, self.names)
        exec(self.python.program, self.names)

    def param(self, name: str, default: Callable[[], int] | None, location: int) -> int:
        """The value of a parameter: the given one, or its default."""
        if name in self.given:
            given = self.given[name]
            # `check_text` has refused a list.
            assert not isinstance(given, Sequence)
            value = given
        else:
            assert default is not None
            value = default()
        if name in SIZES and value < 1:
            raise Fault(
                "parameter", f"`{name}` is {value}, it must be 1 or more", location
            )
        self._check_size(name, value, location)
        self.params[name] = int(value)
        if value < 1 and name in self.positive:
            raise _NotPositive
        return int(value)

    def param_list(
        self,
        name: str,
        default: Callable[[], tuple[int, ...]],
        length: int,
        location: int,
    ) -> Callable[[int, int], int]:
        """A list that a user may give, as a function of an index; by default its values."""
        given = self.given.get(name)
        if given is None:
            given = default()
        values = tuple(map(int, given if isinstance(given, Sequence) else (given,)))
        for value in values:
            self._check_size(name, value, location)
        shown = ",".join("N" * min(length, _SHOWN)) + ",…" * (length > _SHOWN)
        help = f"a user gives all of them: -p {name}={shown}"
        self.check_length(name, len(values), length, location, help)
        self.lists[name] = values
        return listed(name, values)

    def check_length(
        self, name: str, count: int, length: int, location: int, help: str | None = None
    ) -> None:
        """A fault for a list that has another number of values than it is declared with."""
        if count != length:
            message = f"`{name}` has {counted(count, 'value')}, it must have {length}"
            raise Fault("list-length", message, location, help)

    @staticmethod
    def _check_size(name: str, value: int, location: int) -> None:
        """A fault for a value of a parameter that is too large."""
        if abs(value) > LARGEST_PARAMETER:
            raise Fault(
                "parameter", f"`{name}` is {value}, it must be within ±10^9", location
            )

    def size(self, name: str, location: int) -> int:
        """The number of ranks or microbatches, for a line that needs it."""
        if name not in self.params:
            help = f"move `param {name}` above this line"
            raise Fault(
                "missing-part", f"`param {name}` stands below this line", location, help
            )
        return self.params[name]

    def only_pipeline(self, line: StageLine) -> None:
        """Lay out the stages of a schedule that has one pipeline, which runs all microbatches."""
        self._lay_out("", line, self.size("microbatches", line.location))

    def pipeline(
        self, name: str, share: int, line: StageLine, microbatches: int
    ) -> StageOf:
        """Lay out one of several pipelines, with a name of its own."""
        self._places["microbatches"] = [share]
        return self._lay_out(name, line, microbatches)

    def numbered_pipelines(
        self,
        name: str,
        share: int,
        start: int,
        stop: int,
        location: int,
        pipeline_of: Callable[[int], tuple[StageLine, int]],
    ) -> NumberedStageOf:
        """Lay out pipelines that differ by a number, which counts from 0."""
        if start != 0 or stop < 1:
            message = f"the pipelines are {start} .. {stop}, they must start from 0"
            raise Fault("pipelines", message, location)
        self._places["microbatches"] = [share]
        pipelines = [
            self._lay_out(f"{name}({number})", *pipeline_of(number))
            for number in self.count(0, stop, 1, location)
        ]
        return numbered_stage_of(pipelines)

    def _lay_out(self, name: str, line: StageLine, microbatches: int) -> StageOf:
        """Lay out the stages of a pipeline."""
        location = line.location
        if line.start != 0 or line.stop < 1:
            message = (
                f"the stages are {line.start} .. {line.stop}, they must start from 0"
            )
            raise Fault("placement", message, location)
        if self.pipelines and not (name and self.pipelines[0].name):
            message = "a schedule has one `stage` line, or pipelines with one each"
            raise Fault("repeated-part", message, location)
        self.size("ranks", location)
        self.expect(line.stop, microbatches, location)
        first = len(self.placement)
        stages = self.count(line.start, line.stop, 1, location)
        self.placement += [int(line.rank_of(stage)) for stage in stages]
        self.pipelines.append(Pipeline(name, first, first + line.stop, microbatches))
        self._places.setdefault("pipelines", []).append(location)
        placed = self._places.setdefault("placement", [])
        placed += [line.rank_location] * line.stop
        return stage_of(first, line.stop)

    def expect(self, stages: int, microbatches: int, location: int) -> None:
        """A fault if the forwards of some stages and microbatches are more ops than a schedule may
        have. Checked before any op is recorded.
        """
        self._forwards += stages * microbatches * self.params.get("slices", 1)
        if self._forwards > MOST_STEPS:
            message = (
                f"the forward of every microbatch on every stage makes {self._forwards:,} ops, "
                f"there can be {MOST_STEPS:,}"
            )
            help = "take smaller sizes: a schedule is the ops of one update"
            raise Fault("too-many-ops", message, location, help)

    def weight_rules(self, layout: Layout) -> tuple[WeightRule, ...]:
        """The rule of every stage; a later line overrides an earlier one."""
        rules = [WeightRule()] * len(layout.placement) if self._weights else []
        for line in self._weights:
            try:
                rule = WeightRule(line.name, line.delay)
            except ValueError as error:
                raise Fault("weight-version", str(error), line.location) from None
            stop = len(rules) if line.stop is None else line.stop
            for stage in stage_range(line.start, stop, len(rules), line.range_location):
                # There is one version of weights that do not change.
                if layout.trains(stage):
                    rules[stage] = rule
        return tuple(rules)

    @property
    def models(self) -> bool:
        """Whether the pipelines are several models, and no replicas of one."""
        return any(
            isinstance(item, syntax.Pipeline) and item.word == "model"
            for item in self.tree.items
        )

    def _ends(self, field: str, lines: Sequence[_Edges]) -> list[tuple[int, int]]:
        """The two stages of each edge, or skip, that some lines declare."""
        ends: list[tuple[int, int]] = []
        places = self._places[field] = []
        for line in lines:
            for number in self.count(line.start, line.stop, 1, line.location):
                earlier, later = map(int, line.ends(number))
                ends.append((earlier, later))
                places.append(line.location)
        return ends

    def _frozen_stages(self) -> tuple[int, ...]:
        """The frozen stages, numbered as in the first pipeline."""
        stages = pieces_of(self.pipelines, self.models)
        places: dict[int, int] = {}
        for line in self._frozen:
            for stage in stage_range(line.start, line.stop, stages, line.location):
                places.setdefault(stage, line.location)
        self._places["frozen"] = list(places.values())
        return tuple(sorted(places))

    def frozen_model(self, name: str, location: int) -> None:
        """Freeze the weights of a model, or of several models that differ by a number."""
        for pipeline in self.pipelines:
            if pipeline.family == name:
                self._frozen.append(_Frozen(pipeline.start, pipeline.stop, location))

    def per_rank(self, *values: Any) -> None:
        """Declare the link to the host on which each rank copies, or the rank that keeps what each
        rank offloads.
        """
        price = Price(*values)
        location = price.location
        ranks = self.count(0, self.size("ranks", location), 1, location)
        self._per_rank[price.word] = tuple(
            int(price.of(rank) if price.indices else price.of()) for rank in ranks
        )
        self._places[f"{price.word}s"] = [location] * len(ranks)

    def layout(self) -> Layout:
        """The layout that the items declare. By default, each rank has one stage."""
        ranks = self.params["ranks"]
        microbatches = self.params["microbatches"]
        if not self.pipelines:
            self.expect(ranks, microbatches, 0)
            self.placement = list(self.count(0, ranks, 1, 0))
            self.pipelines = [Pipeline("", 0, ranks, microbatches)]
        edges = self._ends("edges", self._edges)
        layout = Layout(
            tuple(self.placement),
            tuple(self.pipelines),
            self.params.get("slices", 1),
            links=self._per_rank.get("link", ()),
            skips=tuple(self._ends("skips", self._skips)),
            edges=of_graph(edges, self.pipelines, self.models),
            frozen=self._frozen_stages(),
            models=self.models,
            keepers=self._per_rank.get("keeper", ()),
        )
        wrong = wrong_with(layout, ranks, microbatches)
        if wrong:
            places = self._places.get(wrong.field, [0])
            location = places[-1 if wrong.item is None else wrong.item]
            raise Fault(wrong.code, wrong.message, location, wrong.help)
        return layout

    def passes(self, layout: Layout) -> tuple[Pass, ...]:
        """The passes, in order. Ranges of stages are replaced by the stages."""
        stages = len(layout.placement)
        passes = []
        for each in self._passes:
            if each.name == "recompute":
                start, stop, location = each.values
                range = stage_range(start, stop, stages, location)
                each = evolve(each, values=(range,))
            passes.append(each)
        return tuple(passes)

    # The order

    @property
    def order(self) -> syntax.Rank | syntax.Repeated:
        """The item that says what the ranks do."""
        orders = syntax.Rank | syntax.Repeated
        return next(item for item in self.tree.items if isinstance(item, orders))

    def every_rank(self) -> range:
        """All ranks; a fault if they are too many."""
        return self.count(0, self.params["ranks"], 1, self.sites.order)

    def begin(self, rank: int, layout: Layout) -> None:
        """Prepare to run the order for a rank."""
        self.rank = rank
        self.held = tuple(layout.stages_of(rank))

    def stages_of_rank(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """The stages of the current rank, and the same by the numbers of its chunks."""
        return self.held, dict(enumerate(self.held))

    def repeats(self, layout: Layout) -> list[Repeat]:
        """The repeats of a building block that cover all microbatches."""
        assert isinstance(self.order, syntax.Repeated)
        interval = self.names["interval"]()
        location = self.sites.interval
        if interval < 1:
            message = f"the block repeats every {interval} slots, it must be 1 or more"
            raise Fault("block", message, location)
        together = len(self.order.microbatches)
        microbatches = max(pipeline.microbatches for pipeline in layout.pipelines)
        return [
            Repeat(range(repeat * together, (repeat + 1) * together), repeat * interval)
            for repeat in self.count(0, -(-microbatches // together), 1, location)
        ]

    def claim(self, location: int, values: dict[str, int]) -> None:
        """Record a claim; it is checked once the figures are known."""
        self.claims.append(
            Claim(self.sites.claims[location], location, self.rank, values)
        )

    def own_stage(self, number: int, location: int) -> int:
        """The stage that a rank holds as one of its chunks."""
        if 0 <= number < len(self.held):
            return self.held[number]
        holds = counted(len(self.held), "stage")
        message = f"`stage({number})` on rank {self.rank}, which holds {holds}"
        raise Fault("no-such-stage", message, location)

    def repeated_part(self, name: str, location: int) -> None:
        """A rank has one `warmup` and one `steady`."""
        raise Fault("repeated-part", f"a rank has one `{name}`", location)

    def count(self, start: int, stop: int, weight: int, location: int) -> range:
        """The range of a loop, if it stays within the limit of steps."""
        if stop < start:
            # It may count on another rank: a warm-up is often empty on the last one alone.
            self._backwards.setdefault(location, (start, stop))
            return range(0)
        self._counted.add(location)
        self.steps -= (stop - start) * weight
        if self.steps < 0:
            message = f"the program has more than {MOST_STEPS:,} loop rounds and ops"
            raise Fault("too-many-ops", message, location)
        return range(start, stop)

    def by_steps(
        self,
        start: int,
        stop: int,
        weight: int,
        location: int,
        step: int,
        step_location: int,
    ) -> range:
        """The numbers of a loop with a step."""
        # Steps are checked also where the range is empty.
        first, rounds = steps_of(start, stop, step, step_location)
        if stop < start:
            return self.count(start, stop, weight, location)
        self.count(0, rounds, weight, location)
        return range(first, first + step * rounds, step)

    def empty_ranges(self) -> dict[int, tuple[int, int]]:
        """The bounds of ranges that were empty in every loop, since they would have to count down,
        by their locations.
        """
        return {
            location: bounds
            for location, bounds in self._backwards.items()
            if location not in self._counted
        }

    def repeat(self, rounds: int, weight: int, location: int) -> range:
        """The range of a `repeat`."""
        if rounds < 0:
            help = "where it may be less than 0, write `repeat max(n, 0)`"
            raise Fault("negative-repeat", f"`repeat` {rounds} times", location, help)
        return self.count(0, rounds, weight, location)


def _keeper(kept: list[T], make: Callable[..., T]) -> Callable[..., None]:
    """A function that appends a line of the program to a list."""

    def keep(*values: Any) -> None:
        kept.append(make(*values))

    return keep


def declare(tree: syntax.Schedule, given: Params) -> Declarations:
    """What a program declares for some parameters. Raises `Unfinished` for a fault on the way."""
    # At first all are taken to be 1 or more, which most are: so divisions by them need no check.
    # Where one is not, the Python is made again without that; each time some parameter is struck
    # off, so it comes to an end.
    positive = frozenset(
        item.name.text for item in tree.items if isinstance(item, syntax.Param)
    )
    while True:
        declared = Declarations(tree, given, positive, generate(tree, positive, False))
        try:
            declared.run_items()
            return declared
        except _NotPositive:
            positive -= {name for name, value in declared.params.items() if value < 1}
        except Fault as fault:
            raise Unfinished(fault, declared) from None


class Unfinished(Exception):
    """A fault before the order of a program, and what the program had declared until then."""

    def __init__(self, fault: Fault, declared: Declarations) -> None:
        super().__init__(fault, declared)
        self.fault = fault
        self.declared = declared
