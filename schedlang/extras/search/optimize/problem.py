"""The problem that all searches solve, ops to be put in order, and the answers that they give."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import inf
from typing import Protocol

from attrs import evolve, frozen

from schedlang.passes.op_graph import ROUNDING, Graph, Orders
from schedlang.schedule.schedule import Schedule

#: The kinds and the stages of a node's ops, and their slices: what they do, whatever the
#: microbatch.
Name = tuple[tuple[int, int, int], ...]


@frozen(eq=False)
class Problem:
    """The ops of a schedule, to be put in the order that makes its objective least, where no rank
    holds more than its limit.

    Ops, or ops that overlap, are the nodes of a graph, whose lists have all there is to know of
    node n: its `ops`, each a kind, a stage and a microbatch; its `rank`; its `time`; the nodes that
    it `needs`, each with how long its result takes to arrive; what its rank holds more at most
    while it runs, `rise`, and once it has run, `change`. `graph.order` is the order as it was
    given. `limits[r]` is the most that rank r may hold, in the unit of these. The objective is that
    of `graph.schedule`: its makespan or its span.
    """

    graph: Graph
    limits: tuple[float, ...]

    @classmethod
    def of(
        cls, schedule: Schedule, limits: Sequence[float] | float | None = None
    ) -> "Problem":
        """The problem of a schedule, with or without communication, which is left out. There is one
        limit for all ranks, or one for each; by default it is the highest peak of the schedule.

        ValueError for a schedule that leaves no order to look for: it has no flush, or its copies
        to the host are written out; for costs of sums and gathers; and for limits below 0 or NaN.
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
        """Whether no rank holds more than its limit."""
        peaks = map(self.graph.peak, orders)
        return all(
            peak <= limit + ROUNDING
            for peak, limit in zip(peaks, self.limits, strict=True)
        )

    def value(self, orders: Orders) -> float:
        """The objective of some orders; infinite for those that hold too much, or cannot run."""
        return self.value_at_any_memory(orders) if self.fits(orders) else inf

    def value_at_any_memory(self, orders: Orders) -> float:
        """The objective of some orders, whatever they hold; infinite for those that cannot run."""
        ends = self.graph.ends(orders)
        return self.graph.objective(orders, ends) if ends else inf

    @cached_property
    def names(self) -> list[Name]:
        """For each node what it does, whatever the microbatch."""
        slices = self.graph.schedule.layout.slices
        return [
            tuple((kind, stage, microbatch % slices) for kind, stage, microbatch in ops)
            for ops in self.graph.ops
        ]


@frozen(eq=False)
class Answer:
    """Orders, what they come to, and a `bound` that is proved: no order comes to less. `source`
    says in a few words where the orders are from.
    """

    orders: Orders
    value: float
    bound: float
    source: str

    @property
    def gap(self) -> float:
        """How far the value may be above the least one, as a share of the bound."""
        return max(self.value / self.bound - 1, 0.0) if self.bound else 0.0

    @property
    def is_best(self) -> bool:
        """Whether it is proved that no order comes to less."""
        return self.value <= self.bound

    def better(self, other: "Answer") -> "Answer":
        """The lower value and the higher bound of two answers."""
        best = other if other.value < self.value - ROUNDING else self
        return evolve(best, bound=max(self.bound, other.bound))


class Solver(Protocol):
    """Looks for better orders, or for a better bound, for some seconds.

    It starts from the answer that is there, and yields a better one whenever it has one; an answer
    is never worse than the one before. Who asked may stop listening at any moment.
    """

    def __call__(
        self, problem: Problem, known: Answer, seconds: float
    ) -> Iterator[Answer]:
        """The answers, each at least as good as the one before."""
