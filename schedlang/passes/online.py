"""An execution in which ranks decide as they go what they do next."""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from attrs import define, field

from schedlang.passes.graph import Graph, Orders


@define
class Online:
    """Ranks run nodes of a graph; `orders` is what each has run, in order, and `ends` says when a
    node ends, infinite before it has begun.

    An idle rank is asked to `decide` whenever there may be something new for it.
    """

    graph: Graph
    given: Orders
    limit: float
    orders: Orders = field(init=False)
    ends: list[float] = field(init=False)
    #: Per rank: when it is free, and what it holds.
    free: list[float] = field(init=False)
    held: list[float] = field(init=False)
    #: When a rank may have something to do.
    events: list[tuple[float, int]] = field(init=False)
    needs: Sequence[Sequence[tuple[int, float]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        ranks = range(len(self.given))
        self.orders = [[] for _ in ranks]
        self.ends = [inf] * len(self.graph.ops)
        self.free = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]
        self.needs = self.graph.needs

    def decide(self, rank: int, now: float) -> None:
        """Let an idle rank do something, or wait."""
        raise NotImplementedError

    def notice(self, node: int, now: float) -> None:
        """Another rank has begun what a node of a rank waits for."""
        raise NotImplementedError

    def execute(self) -> None:
        """Let ranks decide until nothing is left that they can do."""
        events = self.events
        free = self.free
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                self.decide(rank, now)

    def arrival(self, node: int) -> float:
        """When everything that a node waits for is there; infinite while some of it has not
        begun.
        """
        # Most of the time of a pass is spent here: `max` would take twice as long.
        ends = self.ends
        latest = 0.0
        for need, latency in self.needs[node]:
            there = ends[need] + latency
            if there > latest:
                latest = there
        return latest

    def start(self, rank: int, node: int, now: float) -> None:
        """Let a rank do an op, and look again at the ranks that it concerns."""
        graph = self.graph
        end = now + graph.time[node]
        self.orders[rank].append(node)
        self.ends[node] = end
        self.free[rank] = end
        self.held[rank] += graph.change[node]
        heappush(self.events, (end, rank))
        for user in graph.users[node]:
            self.notice(user, now)
