"""An execution in which each rank chooses its next op while the execution runs."""

from collections.abc import Generator
from contextlib import suppress
from heapq import heappop, heapreplace
from math import inf

from attrs import define, field

from schedlang.passes.op_graph import Graph, Orders

#: A rank's choices. Whenever the rank is idle, the generator gets the time and yields the node that
#: begins now, or None to wait. If a generator returns, the execution is given up.
Choices = Generator[int | None, float, None]


@define
class Online:
    """Ranks run nodes of a graph. `orders` has the nodes that each rank has run, and `ends` the
    time at which each node ends, infinite until it has begun.

    An idle rank chooses again whenever something has changed for it. `arrival` is the time at which
    all inputs of a node have arrived, infinite until the last of these inputs has begun.
    """

    graph: Graph
    given: Orders
    limit: float
    orders: Orders = field(init=False)
    ends: list[float] = field(init=False)
    arrival: list[float] = field(init=False)
    #: By node: how many of its inputs have not begun, and when the other ones have arrived.
    _missing: list[int] = field(init=False)
    _there: list[float] = field(init=False)
    #: Per rank: when it is free, and how much memory it holds.
    free: list[float] = field(init=False)
    held: list[float] = field(init=False)
    #: A heap of times at which a rank may have something to do.
    events: list[tuple[float, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        ranks = range(len(self.given))
        nodes = len(self.graph.time)
        self.orders = [[] for _ in ranks]
        self.ends = [inf] * nodes
        self._missing = list(self.graph.missing)
        self.arrival = [inf if missing else 0.0 for missing in self._missing]
        self._there = [0.0] * nodes
        self.free = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]

    def choices(self, rank: int) -> Choices:
        """The generator of a rank's choices; it keeps the rank's own state in local variables."""
        raise NotImplementedError

    def notice(self, node: int, rank: int, now: float) -> None:
        """React to the begin of the last input of a node, on another rank than its own, which now
        knows when inputs arrive.
        """
        raise NotImplementedError

    def execute(self) -> None:
        """Let ranks choose until none of them can run anything more, or one gives up."""
        # Time advances from event to event. Each event wakes one rank, because it is free or an
        # input of it has arrived; if it is busy by then, it wakes again when it is free:
        #
        #     events    (3, rank 1)  (3, rank 2)  (5, rank 0)  …      the earliest first
        #                    │
        #                    └─► it starts an op ──► (7, rank 1), and the ranks that use the result
        #                        or waits        ──► (when the input arrives, rank 1)
        # This is the hot loop of the search, so attributes are read into local variables.
        time = self.graph.time
        change = self.graph.change
        users = self.graph.users
        rank_of = self.graph.rank
        orders = self.orders
        ends = self.ends
        missing = self._missing
        there = self._there
        arrival = self.arrival
        free = self.free
        held = self.held
        events = self.events
        notice = self.notice
        choices = list(map(self.choices, range(len(self.given))))
        for choice in choices:
            next(choice)
        choose = [choice.send for choice in choices]
        with suppress(StopIteration):
            while events:
                now, rank = events[0]
                node = None if free[rank] > now else choose[rank](now)
                if node is None:
                    heappop(events)
                    continue
                end = now + time[node]
                orders[rank].append(node)
                ends[node] = end
                free[rank] = end
                held[rank] += change[node]
                heapreplace(events, (end, rank))
                # Nodes that use the result may have all of their inputs now.
                for user, latency in users[node]:
                    at = end + latency
                    if at > there[user]:
                        there[user] = at
                    missing[user] -= 1
                    if not missing[user]:
                        arrival[user] = there[user]
                        other = rank_of[user]
                        if other != rank:
                            notice(user, other, now)
