"""Which rank has which stage, also several of them, and not as many on each: placement and order
together.

A placement is judged by the best of a few orders for it, which greedy executions forwards and
backwards in time find. Stages move to other ranks, and change places, as long as that makes the
step shorter.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice
from math import inf

from attrs import evolve, field, frozen

from schedlang.compiler import compile
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.source import Source
from schedlang.lowering.choice import choose_lowering
from schedlang.passes.graph import Graph
from schedlang.proof.execution import Execution
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.cuts import best_cuts
from schedlang.schedule.schedule import Schedule
from schedlang.search.optimize.instance import Instance
from schedlang.search.optimize.problem import Problem
from schedlang.search.optimize.starts import starts
from schedlang.search.partition.balance import Capacity, Sizes, capacities
from schedlang.search.partition.joint import Fit, Fitting, Trial, value_of
from schedlang.search.partition.layers import Layer, costs_of_stages

#: The rank of each stage.
Placement = tuple[int, ...]
#: How many orders are tried for a placement.
_ORDERS = 4
#: Turns of placement and partition: two or three are what it takes.
_MOST_TURNS = 8
#: Sums of times that differ by less, relative to their size, are equal.
_ROUNDING = 1e-9


@frozen
class Placed:
    """The ops of a model in an order for a placement, and how long a step takes then, if no
    transfer waits for another; infinite where they do not fit.
    """

    placement: Placement
    schedule: Schedule = field(repr=False)
    makespan: float


def place(
    ranks: int,
    microbatches: int,
    costs: Costs,
    capacity: Capacity | None = None,
    begin_with: Iterable[Placement] = (),
    whole: bool = False,
) -> Placed:
    """The best placement that is found for stages of these `costs`, which have one number for each
    stage, and an order for it; never worse than any placement that it is to `begin_with`.

    Every rank has a stage or more. Backwards are split, or with `whole`, as long as both halves
    together. With a `capacity` in bytes no rank holds more, activations and weights; ValueError
    where no placement fits.
    """
    stages = len(costs.forward_times or ())
    if stages < ranks:
        raise ValueError(f"{stages} stages for {ranks} ranks, of which each has one or more")
    search = _Placing(ranks, microbatches, costs, capacity, whole)
    firsts = {*begin_with, *_first_placements(search.work, ranks)}
    best = min(map(search.placed, sorted(firsts)), key=lambda placed: placed.makespan)
    while (better := search.first_better(best)) is not None:
        best = better
    if best.makespan == inf:
        raise ValueError(f"no placement was found that fits into {capacity} bytes")
    return best


@frozen
class Solution:
    """Partition, placement and order together: how many layers each stage has, and its ops with
    their transfers, at the costs of these stages.
    """

    sizes: Sizes
    schedule: Schedule = field(repr=False)
    costs: Costs = field(repr=False)
    execution: Execution = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in the unit of the layers' times."""
        return self.execution.timeline.makespan


def solve(
    layers: Sequence[Layer],
    fits: Sequence[Fit],
    links: Costs = UNIT,
    capacity: Capacity | None = None,
) -> Solution:
    """Partition, placement and order in turn, from programs that were fitted before: the best that
    is found from any of these, and never worse.

    The stages are as many as a program has, on any ranks, and their backwards are split.
    ValueError without programs.
    """
    if not fits:
        raise ValueError("there is no program to begin with: `search` found none that fits")
    search = Fitting(layers, links, capacity)
    solutions = [_solved(search, fit) for fit in fits]
    best = min(solutions, key=value_of)
    return Solution(best.sizes, best.plan, best.costs, best.execution)


def _solved(search: Fitting, fit: Fit) -> Trial:
    """The best that is found from one program."""
    best = search.at(fit.plan, fit.sizes)
    microbatches = fit.plan.microbatches
    ranks = len(fit.plan.ranks)
    for _ in range(_MOST_TURNS):
        try:
            costs = costs_of_stages(search.layers, best.sizes, best.plan.layout, search.links)
            placed = place(
                ranks, microbatches, costs, search.capacity, [best.plan.layout.placement]
            )
        except ValueError:
            # The orders that are tried hold more than the one that there is.
            return best
        lowered = choose_lowering(placed.schedule, placed.schedule.costs).schedule
        following = search.descended(search.at(lowered, best.sizes))
        if value_of(following) >= value_of(best):
            return best
        best = following
    return best


@frozen
class _Placing:
    ranks: int
    microbatches: int
    costs: Costs
    capacity: Capacity | None
    whole: bool

    @property
    def work(self) -> list[float]:
        """What a microbatch takes on each stage."""
        stages = len(self.costs.forward_times or ())
        durations = self.costs.every_duration(stages)
        halves = zip(durations["input"], durations["weight"], strict=True)
        backward = durations["backward"] if self.whole else [sum(both) for both in halves]
        return [sum(both) for both in zip(durations["forward"], backward, strict=True)]

    def placed(self, placement: Placement) -> Placed:
        """A placement with the best of a few orders for it."""
        doing(f"placement {' '.join(map(str, placement))}")
        base = self._base(placement)
        problem = Problem(Graph(base), self._limits(base))
        instance = Instance.of(problem)
        found = islice(starts(instance), _ORDERS)
        orders, value = min(found, key=lambda pair: pair[1], default=(None, inf))
        if orders is None:
            return Placed(placement, base, inf)
        # The amounts that are counted here are bytes; those of the schedule are as they were.
        return Placed(placement, evolve(problem.graph.reordered(orders), costs=self.costs), value)

    def _base(self, placement: Placement) -> Schedule:
        """All ops, one microbatch after the other, which fits wherever anything does."""
        source = Source("placed.sched", base_program(placement, self.microbatches, self.whole))
        plan = compile(source)
        ranks = tuple(actions.compute() for actions in plan.ranks)
        costs = self.costs
        if costs.activation_bytes is not None:
            kept = costs.kept_bytes or costs.activation_bytes
            pairs = zip(costs.activation_bytes, kept, strict=True)
            costs = evolve(
                costs,
                forward_memory=costs.activation_bytes,
                input_memory=[left - held for held, left in pairs],
            )
        return evolve(plan, ranks=ranks, costs=costs)

    def _limits(self, base: Schedule) -> tuple[float, ...]:
        """What the activations of each rank may take."""
        if self.capacity is None:
            return (inf,) * self.ranks
        left = capacities(self.capacity, self.ranks)
        weights = self.costs.bytes_of_weights(len(base.placement))
        for stage, rank in enumerate(base.placement):
            left[rank] -= weights[stage]
        return tuple(left)

    def first_better(self, placed: Placed) -> Placed | None:
        """The first neighbour that is better, those first whose ranks have even work."""
        enough = placed.makespan * (1 - _ROUNDING)
        for placement in sorted(self._neighbours(placed.placement), key=self._slowest):
            if self.microbatches * self._slowest(placement) >= enough:
                return None
            moved = self.placed(placement)
            if moved.makespan < enough:
                return moved
        return None

    def _slowest(self, placement: Placement) -> float:
        """The work of the slowest rank for a microbatch, which no order makes less."""
        loads = [0.0] * self.ranks
        for work, rank in zip(self.work, placement, strict=True):
            loads[rank] += work
        return max(loads)

    def _neighbours(self, placement: Placement) -> Iterator[Placement]:
        """The placements with one stage on another rank, or two stages in each other's place."""
        for stage, rank in enumerate(placement):
            if placement.count(rank) > 1:
                for other in range(self.ranks):
                    if other != rank:
                        yield (*placement[:stage], other, *placement[stage + 1 :])
        for first, second in combinations(range(len(placement)), 2):
            if placement[first] != placement[second]:
                changed = list(placement)
                changed[first], changed[second] = changed[second], changed[first]
                yield tuple(changed)


def _first_placements(work: Sequence[float], ranks: int) -> Iterator[Placement]:
    """In a row, as even as can be; a loop; a V and back again."""
    stages = len(work)
    cuts, _ = best_cuts(work, ranks, [{rank: 1.0} for rank in range(ranks)])
    yield tuple(rank for rank in range(ranks) for _ in range(cuts[rank], cuts[rank + 1]))
    yield tuple(stage % ranks for stage in range(stages))
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    yield tuple(there_and_back[stage % (2 * ranks)] for stage in range(stages))


def base_program(placement: Placement, microbatches: int, whole: bool) -> str:
    """A program for a placement, in which a microbatch begins when the one before is over."""
    *inner, last = placement
    tests = "".join(f"if s == {stage} then {rank} else " for stage, rank in enumerate(inner))
    backward = "B(s, m)" if whole else "I(s, m)  W(s, m)"
    return f"""\
schedule placed {{
    param ranks = {max(placement) + 1}
    param microbatches = {microbatches}
    fn place(s) = {tests}{last}
    stage s in 0 .. {len(placement)} on place(s)
    rank r {{
        for m in 0 .. microbatches {{
            for s in 0 .. {len(placement)} {{ if place(s) == r {{ F(s, m) }} }}
            for n in 1 .. {len(placement) + 1} {{
                let s = {len(placement)} - n
                if place(s) == r {{ {backward} }}
            }}
        }}
    }}
}}
"""
