"""Partition, placement and order, each in turn at what the others have become."""

from collections.abc import Sequence

from attrs import evolve, field, frozen

from schedlang.lowering.choice import choose_lowering
from schedlang.proof.execution import Execution
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.schedule import Schedule
from schedlang.search.optimize.problem import Answer, Problem
from schedlang.search.optimize.program import program_of
from schedlang.search.partition.balance import Capacity, Sizes, capacities
from schedlang.search.partition.joint import Fit, Fitting, Trial, value_of
from schedlang.search.partition.layers import Layer, names_by_stage
from schedlang.search.partition.place import place

#: Turns of placement and partition: two or three are what it takes.
_MOST_TURNS = 8


@frozen
class Solution:
    """How many layers each stage has, `costs` of stages of these layers, and a `schedule` of their
    ops on ranks, in order, with its transfers; `execution` is what it does at these costs.
    """

    sizes: Sizes
    schedule: Schedule = field(repr=False)
    costs: Costs = field(repr=False)
    execution: Execution = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in the unit of the layers' times."""
        return self.execution.timeline.makespan

    def layout(self, layers: Sequence[Layer]) -> list[list[str]]:
        """The names of the layers by stage, as `split(..., layout=...)` of the runtime takes it."""
        return names_by_stage(layers, self.sizes)

    def program(self) -> str:
        """The text of a program with this placement and this order, to be compiled at `costs`."""
        problem = Problem.of(evolve(self.schedule, costs=self.costs))
        value = problem.value(problem.graph.order)
        return program_of(problem, Answer(problem.graph.order, value, 0.0, "placed"))


def solve(
    layers: Sequence[Layer],
    fits: Sequence[Fit],
    links: Costs = UNIT,
    capacity: Capacity | None = None,
) -> Solution:
    """Partition, placement and order together, from programs that were fitted before: the best that
    is found from any of these, and never worse.

    There are as many stages as a program has, on any ranks. ValueError without programs.
    """
    if not fits:
        raise ValueError("there is no program to begin with: none was found that fits")
    search = Fitting(layers, links, capacity)
    best = min((_solved(search, fit) for fit in fits), key=value_of)
    return Solution(best.sizes, best.plan, best.costs, best.execution)


def _solved(search: Fitting, fit: Fit) -> Trial:
    """The best that is found from one program."""
    best = search.at(fit.plan, fit.sizes)
    for _ in range(_MOST_TURNS):
        try:
            placed = place(_problem(best, search.capacity)).graph
        except ValueError:
            # A program whose stages cannot move stays as it is.
            return best
        schedule = evolve(placed.reordered(placed.order), costs=best.costs)
        lowered = choose_lowering(schedule, best.costs).schedule
        following = search.descended(search.at(lowered, best.sizes))
        if value_of(following) >= value_of(best):
            return best
        best = following
    return best


def _problem(trial: Trial, capacity: Capacity | None) -> Problem:
    """The ops at their costs, to be put in order on other ranks; where there is a capacity, memory
    is in bytes.
    """
    costs = trial.costs
    ranks = len(trial.plan.ranks)
    if capacity is None or costs.activation_bytes is None:
        return Problem.of(evolve(trial.plan, costs=costs), float("inf"))
    held = costs.activation_bytes
    kept = costs.kept_bytes or held
    in_bytes = evolve(
        costs,
        forward_memory=held,
        input_memory=[left - all_of_it for all_of_it, left in zip(held, kept, strict=True)],
        backward_memory=None,
        weight_memory=None,
    )
    # Which rank will have which weights is open: what is left beside those of the rank that has
    # the most is there on all. What is found is judged by all it holds.
    weights = [0.0] * ranks
    of_stages = costs.bytes_of_weights(len(trial.plan.placement))
    for stage, rank in enumerate(trial.plan.placement):
        weights[rank] += of_stages[stage]
    left = [most - max(weights) for most in capacities(capacity, ranks)]
    return Problem.of(evolve(trial.plan, costs=in_bytes), left)
