"""A recorded run beside the prediction for its plan; and the ranks that hold up the others."""

from statistics import fmean, median, quantiles

from attrs import evolve, frozen

from schedlang.extras.measured.recorded_run import Run
from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.schedule.actions import is_update
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.kinds import Kind
from schedlang.schedule.timeline import Timeline

#: A stage is slow if its ops of a microbatch take so many times as long as those of the other
#: stages.
SLOW = 1.2
#: A stage is unsteady if the middle half of its ops of a kind spreads over so much of their median.
UNSTEADY = 0.3


@frozen
class Durations:
    """How long the ops of a kind on a stage took, in microseconds.

    `mean` is the cost of such an op. `ratio` is the mean over the median of the other stages'
    means, and 1 where there is no other stage. `spread` is the distance between the quartiles, over
    the median.
    """

    kind: Kind
    stage: int
    count: int
    mean: float
    ratio: float
    spread: float


@frozen
class Straggler:
    """A rank that holds up the others: with stages that are slow, by `ratio` at most, or unsteady,
    by `spread` at most.
    """

    rank: int
    stages: tuple[int, ...]
    ratio: float | None = None
    spread: float | None = None


@frozen
class Comparison:
    """A run, the timeline that was predicted for it with some costs, and what its ops took."""

    run: Run
    costs: Costs
    predicted: Timeline
    durations: tuple[Durations, ...]
    stragglers: tuple[Straggler, ...]

    @property
    def measured(self) -> Timeline:
        """The median step of the run."""
        return self.run.median

    @property
    def step(self) -> float:
        """The median makespan of the run's steps."""
        return median(step.makespan for step in self.run.steps)

    @property
    def error(self) -> float:
        """How much longer the predicted makespan is than the measured one, as a part of that."""
        return self.predicted.makespan / self.step - 1 if self.step else 0.0


def compare(plan: Plan, run: Run, costs: Costs = UNIT) -> Comparison:
    """A run beside the prediction for its plan, with the run's own costs where `costs` leave them
    open.

    ValueError if the run is of other ops, or for a wrong number of costs.
    """
    updates = run.plan.layout.updates
    if plan.kernels and updates > plan.layout.updates:
        plan = plan.for_updates(updates)
    # Names and parameters may differ: what counts is what the ranks do.
    if _ops(plan) != _ops(run.plan):
        raise ValueError(
            f"the run is of {_title(run.plan)}, {_title(plan)} has other ops; -p sets parameters"
        )
    predicted = predict(plan, run, costs)
    durations = tuple(_durations(run))
    stragglers = _stragglers(run, durations)
    return Comparison(run, predicted.costs, predicted.timeline, durations, stragglers)


def stragglers_of(run: Run) -> tuple[Straggler, ...]:
    """The ranks of a run that hold up the others: the slow ones, then the unsteady ones."""
    return _stragglers(run, tuple(_durations(run)))


def _stragglers(run: Run, durations: tuple[Durations, ...]) -> tuple[Straggler, ...]:
    return *_slow_ranks(run, durations), *_unsteady_ranks(run, durations)


def predict(plan: Plan, run: Run, costs: Costs = UNIT) -> Execution:
    """The execution of a plan with the costs that a run shows, in microseconds, where `costs` leave
    them open; ValueError for a plan of another number of stages.
    """
    # The costs in the program are in a unit of its own.
    return simulate(evolve(plan, costs=UNIT), costs.over(run.costs))


def _ops(plan: Plan) -> list[str]:
    """The ops of each rank, without transfers, which may be placed in other ways, and without
    gathers and sums, which a run does not record.
    """
    return [actions.compute().without_collectives().text() for actions in plan.ranks]


def _title(plan: Plan) -> str:
    params = [f"{name} = {value}" for name, value in plan.params.items()]
    return f"`{plan.name}` ({', '.join(params)})"


def _durations(run: Run) -> list[Durations]:
    """The durations of every kind of op on every stage, by kind."""
    times: dict[Kind, dict[int, list[float]]] = {}
    bars = [bar for step in run.steps for rank in step.ranks for bar in rank]
    for bar in sorted(bars, key=lambda bar: bar.kind):
        by_stage = times.setdefault(Kind(bar.kind), {})
        by_stage.setdefault(bar.stage, []).append(bar.end - bar.start)
    durations = []
    for kind, by_stage in times.items():
        means = {stage: fmean(values) for stage, values in by_stage.items()}
        for stage, values in sorted(by_stage.items()):
            ratio = _ratio(means, stage)
            spread = _spread(values)
            durations.append(
                Durations(kind, stage, len(values), means[stage], ratio, spread)
            )
    return durations


def _ratio(times: dict[int, float], stage: int) -> float:
    """The time of a stage over the median of the others'."""
    others = [time for other, time in times.items() if other != stage]
    if not others or not median(others):
        return 1.0
    return times[stage] / median(others)


def _spread(values: list[float]) -> float:
    """The distance between the quartiles, over the median."""
    if len(values) == 1:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def _slow_ranks(run: Run, durations: tuple[Durations, ...]) -> list[Straggler]:
    """The ranks with slow stages, the slowest first."""
    # What a microbatch takes on each stage; an optimizer step is not for a microbatch.
    work = dict.fromkeys(range(len(run.plan.placement)), 0.0)
    for duration in durations:
        if not is_update(duration.kind):
            work[duration.stage] += duration.mean
    stragglers = []
    for rank in range(len(run.plan.ranks)):
        ratios = {stage: _ratio(work, stage) for stage in run.plan.stages_of(rank)}
        stages = [stage for stage, ratio in ratios.items() if ratio >= SLOW]
        if stages:
            worst = max(ratios[stage] for stage in stages)
            stragglers.append(Straggler(rank, tuple(stages), ratio=worst))
    return sorted(stragglers, key=lambda straggler: -(straggler.ratio or 0))


def _unsteady_ranks(run: Run, durations: tuple[Durations, ...]) -> list[Straggler]:
    """The ranks with unsteady stages, the most unsteady first."""
    spreads: dict[int, float] = {}
    for duration in durations:
        if duration.spread >= UNSTEADY:
            before = spreads.get(duration.stage, 0.0)
            spreads[duration.stage] = max(before, duration.spread)
    stragglers = []
    for rank in range(len(run.plan.ranks)):
        stages = [stage for stage in run.plan.stages_of(rank) if stage in spreads]
        if stages:
            worst = max(spreads[stage] for stage in stages)
            stragglers.append(Straggler(rank, tuple(stages), spread=worst))
    return sorted(stragglers, key=lambda straggler: -(straggler.spread or 0))
