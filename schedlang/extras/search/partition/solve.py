"""Optimise partition, placement and order by turns, each for the current state of the others."""

from collections.abc import Sequence

from attrs import evolve, field, frozen

from schedlang.extras.search.optimize.problem import Problem
from schedlang.extras.search.optimize.program_text import program_of
from schedlang.extras.search.partition.balance import Capacity, capacities
from schedlang.extras.search.partition.joint import (
    Fit,
    Fitting,
    Partitioned,
    Trial,
    value_of,
)
from schedlang.extras.search.partition.layer_costs import NOTHING, Layer
from schedlang.extras.search.partition.place import place
from schedlang.lowering.choice import choose_lowering
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.kinds import INPUT_HALVES, Kind
from schedlang.schedule.schedule import Schedule

#: The limit of turns of placement and partition; two or three are usual.
_MOST_TURNS = 8


@frozen(kw_only=True)
class Solution(Partitioned):
    """A partition with its own `schedule`: the ops of its stages on ranks, in order, with
    transfers.
    """

    schedule: Schedule = field(repr=False)

    def program(self) -> str:
        """The text of a program with this placement and this order, to be compiled at `costs`."""
        problem = Problem.of(evolve(self.schedule, costs=self.costs))
        return program_of(problem, evolve(problem.as_given, source="placed"))


def solve(
    layers: Sequence[Layer],
    fits: Sequence[Fit],
    links: Costs = UNIT,
    capacity: Capacity | None = None,
    fixed: Layer = NOTHING,
) -> Solution:
    """Optimise partition, placement and order together, starting from each of the given fits; the
    result is at least as good as the best of them.

    The number of stages is that of the program, and stages may be on any ranks. ValueError without
    fits.
    """
    if not fits:
        raise ValueError("there is no program to begin with: none was found that fits")
    search = Fitting(layers, links, capacity, fixed)
    best = min((_solved(search, fit) for fit in fits), key=value_of)
    return Solution(
        sizes=best.sizes, schedule=best.plan, costs=best.costs, execution=best.execution
    )


def _solved(search: Fitting, fit: Fit) -> Trial:
    """The best trial that is found from one fit."""
    best = search.at(fit.plan, fit.sizes)
    for _ in range(_MOST_TURNS):
        try:
            weights = best.costs.bytes_of_weights(len(best.plan.placement))
            placed = place(_problem(best, search.capacity), weights).graph
        except ValueError:
            # The stages of this program cannot move.
            return best
        schedule = evolve(placed.reordered(placed.order), costs=best.costs)
        lowered = choose_lowering(schedule, best.costs).schedule
        following = search.descended(search.at(lowered, best.sizes))
        if value_of(following) >= value_of(best):
            return best
        best = following
    return best


def _problem(trial: Trial, capacity: Capacity | None) -> Problem:
    """The problem of a trial's ops at its costs; with a capacity, memory is counted in bytes."""
    costs = trial.costs
    ranks = len(trial.plan.ranks)
    in_bytes = costs.bytes(len(trial.plan.placement))
    if capacity is None or in_bytes is None:
        return Problem.of(evolve(trial.plan, costs=costs), float("inf"))
    (half,) = INPUT_HALVES
    by_bytes = evolve(
        costs,
        forward_memory=in_bytes[Kind.F],
        input_memory=in_bytes[half],
        backward_memory=None,
        weight_memory=None,
    )
    return Problem.of(evolve(trial.plan, costs=by_bytes), capacities(capacity, ranks))
