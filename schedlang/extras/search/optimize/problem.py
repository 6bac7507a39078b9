"""The problem that all searches solve, to order the ops of each rank, and their answers."""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import Protocol

import numpy as np
from attrs import evolve, frozen

from schedlang.passes.op_graph import ROUNDING, Graph, Op, Orders
from schedlang.proof.presence import writes
from schedlang.proof.prove import ideal_execution
from schedlang.schedule.kinds import AWAY, BACK, FREE, GATHER, OPS, REPEATS, SUM, Kind
from schedlang.schedule.schedule import Schedule

#: Kind, stage and slice of each of a node's ops: its ops without their microbatches.
Name = tuple[tuple[int, int, int], ...]


@frozen
class Way:
    """How activations are evicted from their rank's memory between forward and backward: the kind
    of op that takes them `away`, or None if the forward drops them; and the kind that brings them
    `back`.
    """

    away: Kind | None
    back: Kind

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of op that a search adds for an activation that is evicted this way."""
        return (self.back,) if self.away is None else (self.away, self.back)


#: The ways that a search may choose, by the name of their costs.
WAYS = {
    OPS[away].cost: Way(away, back)
    for away in AWAY
    for back in BACK
    if OPS[back].follows == away
} | {OPS[kind].cost: Way(None, kind) for kind in REPEATS}


@frozen(eq=False)
class Problem:
    """Order each rank's ops so that the objective is minimal and no rank exceeds its memory limit.

    A node of the graph is an op, or several that overlap. Its lists are indexed by node: `ops`,
    each a kind, a stage and a microbatch; `rank`; `time`; the nodes that a node `needs`, each with
    the latency of its message; by how much a node raises its rank's memory, while it runs (`rise`)
    and once it has run (`change`). `graph.order` is the given order. `limits[r]` is the limit of
    rank r, in the unit of `rise`. The objective is that of `graph.schedule`: makespan or span.

    If there are `ways`, activations may be evicted by these. The weights of `gathered` stages are
    gathered before ops use them, and the gradients of `summed` stages are summed behind them. The
    graph has none of the ops that do so, and `given` is the schedule with those that it had at
    first.
    """

    graph: Graph
    limits: tuple[float, ...]
    ways: tuple[Way, ...] = ()
    gathered: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    given: Schedule | None = None

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        limits: Sequence[float] | float | None = None,
        ways: Collection[Way] = (),
    ) -> "Problem":
        """The problem of a schedule; communication that it writes is dropped. There is one memory
        limit for all ranks, or one for each; by default the highest peak of the schedule.

        Activations may be evicted by some `ways`; those of a schedule with copies, by copies. If
        the schedule has gathers, their places are chosen anew; of sums, one for each stage is left.

        ValueError for a schedule without a flush, for costs of sums and gathers that it does not
        write, for gathers and sums over replicas in the plan, for memory of messages, and for
        limits below 0 or NaN.
        """
        gathered = _written(schedule, GATHER, "gather")
        summed = _written(schedule, SUM, "sum")
        if schedule.costs.message_memory:
            raise ValueError(
                "messages take memory there, and limits of memory here are for activations: leave "
                "`memory send` out of the program, or `message_memory` out of the costs"
            )
        if schedule.stream or schedule.layout.updates > 1:
            raise ValueError(
                "it has no flush, and its updates overlap: it has no end to bring near"
            )
        ranks = tuple(actions.compute() for actions in schedule.ranks)
        given = evolve(schedule, ranks=ranks, slots=None)
        if schedule.columns.is_copy.any():
            ways = {*ways, WAYS["offload"]}
        chosen = {kind for way in ways for kind in way.kinds}
        if gathered:
            chosen |= {GATHER, FREE}
        if summed:
            chosen.add(SUM)
        ranks = tuple(
            actions.select(lambda kind: kind not in chosen) for actions in ranks
        )
        graph = Graph(evolve(given, ranks=ranks) if chosen else given)
        if limits is None:
            limits = max(peaks_of(given)) if chosen else graph.highest_peak(graph.order)
        each = (limits,) if isinstance(limits, float | int) else tuple(limits)
        for limit in each:
            # NaN is not at least 0 either.
            if not limit >= 0:
                raise ValueError(
                    f"what a rank may hold at most is a number from 0, not {limit:g}"
                )
        limits = each * len(ranks) if len(each) == 1 else each
        return cls(
            graph,
            limits,
            tuple(way for way in WAYS.values() if way in ways),
            gathered,
            summed,
            given,
        )

    @property
    def named_ways(self) -> dict[str, Way]:
        """The ways by which activations may be evicted, by the name of their costs."""
        return {name: way for name, way in WAYS.items() if way in self.ways}

    @property
    def is_bare(self) -> bool:
        """Whether ranks run the ops of the graph alone."""
        return not (self.ways or self.gathered or self.summed)

    @property
    def bare(self) -> "Problem":
        """The problem of the graph alone: no activations are evicted, and weights are there."""
        schedule = self.graph.schedule
        costs = evolve(schedule.costs, gather_times=None, sum_times=None)
        graph = Graph(evolve(schedule, costs=costs))
        return Problem(graph, self.limits)

    @property
    def as_given(self) -> "Answer":
        """The order that was given, as an answer without a bound."""
        order = self.graph.order
        if self.is_bare or self.given is None:
            return Answer(order, self.value(order), 0.0, "as given")
        return Answer(order, self.value_of(self.given), 0.0, "as given", self.given)

    def value_of(self, schedule: Schedule) -> float:
        """The objective of a schedule of this problem's ops, with those beside its graph; infinite
        if it exceeds a memory limit or deadlocks.
        """
        execution = ideal_execution(schedule)
        if execution is None:
            return inf
        pairs = zip(execution.peak_memory, self.limits, strict=True)
        if any(peak > limit + ROUNDING for peak, limit in pairs):
            return inf
        return float(getattr(execution.timeline, schedule.objective))

    def ops_of(self, answer: "Answer") -> list[list[list[Op]]]:
        """The ops of each rank in an answer's order; those that overlap are in one list."""
        if answer.schedule is None:
            return [[self.graph.ops[node] for node in order] for order in answer.orders]
        return [
            [[actions.at(index) for index in batch] for batch in actions.batches()]
            for actions in answer.schedule.ranks
        ]

    def peaks(self, answer: "Answer") -> list[float]:
        """The peak memory of each rank in an answer."""
        if answer.schedule is None:
            return list(map(self.graph.peak, answer.orders))
        return peaks_of(answer.schedule)

    def fits(self, orders: Orders) -> bool:
        """Whether these orders keep every rank within its memory limit."""
        peaks = map(self.graph.peak, orders)
        return all(
            peak <= limit + ROUNDING
            for peak, limit in zip(peaks, self.limits, strict=True)
        )

    def value(self, orders: Orders) -> float:
        """The objective of these orders; infinite if they exceed a memory limit or deadlock."""
        return self.value_at_any_memory(orders) if self.fits(orders) else inf

    def value_at_any_memory(self, orders: Orders) -> float:
        """The objective of these orders at any memory; infinite if they deadlock."""
        ends = self.graph.ends(orders)
        return self.graph.objective(orders, ends) if ends else inf

    @cached_property
    def names(self) -> list[Name]:
        """For each node, its ops without their microbatches."""
        slices = self.graph.schedule.layout.slices
        return [
            tuple((kind, stage, microbatch % slices) for kind, stage, microbatch in ops)
            for ops in self.graph.ops
        ]


@frozen(eq=False)
class Answer:
    """Orders, the `value` of the objective, and a proved lower `bound` of it. `source` says in a
    few words which search found the orders. If the problem has more than its graph, the `schedule`
    has these orders together with the ops beside it.
    """

    orders: Orders
    value: float
    bound: float
    source: str
    schedule: Schedule | None = None

    @property
    def gap(self) -> float:
        """The distance between the value and the bound, as a share of the bound."""
        return max(self.value / self.bound - 1, 0.0) if self.bound else 0.0

    @property
    def is_best(self) -> bool:
        """Whether the orders are proved to be optimal."""
        return self.value <= self.bound

    def better(self, other: "Answer") -> "Answer":
        """Combine two answers: the lower value, with its orders, and the higher bound."""
        best = other if other.value < self.value - ROUNDING else self
        return evolve(best, bound=max(self.bound, other.bound))


def _written(schedule: Schedule, kind: Kind, name: str) -> tuple[int, ...]:
    """The stages for which a schedule has collectives of a kind. ValueError if there are others
    that take time, or replicas in the plan.
    """
    stages = range(len(schedule.placement))
    times = getattr(schedule.costs, f"{name}_times")
    written = np.flatnonzero(writes(schedule, [kind])).tolist()
    if times and len(written) < len(stages):
        raise ValueError(
            f"its makespan has {name}s that it does not write, which no order here is judged by: "
            f"write them, with `gather` behind its ops, or leave `{name}_times` out of the costs"
        )
    if any(len(schedule.layout.replicas(stage)) > 1 for stage in written):
        raise ValueError(
            f"its {name}s are events of several ranks, since it has replicas: only those over "
            "replicas outside of the plan have other places"
        )
    return tuple(written)


def peaks_of(schedule: Schedule) -> list[float]:
    """The peak memory of each rank of a schedule; infinite if it deadlocks."""
    execution = ideal_execution(schedule)
    return list(execution.peak_memory) if execution else [inf] * len(schedule.ranks)


class Solver(Protocol):
    """Searches for better orders, or for a better bound, for some seconds.

    A solver starts from the known answer, and yields an answer whenever it has a better one. The
    caller may stop the iteration at any moment.
    """

    def __call__(
        self, problem: Problem, known: Answer, seconds: float
    ) -> Iterator[Answer]:
        """The answers, each at least as good as the one before."""
