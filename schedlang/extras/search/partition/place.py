"""Search the placement of stages on ranks, together with an order. Ranks may have different numbers
of stages.

The value of a placement is that of the best of a few greedy orders. Stages move to other ranks, or
two stages swap their ranks, as long as that shortens the step.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from math import inf

import numpy as np
from attrs import evolve, frozen

from schedlang.diagnostics.activity import doing
from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.problem import Problem
from schedlang.extras.search.optimize.starts import starts
from schedlang.passes.op_graph import ROUNDING
from schedlang.schedule.columns import actions_of
from schedlang.schedule.cuts import best_cuts
from schedlang.schedule.kinds import MAKERS, REPEATS, Kind
from schedlang.schedule.schedule import Schedule

#: The rank of each stage.
Placement = tuple[int, ...]
#: The number of orders to try for a placement.
_ORDERS = 4
#: The order of a microbatch's ops on one stage.
_TURN = {
    kind: turn
    for turn, kinds in enumerate(((Kind.F,), REPEATS, MAKERS[Kind.B], (Kind.W,)))
    for kind in kinds
}


def place(problem: Problem, weights: Sequence[float] = ()) -> Problem:
    """The problem on the best placement that is found; its `graph.order` is the best order found
    there. It is never worse than the given placement and order, if these stay within the limits.
    With the `weights` of stages, in the unit of the limits, a rank's limit is lowered by those of
    its stages.

    Every rank has at least one stage. ValueError for a schedule whose stages cannot move one by
    one: it has several pipelines, slices, updates of its own, or overlapped ops.
    """
    schedule = problem.graph.schedule
    wrong = _why_not(problem)
    if wrong:
        raise ValueError(wrong)
    own = schedule.layout.placement
    beside = tuple(weights) or (0.0,) * len(own)
    search = _Placing(schedule, problem.limits, beside, _work(problem))
    as_given = search.problem(problem.graph.schedule, own)
    best = _Placed(as_given, as_given.value(as_given.graph.order))
    firsts = {own, *_first_placements(search.work, len(problem.limits))}
    best = min(
        [best, *map(search.placed, sorted(firsts))], key=lambda placed: placed.value
    )
    while (better := search.first_better(best)) is not None:
        best = better
    return best.problem


def _why_not(problem: Problem) -> str | None:
    """The reason why the stages of a problem cannot move one by one; None if they can."""
    schedule = problem.graph.schedule
    layout = schedule.layout
    if problem.gathered or problem.summed:
        return "it has gathers or sums: these have their places on their ranks"
    if len(layout.pipelines) > 1:
        return "it has several pipelines: each has its stages on all ranks"
    if layout.slices > 1:
        return "it has slices: only programs of whole microbatches are placed anew"
    if set(schedule.columns.kind.tolist()) - set(_TURN):
        return "it has updates of its own: only programs with a flush are placed anew"
    if schedule.columns.group.any():
        return "it has ops that overlap: stages that move take them apart"
    return None


def _work(problem: Problem) -> list[float]:
    """The work of each stage for all microbatches."""
    graph = problem.graph
    work = [0.0] * len(graph.schedule.placement)
    for ops, time in zip(graph.ops, graph.time, strict=True):
        work[ops[0][1]] += time
    return work


@frozen
class _Placed:
    """A placement with an order for it, and the value of that order."""

    problem: Problem
    value: float


@frozen
class _Placing:
    schedule: Schedule
    limits: tuple[float, ...]
    weights: tuple[float, ...]
    work: list[float]

    def problem(self, schedule: Schedule, placement: Placement) -> Problem:
        """The problem of a schedule, whose ranks' limits are lowered by their weights."""
        left = list(self.limits)
        for weight, rank in zip(self.weights, placement, strict=True):
            left[rank] -= weight
        return Problem.of(schedule, left)

    def placed(self, placement: Placement) -> _Placed:
        """Find the best of a few orders for a placement."""
        doing(f"stages on ranks {' '.join(map(str, placement))}")
        problem = self.problem(moved(self.schedule, placement), placement)
        orders = islice(starts(Instance.of(problem)), _ORDERS)
        best, value = min(orders, key=lambda found: found[1], default=(None, inf))
        if best is None:
            return _Placed(problem, inf)
        return _Placed(Problem.of(problem.graph.reordered(best), problem.limits), value)

    def first_better(self, placed: _Placed) -> _Placed | None:
        """The first better neighbour; neighbours with more even work come first."""
        enough = placed.value * (1 - ROUNDING)
        placement = placed.problem.graph.schedule.layout.placement
        for neighbour in sorted(self._neighbours(placement), key=self._slowest):
            # The remaining neighbours have even slower ranks, and no order is faster than those.
            if self._slowest(neighbour) >= enough:
                return None
            moved_there = self.placed(neighbour)
            if moved_there.value < enough:
                return moved_there
        return None

    def _slowest(self, placement: Placement) -> float:
        """The work of the slowest rank, a lower bound of the step."""
        loads = [0.0] * len(self.limits)
        for work, rank in zip(self.work, placement, strict=True):
            loads[rank] += work
        return max(loads)

    def _neighbours(self, placement: Placement) -> Iterator[Placement]:
        """The placements with one stage on another rank, or with two stages swapped."""
        for stage, rank in enumerate(placement):
            if placement.count(rank) > 1:
                for other in range(len(self.limits)):
                    if other != rank:
                        yield (*placement[:stage], other, *placement[stage + 1 :])
        for first, second in combinations(range(len(placement)), 2):
            if placement[first] != placement[second]:
                changed = list(placement)
                changed[first] = placement[second]
                changed[second] = placement[first]
                yield tuple(changed)


def _first_placements(work: Sequence[float], ranks: int) -> Iterator[Placement]:
    """Consecutive stages with balanced work; a loop; and repeated Vs."""
    stages = len(work)
    cuts, _ = best_cuts(work, ranks, [{rank: 1.0} for rank in range(ranks)])
    yield tuple(
        rank for rank in range(ranks) for _ in range(cuts[rank], cuts[rank + 1])
    )
    yield tuple(stage % ranks for stage in range(stages))
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    yield tuple(there_and_back[stage % (2 * ranks)] for stage in range(stages))


def moved(schedule: Schedule, placement: Placement) -> Schedule:
    """The ops of a schedule with its stages on other ranks, one microbatch after the other: no
    order holds less.
    """
    columns = schedule.columns
    rank = np.array(placement)[columns.stage]
    # By rank, then microbatch, then forwards down the stages and backwards up again:
    #
    #     stages 0 and 3 on a rank      0F0 3F0 3B0 0B0   0F1 3F1 3B1 0B1 …
    turn = np.array([_TURN[Kind(kind)] for kind in columns.kind.tolist()])
    is_backward = turn > 0
    stage = np.where(is_backward, -columns.stage, columns.stage)
    order = np.lexsort((turn, stage, is_backward, columns.microbatch, rank))
    ranks = actions_of(
        len(schedule.ranks), evolve(columns.taken(order), rank=rank[order])
    )
    layout = evolve(schedule.layout, placement=placement)
    return evolve(schedule, ranks=ranks, layout=layout, slots=None)
