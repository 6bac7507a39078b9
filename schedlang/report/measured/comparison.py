"""A recorded run against the prediction for its plan; and who keeps the others waiting."""

from statistics import fmean, median, quantiles

from attrs import evolve, frozen

from schedlang.plan.plan import Plan
from schedlang.proof.prove import simulate
from schedlang.report.measured.run import Run
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.kinds import Kind
from schedlang.schedule.timeline import Timeline

#: A stage is slow whose ops of a microbatch take so many times as long as those of the other
#: stages.
SLOW = 1.2
#: It is unsteady if the middle half of its ops of a kind spreads over such a part of their median.
UNSTEADY = 0.3


@frozen
class Durations:
    """How long the ops of a kind on a stage took, in microseconds.

    `mean` is what the costs of a run take. `ratio` is that over the median of the other stages'
    means, and 1 where there is no other stage. `spread` is the distance of the quartiles over the
    median.
    """

    kind: Kind
    stage: int
    count: int
    mean: float
    ratio: float
    spread: float


@frozen
class Straggler:
    """A rank whose stages are slow, each with its `ratio`; or with `spread`, one of whose ops
    vary.
    """

    rank: int
    stages: tuple[int, ...]
    ratio: float | None = None
    spread: float | None = None


@frozen
class Comparison:
    """A run, the timeline predicted for it at some costs, and what its ops took."""

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
        """By what part of the measured makespan the predicted one is longer."""
        return self.predicted.makespan / self.step - 1 if self.step else 0.0


def compare(plan: Plan, run: Run, costs: Costs = UNIT) -> Comparison:
    """The prediction for a plan that was run, at the run's own costs where others leave it open.

    ValueError if the run is of other ops, or for a wrong number of costs.
    """
    updates = run.plan.layout.updates
    if plan.kernels and updates > plan.layout.updates:
        plan = plan.for_updates(updates)
    if [each.compute().text() for each in plan.ranks] != [
        each.compute().text() for each in run.plan.ranks
    ]:
        raise ValueError(
            f"the run is of {_named(run.plan)}, {_named(plan)} has other ops; -p sets parameters"
        )
    costs = costs.over(run.costs)
    # What the program says is in a unit of its own.
    predicted = simulate(evolve(plan, costs=UNIT), costs).timeline
    durations = tuple(_durations(run))
    return Comparison(run, costs, predicted, durations, tuple(_stragglers(run, durations)))


def _named(plan: Plan) -> str:
    return (
        f"`{plan.name}` ({', '.join(f'{name} = {value}' for name, value in plan.params.items())})"
    )


def _durations(run: Run) -> list[Durations]:
    """Of every kind and stage that ran, by kind."""
    times: dict[Kind, dict[int, list[float]]] = {}
    for bar in sorted(
        (bar for step in run.steps for rank in step.ranks for bar in rank), key=lambda bar: bar.kind
    ):
        times.setdefault(Kind(bar.kind), {}).setdefault(bar.stage, []).append(bar.end - bar.start)
    found = []
    for kind, by_stage in times.items():
        means = {stage: fmean(each) for stage, each in by_stage.items()}
        for stage, each in sorted(by_stage.items()):
            ratio = _ratio(means, stage)
            low, middle, high = (
                quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
            )
            spread = (high - low) / middle if middle else 0.0
            found.append(Durations(kind, stage, len(each), means[stage], ratio, spread))
    return found


def _ratio(times: dict[int, float], stage: int) -> float:
    """The time of a stage over the median of the others'."""
    others = [time for other, time in times.items() if other != stage]
    return times[stage] / median(others) if others and median(others) else 1.0


def _stragglers(run: Run, durations: tuple[Durations, ...]) -> list[Straggler]:
    """The ranks with slow stages, and those with unsteady ones, the worst of each first."""
    work = dict.fromkeys(range(len(run.plan.placement)), 0.0)
    for each in durations:
        # An optimizer step is none of a microbatch.
        work[each.stage] += each.mean if each.kind != Kind.U else 0.0
    slow = []
    unsteady = []
    for rank in range(len(run.plan.ranks)):
        mine = run.plan.stages_of(rank)
        ratios = {stage: ratio for stage in mine if (ratio := _ratio(work, stage)) >= SLOW}
        if ratios:
            slow.append(Straggler(rank, tuple(ratios), ratio=max(ratios.values())))
        spreads = [
            (each.spread, each.stage)
            for each in durations
            if each.stage in mine and each.spread >= UNSTEADY
        ]
        if spreads:
            stages = sorted({stage for _, stage in spreads})
            unsteady.append(Straggler(rank, tuple(stages), spread=max(spreads)[0]))
    slow.sort(key=lambda each: -(each.ratio or 0))
    return slow + sorted(unsteady, key=lambda each: -(each.spread or 0))
