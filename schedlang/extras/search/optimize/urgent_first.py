"""Greedy list scheduling: an idle rank always runs the most urgent of its ready nodes."""

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
    """The orders of a greedy execution, in which chains keep their order; None if it gets stuck.

    A node begins only if its rank then holds at most the node's `room`, by default
    `Instance.room_for`.
    """
    given = instance.nodes_of_rank
    run = _Urgent(
        instance, given, inf, urgency, instance.room_for if room is None else room
    )
    run.execute()
    return None if inf in run.ends else run.orders


@define
class _Urgent(Online[Instance]):
    """The execution. Each node has an `urgency`, and a limit of its rank's memory, `room`."""

    urgency: Sequence[float]
    room: Sequence[int]
    #: The nodes of each rank whose inputs have all begun.
    there: list[list[int]] = field(init=False)
    notices_own: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.there = [
            [node for node in nodes if not self.graph.missing[node]]
            for nodes in self.given
        ]

    def choices(self, rank: int) -> Choices:
        """Yield the most urgent node that can start now, or None."""
        there = self.there[rank]
        rise = self.graph.rise
        best: int | None = None
        while True:
            now = yield best
            best = None
            for node in there:
                # The rank chooses again when the node is ready, since it may be more urgent than
                # the one that runs until then.
                if self.arrival[node] > now:
                    heappush(self.events, (self.arrival[node], rank))
                elif self.held[rank] + rise[node] <= self.room[node] and (
                    best is None or self.urgency[node] > self.urgency[best]
                ):
                    best = node
            if best is not None:
                there.remove(best)

    def notice(self, node: int, rank: int, now: float) -> None:
        """Add a node whose inputs have all begun, and wake its rank when they have arrived."""
        self.there[rank].append(node)
        heappush(self.events, (max(self.arrival[node], now), rank))
