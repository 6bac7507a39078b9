"""An execution in which ranks decide as they go what they do next."""

from heapq import heappop, heappush
from math import inf

from attrs import define, field

from schedlang.passes.graph import Graph, Orders


@define
class Online:
    """Ranks run nodes of a graph; `orders` is what each has run, in order, and `ends` says when a
    node ends, infinite before it has begun.

    An idle rank is asked to `decide` whenever there may be something new for it. `arrival` says for
    each node when everything that it waits for is there: infinite while some of it has not begun.
    """

    graph: Graph
    given: Orders
    limit: float
    orders: Orders = field(init=False)
    ends: list[float] = field(init=False)
    arrival: list[float] = field(init=False)
    #: By node: how much of what it waits for has not begun, and when the rest is there.
    _missing: list[int] = field(init=False)
    _there: list[float] = field(init=False)
    #: Per rank: when it is free, and what it holds.
    free: list[float] = field(init=False)
    held: list[float] = field(init=False)
    #: When a rank may have something to do.
    events: list[tuple[float, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        ranks = range(len(self.given))
        nodes = len(self.graph.ops)
        self.orders = [[] for _ in ranks]
        self.ends = [inf] * nodes
        self._missing = [len(needs) for needs in self.graph.needs]
        self.arrival = [inf if missing else 0.0 for missing in self._missing]
        self._there = [0.0] * nodes
        self.free = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]

    def decide(self, rank: int, now: float) -> None:
        """Let an idle rank do something, or wait."""
        raise NotImplementedError

    def notice(self, node: int, rank: int, now: float) -> None:
        """Another rank has begun the last of what a node of this rank waits for."""
        raise NotImplementedError

    def execute(self) -> None:
        """Let ranks decide until nothing is left that they can do."""
        # Time goes from event to event, each of one rank: it has become free, or what it waits for
        # is there. A rank that has begun something by then is asked again when it is free:
        #
        #     events    (3, rank 1)  (3, rank 2)  (5, rank 0)  …      the earliest first
        #                    │
        #                    └─► decide: starts an op ──► (7, rank 1), and whom its result concerns
        #                        or waits             ──► (when it need not any more, rank 1)
        events = self.events
        free = self.free
        decide = self.decide
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                decide(rank, now)

    def start(self, rank: int, node: int, now: float) -> None:
        """Let a rank do an op, and look again at the ranks that it concerns."""
        graph = self.graph
        end = now + graph.time[node]
        self.orders[rank].append(node)
        self.ends[node] = end
        self.free[rank] = end
        self.held[rank] += graph.change[node]
        heappush(self.events, (end, rank))
        missing = self._missing
        there = self._there
        for user, latency in graph.users[node]:
            at = end + latency
            if at > there[user]:
                there[user] = at
            missing[user] -= 1
            if not missing[user]:
                self.arrival[user] = there[user]
                other = graph.rank[user]
                if other != rank:
                    self.notice(user, other, now)
