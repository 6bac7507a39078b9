"""Longer warm-ups: forwards that a rank can do early, while it would only wait, before its first
backward.
"""

from heapq import heappop, heappush
from itertools import takewhile
from math import inf

from attrs import define, field

from schedlang.passes.graph import ROUNDING, Graph, Orders
from schedlang.schedule.kinds import Kind


def longer_warmups(graph: Graph, given: Orders, limit: float) -> list[Orders]:
    """Orders without weight gradients in which ranks do one, or any number of, forwards more in
    their warm-ups.

    A rank that waits in its warm-up does the first later forward whose inputs are there, if it then
    holds at most `limit`; in some of the orders only where that forward ends before the wait does.
    After their warm-ups, ranks do what is left as in the given order.
    """
    # With one forward more, which ends before the wait does:
    #
    #     F0 F1 · · · B0 F2 B1 …    becomes    F0 F1 F2 · · B0 B1 …
    return [
        _Warmup(graph, given, limit, more, beyond).run()
        for more in (1, inf)
        for beyond in (False, True)
    ]


@define
class _Warmup:
    """An execution in which no rank waits in its warm-up where it can do more."""

    graph: Graph
    given: Orders
    limit: float
    more: float
    beyond: bool
    #: Per rank: how many forwards its warm-up may have, what it has done, what is left; when it is
    #: free, what it holds.
    most: list[float] = field(init=False)
    done: Orders = field(init=False)
    left: Orders = field(init=False)
    #: Per rank: whether it has done something else than forwards.
    is_over: list[bool] = field(init=False)
    free: list[float] = field(init=False)
    held: list[float] = field(init=False)
    ends: list[float] = field(init=False)
    #: When a rank may have something to do.
    events: list[tuple[float, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        ranks = range(len(self.given))
        self.most = [len(self.forwards(order)) + self.more for order in self.given]
        self.done = [[] for _ in ranks]
        self.left = [list(order) for order in self.given]
        self.is_over = [False for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]
        self.ends = [inf] * len(self.graph.ops)

    def forwards(self, order: list[int]) -> list[int]:
        """The forwards that an order begins with."""
        return list(takewhile(lambda node: self.graph.kind[node] == Kind.F, order))

    def run(self) -> Orders:
        """The orders with the warm-ups that come of it."""
        while self.events:
            now, rank = heappop(self.events)
            if self.left[rank] and self.free[rank] <= now:
                self.decide(rank, now)
        return [self.completed(rank) for rank in range(len(self.given))]

    def decide(self, rank: int, now: float) -> None:
        """Let an idle rank do what is next, or a later forward, or wait."""
        arrival = self.arrival(self.left[rank][0])
        if arrival <= now:
            self.start(rank, self.left[rank][0], now)
        elif (early := self.early(rank, now, arrival)) is not None:
            self.start(rank, early, now)
        elif arrival < inf:
            heappush(self.events, (arrival, rank))

    def arrival(self, node: int) -> float:
        """When everything that a node waits for is there; infinite while some of it has not
        begun.
        """
        return max(
            [self.ends[need] + latency for need, latency in self.graph.needs[node]], default=0.0
        )

    def early(self, rank: int, now: float, until: float) -> int | None:
        """A later forward for a rank that would wait in its warm-up."""
        if self.is_over[rank]:
            return None
        left = self.left[rank]
        if len(self.done[rank]) + len(self.forwards(left)) >= self.most[rank]:
            return None
        for node in left:
            if self.graph.kind[node] == Kind.F and self.arrival(node) <= now:
                fits = self.held[rank] + self.graph.rise[node] <= self.limit + ROUNDING
                ends_in_time = self.beyond or now + self.graph.time[node] <= until
                return node if fits and ends_in_time else None
        return None

    def start(self, rank: int, node: int, now: float) -> None:
        """Let a rank do an op, and look again at the ranks that it concerns."""
        self.left[rank].remove(node)
        self.done[rank].append(node)
        self.is_over[rank] = self.is_over[rank] or self.graph.kind[node] != Kind.F
        self.ends[node] = self.free[rank] = now + self.graph.time[node]
        self.held[rank] += self.graph.change[node]
        heappush(self.events, (self.free[rank], rank))
        for user in self.graph.users[node]:
            if (arrival := self.arrival(user)) < inf:
                heappush(self.events, (arrival, self.graph.rank[user]))

    def completed(self, rank: int) -> list[int]:
        """The warm-up, and then the given order, where each forward takes the place of one of its
        stage done early.
        """
        order = self.forwards(self.done[rank])
        rest = self.given[rank][len(self.forwards(self.given[rank])) :]
        later: dict[int, list[int]] = {}
        for node in reversed(rest):
            if self.graph.kind[node] == Kind.F and node not in order:
                later.setdefault(self.graph.ops[node][0][1], []).append(node)
        for node in rest:
            if self.graph.kind[node] != Kind.F:
                order.append(node)
            elif following := later.get(self.graph.ops[node][0][1]):
                order.append(following.pop())
        return order
