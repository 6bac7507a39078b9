"""Orders as they come about where ranks do at any moment what is most urgent of what they can."""

from collections.abc import Sequence
from heapq import heappush
from math import inf
from typing import ClassVar

from attrs import define, field

from schedlang.extras.search.optimize.instance import Instance
from schedlang.passes.online import Choices, Online
from schedlang.passes.op_graph import Orders


def greedy(
    instance: Instance, urgency: Sequence[float], room: Sequence[int] | None = None
) -> Orders | None:
    """The orders in which an idle rank begins the most urgent node that can start; None where that
    comes to a stop. Chains stay in their order.

    A node begins only where its rank then holds no more than the node's `room`; without any, what
    leaves room for one of each kind that is held later: what was begun can then always go on.
    """
    given = instance.nodes_of_rank
    run = _Urgent(
        instance, given, inf, urgency, instance.room_for if room is None else room
    )
    run.execute()
    return None if inf in run.ends else run.orders


@define
class _Urgent(Online[Instance]):
    """The execution. Each node has an `urgency`, and the `room` in which it must fit."""

    urgency: Sequence[float]
    room: Sequence[int]
    #: The nodes of each rank for which all that they need has begun.
    there: list[list[int]] = field(init=False)
    notices_own: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.there = [
            [node for node in nodes if not self.graph.missing[node]]
            for nodes in self.given
        ]

    def choices(self, rank: int) -> Choices:
        """The most urgent node that can start, if there is any."""
        there = self.there[rank]
        rise = self.graph.rise
        best: int | None = None
        while True:
            now = yield best
            best = None
            for node in there:
                # The rank is asked again when it is ready: the node may be more urgent than what
                # comes till then.
                if self.arrival[node] > now:
                    heappush(self.events, (self.arrival[node], rank))
                elif self.held[rank] + rise[node] <= self.room[node] and (
                    best is None or self.urgency[node] > self.urgency[best]
                ):
                    best = node
            if best is not None:
                there.remove(best)

    def notice(self, node: int, rank: int, now: float) -> None:
        """All that a node waits for has begun."""
        self.there[rank].append(node)
        heappush(self.events, (max(self.arrival[node], now), rank))
