"""List scheduling: a rank that is free runs the most urgent of its ops that are ready.

An op is ready once its inputs have arrived, and if its rank has room for what it holds. The order
follows from the costs alone, and takes one walk over the ops to find. So each batch can have its
own: every rank of a training run works out the same one from the same costs, and none has to ask
another.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import ClassVar

import numpy as np
from attrs import define, field

from schedlang.passes.best_order import best_order
from schedlang.passes.online import Choices, N, Online
from schedlang.passes.op_graph import ROUNDING, Graph, Orders
from schedlang.passes.squeeze import squeeze
from schedlang.schedule.arrays import Floats, counts_of
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


def greedy(schedule: Schedule) -> Schedule:
    """The schedule with each rank's ops in the best order that list scheduling finds for the
    objective, without slots; in the given order where that is better.

    The peak of no rank rises above the highest peak of the given schedule. CompileError for a
    schedule that cannot run.
    """
    listed = best_order(squeeze(schedule), _listed)
    # One of the orders is the given one.
    assert listed is not None
    return listed


def _listed(graph: Graph, limit: float, share: float) -> list[Orders]:
    """The orders of list scheduling and the given order, the best first."""
    room = graph.room(limit + ROUNDING)
    found = [(graph.objective(graph.order, graph.own_ends), graph.order)]
    # The critical path of what is left; and an order that suits a batch of any lengths.
    for urgency in (graph.least_tails, _short_at_both_ends(graph)):
        run = MostUrgent(graph, graph.order, limit, urgency, room)
        if run.is_done():
            found.append((graph.objective(run.orders, run.ends), run.orders))
    # `sorted` is stable, so the given order comes first among equals.
    return [orders for _, orders in sorted(found, key=lambda each: each[0])]


def _short_at_both_ends(graph: Graph) -> Floats:
    """The urgencies by which short microbatches begin and end the batch, when ranks wait for it to
    come and to go; backwards come before forwards, since they free memory, and weight gradients
    last.
    """
    number = graph.microbatch
    work = counts_of(number, graph.time)
    by_work = np.argsort(work, kind="stable")
    order = np.concatenate([by_work[::2], by_work[1::2][::-1]])
    # Among those of equal work, the lower number goes first.
    order[np.argsort(work[order], kind="stable")] = by_work
    place = np.empty(len(order))
    place[order] = np.arange(len(order))
    before = np.full(len(graph), len(order))
    for kind, number_before in ((Kind.F, 0), (Kind.W, -len(order))):
        before[np.array(graph.kind) == int(kind)] = number_before
    return before - place[number]


@define
class MostUrgent(Online[N]):
    """An execution in which each rank runs the most urgent of its ready nodes.

    A node that takes memory is run only if its rank then holds at most the node's `room`; of those
    of a rank with equal room, the most urgent one waits for room, and the others behind it. Among
    equally urgent nodes, the one with the lower number is run first.
    """

    # A rank with two stages: nodes that free memory need no room, and of each stage, one forward at
    # most is asked whether it fits. Numbers are places in the order of urgency:
    #
    #     frees memory     ● 4  7  12            the rank runs 2 if it fits, else 4; it never asks
    #     stage 1          ● 2  3  6             whether 3 fits
    #     stage 5          ● 5  9

    urgency: Sequence[float] | Floats
    room: Sequence[float] | Floats
    notices_own: ClassVar[bool] = True
    #: By node: its place among all nodes, the most urgent first; and the node at each place.
    place: list[int] = field(init=False)
    node_at: list[int] = field(init=False)
    #: By node: the most that its rank may hold before it.
    most: list[float] = field(init=False)
    #: By node: the heap of its rank in which it waits for its turn, by its place.
    heap_of: list[list[int]] = field(init=False)
    #: Per rank: these heaps.
    heaps: list[list[list[int]]] = field(init=False)
    #: Per rank: a heap of nodes whose inputs are on their way, by the time of their arrival.
    coming: list[list[tuple[float, int]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        order = np.argsort(-np.asarray(self.urgency), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self.node_at = order.tolist()
        self.place = place.tolist()
        rise = np.asarray(self.graph.rise)
        room = np.where(rise > 0, self.room, inf)
        self.most = (room - rise).tolist()
        self.coming = [[] for _ in self.given]
        self.heap_of = [[]] * len(order)
        self.heaps = []
        rooms = room.tolist()
        missing = self.graph.missing
        for nodes in self.given:
            heaps: dict[float, list[int]] = {}
            for node in nodes:
                heap = heaps.setdefault(rooms[node], [])
                self.heap_of[node] = heap
                if not missing[node]:
                    heap.append(self.place[node])
            for heap in heaps.values():
                heapify(heap)
            self.heaps.append(list(heaps.values()))

    def is_done(self) -> bool:
        """Execute; whether all nodes have run, since none was left without room for it."""
        self.execute()
        return inf not in self.ends

    def choices(self, rank: int) -> Choices:
        """Yield the most urgent node that can start now, or None."""
        heaps = self.heaps[rank]
        heap_of = self.heap_of
        coming = self.coming[rank]
        place = self.place
        node_at = self.node_at
        most = self.most
        held = self.held
        last = len(node_at)
        best: int | None = None
        while True:
            now = yield best
            while coming and coming[0][0] <= now:
                node = heappop(coming)[1]
                heappush(heap_of[node], place[node])
            first = last
            for heap in heaps:
                if heap and heap[0] < first and held[rank] <= most[node_at[heap[0]]]:
                    first = heap[0]
                    chosen = heap
            best = None
            if first < last:
                best = node_at[first]
                heappop(chosen)

    def notice(self, node: int, rank: int, now: float) -> None:
        """Let a node whose inputs have all begun wait for them, and wake its rank for it."""
        arrival = self.arrival[node]
        heappush(self.coming[rank], (arrival, node))
        # A rank that is busy then chooses again when it is free.
        free = self.free[rank]
        if free < arrival or free <= now:
            heappush(self.events, (arrival if arrival > now else now, rank))
