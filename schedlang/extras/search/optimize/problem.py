"""The problem that all searches solve, to order the ops of each rank, and their answers."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import inf
from typing import Protocol

from attrs import evolve, frozen

from schedlang.passes.op_graph import ROUNDING, Graph, Orders
from schedlang.schedule.schedule import Schedule

#: Kind, stage and slice of each of a node's ops: its ops without their microbatches.
Name = tuple[tuple[int, int, int], ...]


@frozen(eq=False)
class Problem:
    """Order each rank's ops so that the objective is minimal and no rank exceeds its memory limit.

    A node of the graph is an op, or several that overlap. Its lists are indexed by node: `ops`,
    each a kind, a stage and a microbatch; `rank`; `time`; the nodes that a node `needs`, each with
    the latency of its message; by how much a node raises its rank's memory, while it runs (`rise`)
    and once it has run (`change`). `graph.order` is the given order. `limits[r]` is the limit of
    rank r, in the unit of `rise`. The objective is that of `graph.schedule`: makespan or span.
    """

    graph: Graph
    limits: tuple[float, ...]

    @classmethod
    def of(
        cls, schedule: Schedule, limits: Sequence[float] | float | None = None
    ) -> "Problem":
        """The problem of a schedule; communication that it writes is dropped. There is one memory
        limit for all ranks, or one for each; by default the highest peak of the schedule.

        ValueError for a schedule without a flush, or with copies to the host; for costs of sums and
        gathers; and for limits below 0 or NaN.
        """
        if schedule.costs.sum_times or schedule.costs.gather_times:
            raise ValueError(
                "its makespan has sums and gathers, which no order here is judged by: leave "
                "`sum_times` and `gather_times` out of the costs"
            )
        if schedule.stream or schedule.layout.updates > 1:
            raise ValueError(
                "it has no flush, and its updates overlap: it has no end to bring near"
            )
        ranks = tuple(actions.compute() for actions in schedule.ranks)
        ops = evolve(schedule, ranks=ranks, slots=None)
        graph = Graph(ops)
        if limits is None:
            limits = graph.highest_peak(graph.order)
        each = (limits,) if isinstance(limits, float | int) else tuple(limits)
        for limit in each:
            # NaN is not at least 0 either.
            if not limit >= 0:
                raise ValueError(
                    f"what a rank may hold at most is a number from 0, not {limit:g}"
                )
        return cls(graph, each * len(ranks) if len(each) == 1 else each)

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
    few words which search found the orders.
    """

    orders: Orders
    value: float
    bound: float
    source: str

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


class Solver(Protocol):
    """Searches for better orders, or for a better bound, for some seconds.

    A solver starts from the known answer, and yields an answer whenever it has a better one. The
    caller may stop the iteration at any moment.
    """

    def __call__(
        self, problem: Problem, known: Answer, seconds: float
    ) -> Iterator[Answer]:
        """The answers, each at least as good as the one before."""
