"""Optimise the partition and the schedule by turns.

First the order of the ops is fixed, and layers move between stages as long as that shortens the
simulated step. Then the program is compiled again with the costs of the new stages, so that its
passes see them. This repeats until neither gains anything.
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

#: The search ends when a turn gains less than this share of the makespan.
_LEAST_GAIN = 1e-6
#: A program is left out if its first step takes this many times the best program's.
_FAR = 1.15
#: The limit of turns of partition and schedule; two or three are usual.
_MOST_TURNS = 8


@frozen(kw_only=True)
class Partitioned:
    """A model in stages: the number of layers of each (`sizes`), the `costs` of these stages, and
    the `execution` of their schedule at these costs.
    """

    sizes: Sizes
    costs: Costs = field(repr=False)
    execution: Execution = field(repr=False)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end, in the unit of the layers' times."""
        return self.execution.timeline.makespan

    def layout(self, layers: Sequence[Layer]) -> list[list[str]]:
        """The names of the layers by stage, as `split(..., layout=...)` of the runtime takes it."""
        return names_by_stage(layers, self.sizes)


@frozen(kw_only=True)
class Fit(Partitioned):
    """A partition for a `program` (a name of the gallery, or a text) and its `params`, with the
    `plan` that was compiled at the costs of these stages.
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
    """Search the best partition for a program, and compile its plan at the costs of these stages.

    `links`, `fixed` and `capacity` are those of `costs_of_stages` and `partition`. The search
    starts from `partition`, from the most even stages, from equal ones, and from further `starts`;
    its result is never worse than any of these that fits.

    CompileError for a program that does not compile; ValueError if there are too few layers, or no
    partition fits.
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
    """Search the best partitions for programs of the gallery, each a name with its parameters.
    Return them sorted by the time of a step.

    A program is left out if its first partition takes 15 % longer than the best program's, if it
    does not compile at its parameters, has more stages than there are layers, or does not fit.
    """
    search = Fitting(layers, links, capacity, fixed)
    attempts = []
    for program, params in programs:
        doing(f"{program}: sharing out {len(layers)} layers")
        # A program that fails is left out, so the list may be empty.
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
    """The programs of the gallery that train one model with a flush, and their parameters: sizes as
    given, others at their defaults. Programs with updates, a second pipeline, slices, skips, frozen
    stages or copies to the host are left out.
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
    """A program, and a trial for each partition from which its search starts."""

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
        """Compile a program for each partition from which `fit` starts; raises as `fit` does."""
        plan = compile(program, params, search.links)
        check_layers(search.layers, plan.layout.pieces)
        attempt = cls(search, program, params, plan.layout, [])
        sizes_of_starts = _starts(search.layers, plan, search.capacity, starts)
        attempt.trials.extend(map(attempt.compiled, sizes_of_starts))
        return attempt

    @property
    def first(self) -> "Trial":
        """The best partition among those at the start."""
        return min(self.trials, key=value_of)

    def compiled(self, sizes: Sizes) -> "Trial":
        """Compile the program at the costs of a partition, which its passes see."""
        search = self.search
        costs = search.costs(sizes, self.layout)
        return search.at(compile(self.program, self.params, costs), sizes)

    def fit(self) -> Fit:
        """Improve all trials and return the best one; ValueError if it does not fit."""
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
        """Move layers under the plan's order, then compile an order for these stages, by turns."""
        for _ in range(_MOST_TURNS):
            following = self.compiled(self.search.descended(best).sizes)
            if value_of(following) >= _less(value_of(best)):
                break
            best = following
        return best


@frozen
class Trial:
    """A partition under a plan, or under a schedule with transfers, and the bytes by which ranks
    exceed their memory (`excess`).
    """

    sizes: Sizes
    plan: Schedule
    costs: Costs
    execution: Execution
    excess: float

    @property
    def makespan(self) -> float:
        """The time of a step."""
        return self.execution.timeline.makespan


def value_of(trial: Trial) -> tuple[float, float]:
    """The value that is minimised: first the excess of memory, then the time."""
    return trial.excess, trial.makespan


def _less(value: tuple[float, float]) -> tuple[float, float]:
    """The value that the next trial must be below for the search to go on."""
    excess, makespan = value
    return excess, makespan * (1 - _LEAST_GAIN)


@frozen
class Fitting:
    """Evaluates partitions of a model's layers under a plan."""

    layers: Sequence[Layer]
    links: Costs
    capacity: Capacity | None
    fixed: Layer

    def costs(self, sizes: Sizes, layout: Layout) -> Costs:
        """The costs of the stages of a partition."""
        return costs_of_stages(self.layers, sizes, layout, self.links, self.fixed)

    def at(self, plan: Schedule, sizes: Sizes) -> Trial:
        """Simulate a plan at the costs of a partition."""
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
        """Move single layers as long as that improves the execution of the same plan."""
        while True:
            better = self._first_better(trial)
            if better is None:
                return trial
            trial = better

    def _first_better(self, trial: Trial) -> Trial | None:
        enough = _less(value_of(trial))

        def slowest(sizes: Sizes) -> float:
            return max(work_of_ranks(self.layers, sizes, trial.plan.layout))

        # Neighbours with the least work on their slowest rank come first.
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
    """The partitions from which the search starts."""
    layout: Layout = plan.layout
    starts = {equal_sizes(len(layers), layout.pieces), *others}
    held = held_activations(simulate(plan, UNIT, ideal=True))
    starts.add(balanced(layers, plan, held))
    starts.add(evenest_stages(layers, layout.pieces))
    if capacity is not None:
        # If none fits by this estimate, the search may still find one: the activations that are
        # held depend on costs, too.
        with suppress(ValueError):
            starts.add(balanced(layers, plan, held, capacity))
    return sorted(starts)
