"""The partition and the schedule in turn, each at what the other one has become.

With the order of the ops as it is, layers move from stage to stage as long as that makes the
simulated step shorter; then the program is compiled anew at the costs of these stages, which its
passes see; and so on, until neither finds more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf

from attrs import field, frozen

from schedlang.compiler import compile
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.extras.search.partition.balance import (
    Capacity,
    Sizes,
    balanced,
    capacities,
    equal_sizes,
    evenest_stages,
    held_activations,
    neighbours,
    work_of_ranks,
)
from schedlang.extras.search.partition.layer_costs import (
    NOTHING,
    Layer,
    check_layers,
    costs_of_stages,
    names_by_stage,
)
from schedlang.files.programs import names, path_of
from schedlang.files.reading import read_source
from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule

#: A turn that gains less than this share of the makespan is the last.
_LEAST_GAIN = 1e-6
#: A program whose first step takes longer than the best one's by this factor is left out.
_FAR = 1.15
#: The most turns of partition and schedule; two or three are usual.
_MOST_TURNS = 8


@frozen(kw_only=True)
class Partitioned:
    """A model in stages: `sizes` are how many layers each has, `costs` what stages of these layers
    cost, and `execution` what their schedule does at these costs.
    """

    sizes: Sizes
    costs: Costs = field(repr=False)
    execution: Execution = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in the unit of the layers' times."""
        return self.execution.timeline.makespan

    def layout(self, layers: Sequence[Layer]) -> list[list[str]]:
        """The names of the layers by stage, as `split(..., layout=...)` of the runtime takes it."""
        return names_by_stage(layers, self.sizes)


@frozen(kw_only=True)
class Fit(Partitioned):
    """A partition for a `program`, a name of the gallery or a text, with its `params`: the `plan`
    is compiled at the costs of these stages.
    """

    program: Source | str = field(repr=False)
    params: Mapping[str, int]
    plan: Plan = field(repr=False)


def fit(
    layers: Sequence[Layer],
    program: Source | str,
    params: Mapping[str, int],
    links: Costs = UNIT,
    capacity: Capacity | None = None,
    starts: Iterable[Sizes] = (),
    fixed: Layer = NOTHING,
) -> Fit:
    """The best partition that is found for a program, and its plan: what `compile` gives at the
    costs of these stages.

    `links`, `fixed` and `capacity` are those of `costs_of_stages` and `partition`. It starts from
    `partition`, from the most even stages, from equal ones, and from further `starts`, and is never
    worse than any of these that fits.

    CompileError for a program that does not compile; ValueError where there are too few layers, or
    none of the partitions fits.
    """
    return _Attempt.of(
        Fitting(layers, links, capacity, fixed), program, params, starts
    ).fit()


def search(
    layers: Sequence[Layer],
    programs: Iterable[tuple[str, Mapping[str, int]]],
    links: Costs = UNIT,
    capacity: Capacity | None = None,
    fixed: Layer = NOTHING,
) -> list[Fit]:
    """The best partitions for some programs of the gallery, each a name with its parameters, the
    one with the shortest step first.

    A program is left out that takes 15 % longer than the best when its layers are first shared out;
    so is one that does not compile at its parameters, has more stages than there are layers, or
    does not fit.
    """
    search = Fitting(layers, links, capacity, fixed)
    attempts = []
    for program, params in programs:
        doing(f"{program}: sharing out {len(layers)} layers")
        # Another program may do; where none does, the list is empty.
        with suppress(CompileError, ValueError):
            attempts.append(_Attempt.of(search, program, params))
    fits: list[Fit] = []
    shortest = inf
    for attempt in sorted(attempts, key=lambda attempt: value_of(attempt.first)):
        if attempt.first.makespan > _FAR * shortest:
            continue
        doing(f"{attempt.program}: moving layers")
        with suppress(ValueError):
            fits.append(attempt.fit())
            shortest = min(shortest, fits[-1].makespan)
    return sorted(fits, key=lambda found: found.makespan)


def gallery(ranks: int, microbatches: int) -> Iterator[tuple[str, dict[str, int]]]:
    """The programs of the gallery that train one model with a flush, on each microbatch as it is:
    no updates within a step, no second pipeline with a replica, no slices, skips, frozen stages, or
    copies to the host. All at their defaults, but for the sizes.
    """
    params = {"ranks": ranks, "microbatches": microbatches}
    for name in names():
        try:
            plan = compile(read_source(path_of(name)), params)
        except CompileError:
            continue
        layout = plan.layout
        is_plain = layout.slices == layout.updates == len(layout.pipelines) == 1
        trains = not (plan.is_forward_only or plan.has_updates or plan.kernels)
        is_chain = not (layout.skips or layout.edges or layout.frozen)
        if is_plain and trains and is_chain and not plan.columns.is_beside.any():
            yield name, params


@frozen
class _Attempt:
    """A program, and the partitions to begin with under it."""

    search: "Fitting"
    program: Source | str
    params: Mapping[str, int]
    layout: Layout
    trials: "list[Trial]"

    @classmethod
    def of(
        cls,
        search: "Fitting",
        program: Source | str,
        params: Mapping[str, int],
        starts: Iterable[Sizes] = (),
    ) -> "_Attempt":
        """A program with the partitions that `fit` begins with, and its errors."""
        plan = compile(program, params, search.links)
        check_layers(search.layers, plan.layout.pieces)
        attempt = cls(search, program, params, plan.layout, [])
        sizes_of_starts = _starts(search.layers, plan, search.capacity, starts)
        attempt.trials.extend(map(attempt.compiled, sizes_of_starts))
        return attempt

    @property
    def first(self) -> "Trial":
        """The best partition to begin with."""
        return min(self.trials, key=value_of)

    def compiled(self, sizes: Sizes) -> "Trial":
        """A partition; since passes see the costs, each has a plan of its own."""
        search = self.search
        costs = search.costs(sizes, self.layout)
        return search.at(compile(self.program, self.params, costs), sizes)

    def fit(self) -> Fit:
        """The best that is found; ValueError if it does not fit."""
        best = min(map(self.improved, self.trials), key=value_of)
        if best.excess > 0:
            raise ValueError(
                f"no partition was found that fits: {best.sizes} layers by stage hold "
                f"{best.excess:,.0f} bytes too much; give more ranks, or a schedule that holds "
                "fewer activations"
            )
        assert isinstance(best.plan, Plan)
        return Fit(
            program=self.program,
            params=dict(self.params),
            sizes=best.sizes,
            plan=best.plan,
            costs=best.costs,
            execution=best.execution,
        )

    def improved(self, best: "Trial") -> "Trial":
        """Layers that move under the order as it is, and the order at what the stages are then, in
        turn.
        """
        for _ in range(_MOST_TURNS):
            following = self.compiled(self.search.descended(best).sizes)
            if value_of(following) >= _less(value_of(best)):
                break
            best = following
        return best


@frozen
class Trial:
    """A partition under a plan, or a schedule with its transfers, and by how many bytes ranks hold
    too much.
    """

    sizes: Sizes
    plan: Schedule
    costs: Costs
    execution: Execution
    excess: float

    @property
    def makespan(self) -> float:
        """How long a step takes."""
        return self.execution.timeline.makespan


def value_of(trial: Trial) -> tuple[float, float]:
    """What is minimised: first what does not fit, then time."""
    return trial.excess, trial.makespan


def _less(value: tuple[float, float]) -> tuple[float, float]:
    """The value that the next trial must be below for the search to go on."""
    excess, makespan = value
    return excess, makespan * (1 - _LEAST_GAIN)


@frozen
class Fitting:
    """Partitions of some layers, under one plan or another."""

    layers: Sequence[Layer]
    links: Costs
    capacity: Capacity | None
    fixed: Layer

    def costs(self, sizes: Sizes, layout: Layout) -> Costs:
        """What the stages of a partition cost."""
        return costs_of_stages(self.layers, sizes, layout, self.links, self.fixed)

    def at(self, plan: Schedule, sizes: Sizes) -> Trial:
        """A partition under a plan."""
        costs = self.costs(sizes, plan.layout)
        execution = simulate(plan, costs)
        excess = 0.0
        if self.capacity is not None and execution.peak_bytes is not None:
            most = capacities(self.capacity, len(plan.ranks))
            over = (
                max(peak - own, 0.0)
                for peak, own in zip(execution.peak_bytes, most, strict=True)
            )
            excess = sum(over)
        return Trial(sizes, plan, costs, execution, excess)

    def descended(self, trial: Trial) -> Trial:
        """What is reached by moving a layer wherever that makes the execution better, under the
        same plan.
        """
        while True:
            better = self._first_better(trial)
            if better is None:
                return trial
            trial = better

    def _first_better(self, trial: Trial) -> Trial | None:
        enough = _less(value_of(trial))

        def slowest(sizes: Sizes) -> float:
            return max(work_of_ranks(self.layers, sizes, trial.plan.layout))

        # Those first that give the slowest rank least to do.
        for sizes in sorted(neighbours(trial.sizes), key=slowest):
            moved = self.at(trial.plan, sizes)
            if value_of(moved) < enough:
                return moved
        return None


def _starts(
    layers: Sequence[Layer],
    plan: Plan,
    capacity: Capacity | None,
    others: Iterable[Sizes],
) -> list[Sizes]:
    """The partitions to begin with."""
    layout: Layout = plan.layout
    starts = {equal_sizes(len(layers), layout.pieces), *others}
    held = held_activations(simulate(plan, UNIT, ideal=True))
    starts.add(balanced(layers, plan, held))
    starts.add(evenest_stages(layers, layout.pieces))
    if capacity is not None:
        # Where none fits, some may all the same: what is held depends on the costs too.
        with suppress(ValueError):
            starts.add(balanced(layers, plan, held, capacity))
    return sorted(starts)
