"""Longer warm-ups: a rank that would wait before its first backward runs further forwards early."""

from collections.abc import Iterator
from heapq import heappush
from itertools import product, takewhile
from math import inf

from attrs import define, field

from schedlang.passes.online import Choices, Online
from schedlang.passes.op_graph import ROUNDING, Graph, Orders
from schedlang.schedule.kinds import Kind


def longer_warmups(graph: Graph, given: Orders, limit: float) -> Iterator[Orders]:
    """Orders without weight gradients, with longer warm-ups: by one forward, or by any number.

    A rank that waits in its warm-up runs the first later forward whose inputs have arrived, if that
    stays within `limit`; in two of the four orders only if that forward ends before the wait does.
    After the warm-up, the rank runs its other ops in the given order.
    """
    # With one forward more, which ends before the wait does:
    #
    #     F0 F1 · · · B0 F2 B1 …    becomes    F0 F1 F2 · · B0 B1 …
    for more, beyond in product((1, inf), (False, True)):
        yield _Warmup(graph, given, limit, more, beyond).longer()


@define
class _Warmup(Online):
    """An execution up to the end of all warm-ups. A rank that would wait in its warm-up runs
    further forwards, up to `more` of them; with `beyond`, also forwards that end after the wait
    would.
    """

    more: float
    beyond: bool
    #: Per rank: how many forwards its warm-up may have, the nodes that are left to run, and the
    #: forwards among these.
    most: list[float] = field(init=False)
    left: Orders = field(init=False)
    left_forwards: Orders = field(init=False)
    #: The ranks in their warm-up: they have run nothing but forwards.
    warming: set[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.most = [len(self.forwards(order)) + self.more for order in self.given]
        self.left = [list(order) for order in self.given]
        kind = self.graph.kind
        self.left_forwards = [
            [node for node in order if kind[node] == Kind.F] for order in self.given
        ]
        self.warming = {rank for rank, order in enumerate(self.given) if order}

    def forwards(self, order: list[int]) -> list[int]:
        """The forwards that an order begins with."""
        return list(takewhile(lambda node: self.graph.kind[node] == Kind.F, order))

    def longer(self) -> Orders:
        """Execute the warm-ups; return the orders, each completed with the rest of its ops."""
        self.execute()
        return [self.completed(rank) for rank in range(len(self.given))]

    def choices(self, rank: int) -> Choices:
        """Yield the rank's next node, or a later forward, or None if the rank waits."""
        left = self.left[rank]
        node: int | None = None
        while True:
            now = yield node
            node = None
            if not left or not self.warming:
                continue
            arrival = self.arrival[left[0]]
            node = left[0] if arrival <= now else self.early(rank, now, arrival)
            if node is not None:
                if self.graph.kind[node] == Kind.F:
                    self.left_forwards[rank].remove(node)
                else:
                    self.warming.discard(rank)
                left.remove(node)
            elif arrival < inf:
                heappush(self.events, (arrival, rank))

    def notice(self, node: int, rank: int, now: float) -> None:
        """Wake the node's rank when the inputs arrive; it may run any of its nodes early."""
        heappush(self.events, (self.arrival[node], rank))

    def early(self, rank: int, now: float, until: float) -> int | None:
        """A later forward that a rank can run instead of waiting in its warm-up, if one fits."""
        if rank not in self.warming:
            return None
        if (
            len(self.orders[rank]) + len(self.forwards(self.left[rank]))
            >= self.most[rank]
        ):
            return None
        arrival = self.arrival
        for node in self.left_forwards[rank]:
            if arrival[node] <= now:
                fits = self.held[rank] + self.graph.rise[node] <= self.limit + ROUNDING
                ends_in_time = self.beyond or now + self.graph.time[node] <= until
                return node if fits and ends_in_time else None
        return None

    def completed(self, rank: int) -> list[int]:
        """The rank's warm-up, followed by the rest of its given order. Where that order has a
        forward that ran early, the next forward of the same stage takes its place.
        """
        kind = self.graph.kind
        names = self.graph.names
        order = self.forwards(self.orders[rank])
        done = set(order)
        rest = self.given[rank][len(self.forwards(self.given[rank])) :]
        later: dict[int, list[int]] = {}
        for node in reversed(rest):
            if kind[node] == Kind.F and node not in done:
                later.setdefault(names[node][0], []).append(node)
        for node in rest:
            if kind[node] != Kind.F:
                order.append(node)
            elif following := later.get(names[node][0]):
                order.append(following.pop())
        return order
