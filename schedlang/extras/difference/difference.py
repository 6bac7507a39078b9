"""What differs between two schedules, as data: settings, figures, what each rank does, and when it
is idle.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from attrs import evolve, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.plan.plan import Plan
from schedlang.proof.prove import simulate
from schedlang.report.alignment import Change, Run, align
from schedlang.report.bubbles.account import Account
from schedlang.report.figures import figures
from schedlang.schedule.costs import Costs
from schedlang.schedule.layout import Pipeline
from schedlang.schedule.schedule import Schedule


@frozen
class Side:
    """One of two schedules: where it is from, what its ranks do, and what an execution of it shows.

    `idle[cause][r]` is the idle time of rank r that is due to a cause, in the unit of the costs.
    """

    file: str
    plan: Plan
    figures: dict[str, Any]
    idle: dict[str, list[float]]

    @property
    def idle_time(self) -> float:
        """The idle time of all ranks."""
        return sum(map(sum, self.idle.values()))

    @property
    def ops(self) -> int:
        """How many actions compute, or copy."""
        return int((~self.plan.columns.is_transfer).sum())

    @property
    def transfers(self) -> int:
        """How many messages go from rank to rank."""
        return int(self.plan.columns.is_send.sum())


@frozen
class Setting:
    """Something that holds for a schedule as a whole, and differs: in words, of each of two."""

    name: str
    before: str
    after: str


@frozen
class RankDifference:
    """What differs in what a rank does.

    The `runs` are of `before` and `after`, all its actions by their names. `apart` are those that
    are issued as one only before, `together` those that are only after.
    """

    rank: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    runs: tuple[Run, ...]
    apart: tuple[str, ...]
    together: tuple[str, ...]

    @cached_property
    def is_equal(self) -> bool:
        """Whether the rank does the same, in the same order."""
        is_same = all(run.change is Change.EQUAL for run in self.runs)
        return is_same and not self.apart and not self.together

    def actions(self, run: Run) -> tuple[str, ...]:
        """The names of the actions of a run."""
        if run.change is Change.REMOVED:
            return self.before[run.before.start : run.before.stop]
        return self.after[run.after.start : run.after.stop]

    def count(self, change: Change) -> int:
        """Of how many actions something became."""
        return sum(run.size for run in self.runs if run.change is change)


@frozen
class Difference:
    """What differs between two schedules, rank by rank; of a rank that only one of them has, all.

    `elsewhere` are the stages that both have, but on other ranks: name, rank before, rank after.
    """

    before: Side
    after: Side
    settings: tuple[Setting, ...]
    elsewhere: tuple[tuple[str, int, int], ...]
    ranks: tuple[RankDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the two are one schedule, in all but name, parameters and origin."""
        return (
            not self.settings
            and not self.elsewhere
            and all(rank.is_equal for rank in self.ranks)
        )


def side_of(file: str, plan: Plan, costs: Costs) -> Side:
    """A schedule to be compared, simulated with some costs."""
    account = Account(simulate(plan, costs))
    return Side(file, plan, figures(plan, account), account.idle.of_ranks())


def differ(before: Side, after: Side, compute: bool = False) -> Difference:
    """What differs between two schedules; if only `compute` counts, transfers are left out."""
    plans = before.plan, after.plan
    return Difference(
        before,
        after,
        tuple(_settings(*plans)),
        tuple(_elsewhere(*plans)),
        tuple(
            rank_differences(*map(_compute, plans))
            if compute
            else rank_differences(*plans)
        ),
    )


def _compute(schedule: Schedule) -> Schedule:
    """A schedule without its transfers."""
    return evolve(
        schedule, ranks=tuple(actions.compute() for actions in schedule.ranks)
    )


def rank_differences(before: Schedule, after: Schedule) -> list[RankDifference]:
    """What differs in what each rank does, of all ranks that one of two schedules has."""
    count = max(len(before.ranks), len(after.ranks))
    return [_rank_difference(rank, before, after) for rank in range(count)]


def _rank_difference(rank: int, before: Schedule, after: Schedule) -> RankDifference:
    """What differs in what a rank does; actions are the same if they have the same name."""
    # Names are aligned as lines of text are, so an op that only moved is told as that:
    #
    #     before   F0 F1 F2 B0       F3 B1
    #     after    F0 F1    B0    F2 F3 B1
    #              equal  -  equal  +  equal        F2 is later, behind B0
    #
    # That two actions are issued as one is no matter of order, and stands beside.
    names, batches = _named(before, rank)
    names_after, batches_after = _named(after, rank)
    return RankDifference(
        rank,
        names,
        names_after,
        tuple(align(names, names_after)),
        tuple(batch for batch in batches if batch not in batches_after),
        tuple(batch for batch in batches_after if batch not in batches),
    )


def _named(schedule: Schedule, rank: int) -> tuple[tuple[str, ...], dict[str, None]]:
    """The actions of a rank, and those of several that it issues as one: by their names, in order.

    A rank that there is not does nothing.
    """
    if rank >= len(schedule.ranks):
        return (), {}
    actions = schedule.ranks[rank]
    several = (batch for batch in actions.batches() if len(batch) > 1)
    batches = dict.fromkeys(schedule.names.batch(actions, batch) for batch in several)
    return tuple(
        schedule.names.of(actions, index) for index in range(len(actions))
    ), batches


def _settings(before: Plan, after: Plan) -> list[Setting]:
    """What differs for the whole, but for numbers and places of stages."""
    texts = [_setting_texts(plan) for plan in (before, after)]
    return [
        Setting(name, text, texts[1][name])
        for name, text in texts[0].items()
        if text != texts[1][name]
    ]


def _setting_texts(plan: Plan) -> dict[str, str]:
    """What holds for a schedule as a whole, in words."""
    layout = plan.layout
    names = plan.names
    far = layout.far_edges.items()
    skips = [
        " to ".join(map(names.stage, ends))
        for number, ends in far
        if layout.is_skip(number)
    ]
    edges = [f"{earlier} to {later}" for earlier, later in layout.edges]
    rules = [str(plan.weights_of(stage)) for stage in range(len(plan.placement))]
    costs = plan.costs.to_json()
    return {
        "ranks": str(len(plan.ranks)),
        "stages": str(layout.pieces),
        "microbatches": str(layout.microbatches),
        "slices": str(layout.slices),
        "updates": str(layout.updates),
        "pipelines": _pipelines(layout.pipelines),
        "edges": _listed(edges) if edges else "from each stage to the next",
        "skips": _listed(skips),
        "frozen stages": _listed(map(str, layout.frozen)),
        "weights": _listed(rules if len(set(rules)) > 1 else rules[:1]),
        "links": _listed(map(str, layout.links)),
        "keepers": _listed(map(str, layout.keepers)),
        "transport": plan.transport,
        "costs": _listed(f"{name} {_cost(value)}" for name, value in costs.items()),
    }


def _pipelines(pipelines: Sequence[Pipeline]) -> str:
    """The pipelines, if there are several, each with its microbatches."""
    if len(pipelines) == 1:
        return "one"
    return _listed(
        f"{pipeline.name} of {counted(pipeline.microbatches, 'microbatch')}"
        for pipeline in pipelines
    )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "none"


def _cost(value: Any) -> str:
    """A cost, or those of several stages, as the command line takes them; those of a stage's
    microbatches in brackets, as a file has them.
    """
    if not isinstance(value, list):
        return str(value)
    return ",".join(
        f"[{_cost(each)}]" if isinstance(each, list) else f"{each:g}" for each in value
    )


def _elsewhere(before: Plan, after: Plan) -> list[tuple[str, int, int]]:
    """The stages that both have, but on other ranks."""
    ranks = _ranks_of_stages(before)
    ranks_after = _ranks_of_stages(after)
    return [
        (stage, rank, ranks_after[stage])
        for stage, rank in ranks.items()
        if ranks_after.get(stage, rank) != rank
    ]


def _ranks_of_stages(plan: Plan) -> dict[str, int]:
    """The rank of each stage, by its name."""
    return {plan.names.stage(stage): rank for stage, rank in enumerate(plan.placement)}
