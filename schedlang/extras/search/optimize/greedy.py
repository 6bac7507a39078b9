"""Orders as they come about where ranks do at any moment what is most urgent of what they can."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from schedlang.extras.search.optimize.instance import Instance
from schedlang.passes.graph import Orders


def greedy(
    instance: Instance, urgency: Sequence[float], room: Sequence[int] | None = None
) -> Orders | None:
    """The orders in which an idle rank begins the most urgent node that can start; None where that
    comes to a stop. Chains stay in their order.

    A node begins only where its rank then holds no more than the node's `room`; without any, what
    leaves room for one of each kind that is held later: what was begun can then always go on.
    """
    run = _Run(instance, urgency, instance.room_for if room is None else room)
    return run.orders if run.ends() else None


class _Run:
    """An execution in which ranks decide as they go."""

    def __init__(
        self, instance: Instance, urgency: Sequence[float], room: Sequence[int]
    ) -> None:
        self.instance = instance
        self.room = room
        self.urgency = urgency
        self.orders: Orders = [[] for _ in instance.limits]
        self.held = [0 for _ in instance.limits]
        self.free = [0 for _ in instance.limits]
        self.waits = list(instance.waits)
        self.ready = [0] * len(instance.time)
        #: The nodes of each rank that have waited for all but memory.
        self.there: list[list[int]] = [[] for _ in instance.limits]
        self.events = [(0, rank) for rank in range(len(instance.limits))]
        heapify(self.events)
        for node, count in enumerate(self.waits):
            if not count:
                self.there[instance.rank[node]].append(node)

    def ends(self) -> bool:
        """Run until nothing can start any more: whether all has run then."""
        while self.events:
            now, rank = heappop(self.events)
            if self.free[rank] <= now:
                self._decide(rank, now)
        return sum(map(len, self.orders)) == len(self.urgency)

    def _decide(self, rank: int, now: int) -> None:
        """Let an idle rank begin something, if there is anything."""
        best = -1
        for node in self.there[rank]:
            # The rank is looked at again when it is ready: the node may be more urgent than what
            # comes till then.
            if self.ready[node] > now:
                heappush(self.events, (self.ready[node], rank))
            elif self._fits(node) and (
                best < 0 or self.urgency[node] > self.urgency[best]
            ):
                best = node
        if best >= 0:
            self._begin(best, rank, now)

    def _fits(self, node: int) -> bool:
        """Whether there is room for a node."""
        rank = self.instance.rank[node]
        return self.held[rank] + self.instance.rise[node] <= self.room[node]

    def _begin(self, node: int, rank: int, now: int) -> None:
        """Let a rank do a node; look again at the ranks that it concerns."""
        instance = self.instance
        self.there[rank].remove(node)
        self.orders[rank].append(node)
        self.held[rank] += instance.change[node]
        self.free[rank] = now + instance.time[node]
        heappush(self.events, (self.free[rank], rank))
        for second, lag in instance.following[node]:
            self.waits[second] -= 1
            self.ready[second] = max(self.ready[second], now + lag)
            if not self.waits[second]:
                other = instance.rank[second]
                self.there[other].append(second)
                heappush(self.events, (max(self.ready[second], now), other))
