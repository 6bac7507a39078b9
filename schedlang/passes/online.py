"""An execution in which ranks decide as they go what they do next."""

from collections.abc import Generator
from contextlib import suppress
from heapq import heappop, heapreplace
from math import inf
from typing import ClassVar, Generic, TypeVar

from attrs import define, field

from schedlang.passes.op_graph import Nodes, Orders

N = TypeVar("N", bound=Nodes)

#: What a rank does whenever it is idle: it is told the time, and gives the node that it begins, or
#: None where it waits. Where the choices of one come to an end, the execution is given up.
Choices = Generator[int | None, float, None]


@define
class Online(Generic[N]):
    """Ranks run nodes of a graph; `orders` is what each has run, in order, and `ends` says when a
    node ends, infinite before it has begun.

    An idle rank is asked for its choice whenever there may be something new for it. `arrival` says
    for each node when everything that it waits for is there: infinite while some of it has not
    begun.
    """

    #: Whether a rank notices, too, that it has begun the last of what a node of its own waits for.
    notices_own: ClassVar[bool] = False

    graph: N
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
        """The choices of a rank. Whatever is only its own, it keeps to itself."""
        raise NotImplementedError

    def notice(self, node: int, rank: int, now: float) -> None:
        """A rank, mostly another one, has begun the last of what a node of this rank waits for."""
        raise NotImplementedError

    def execute(self) -> None:
        """Let ranks decide until nothing is left that they can do, or one gives up."""
        # Time goes from event to event, each of one rank: it has become free, or what it waits for
        # is there. A rank that has begun something by then is asked again when it is free:
        #
        #     events    (3, rank 1)  (3, rank 2)  (5, rank 0)  …      the earliest first
        #                    │
        #                    └─► it starts an op ──► (7, rank 1), and whom its result concerns
        #                        or waits        ──► (when it need not any more, rank 1)
        # Every op of every trial comes by here, so all that is asked for has a name.
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
        notices_own = self.notices_own
        choices = list(map(self.choices, range(len(self.given))))
        for choice in choices:
            next(choice)
        with suppress(StopIteration):
            while events:
                now, rank = events[0]
                node = None if free[rank] > now else choices[rank].send(now)
                if node is None:
                    heappop(events)
                    continue
                end = now + time[node]
                orders[rank].append(node)
                ends[node] = end
                free[rank] = end
                held[rank] += change[node]
                heapreplace(events, (end, rank))
                # What it makes concerns others.
                for user, latency in users[node]:
                    at = end + latency
                    if at > there[user]:
                        there[user] = at
                    missing[user] -= 1
                    if not missing[user]:
                        arrival[user] = there[user]
                        other = rank_of[user]
                        if other != rank or notices_own:
                            notice(user, other, now)
