"""List scheduling: a rank that is free runs the most urgent of its ops that are ready.

An op is ready once its inputs have arrived, and if its rank has room for what it holds. The order
follows from the costs alone, and takes one walk over the ops to find. So each batch can have its
own: every rank of a training run works out the same one from the same costs, and none has to ask
another.
"""

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

import numpy as np

from schedlang.passes.best_order import best_order
from schedlang.passes.op_graph import ROUNDING, Graph, Nodes, Orders
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
        execution = most_urgent_first(graph, len(graph.order), urgency, room)
        if execution is not None:
            found.append((graph.objective(*execution), execution[0]))
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


def most_urgent_first(
    graph: Nodes,
    ranks: int,
    urgency: Sequence[float] | Floats,
    room: Sequence[float] | Floats,
) -> tuple[Orders, list[float]] | None:
    """The execution in which each rank runs the most urgent of its ready nodes: the nodes of each
    rank in their order, and when each node ends; None if a node never has room.

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
    by_urgency = np.argsort(-np.asarray(urgency), kind="stable")
    node_at: list[int] = by_urgency.tolist()
    places = np.empty_like(by_urgency)
    places[by_urgency] = np.arange(len(by_urgency))
    place: list[int] = places.tolist()
    rise = np.asarray(graph.rise)
    room = np.where(rise > 0, room, inf)
    #: By place: the most that the node's rank may hold before it.
    most: list[float] = (room - rise)[by_urgency].tolist()
    heaps: dict[tuple[int, float], list[int]] = defaultdict(list)
    #: By node: the heap of its rank that it joins once it is ready, with its place.
    heap_of = [heaps[key] for key in zip(graph.rank, room.tolist(), strict=True)]
    #: By rank: these heaps.
    heaps_of: list[list[list[int]]] = [[] for _ in range(ranks)]
    for (rank, _), heap in heaps.items():
        heaps_of[rank].append(heap)
    #: By node: how many of its inputs have not arrived.
    missing = list(graph.missing)
    for node, inputs in enumerate(missing):
        if not inputs:
            heappush(heap_of[node], place[node])

    # Time advances from event to event. Idle ranks choose once all events of a moment are over, the
    # first rank first:
    #
    #     events    (3, F0 ends)  (3, B2 gets an input)  (5, B7 ends)  …      the earliest first
    #                    │                  │
    #                    └──────────────────┴─► idle ranks start F1 and B2 ──► (4, F1 ends)  …
    # Attributes are read into local variables, since most of the pass's time goes into this loop.
    time = graph.time
    change = graph.change
    users = graph.users
    rank_of = graph.rank
    orders: Orders = [[] for _ in range(ranks)]
    ends = [inf] * len(time)
    held = [0.0] * ranks
    is_busy = [False] * ranks
    #: A heap: the end of node n is (time, n), and the arrival of an input of it (time, ~n).
    events: list[tuple[float, int]] = []
    now = 0.0
    none = len(time)
    #: A heap of the ranks that may have something to do.
    awake = list(range(ranks))
    while events or awake:
        if awake and not (events and events[0][0] == now):
            rank = heappop(awake)
            if is_busy[rank]:
                continue
            first = none
            for heap in heaps_of[rank]:
                if heap and heap[0] < first and held[rank] <= most[heap[0]]:
                    first = heap[0]
                    chosen = heap
            if first < none:
                heappop(chosen)
                node = node_at[first]
                end = now + time[node]
                orders[rank].append(node)
                ends[node] = end
                held[rank] += change[node]
                is_busy[rank] = True
                heappush(events, (end, node))
            continue
        now, node = heappop(events)
        if node >= 0:
            rank = rank_of[node]
            is_busy[rank] = False
            heappush(awake, rank)
            waiting = users[node]
        else:
            waiting = ((~node, 0.0),)
        for user, latency in waiting:
            if latency:
                heappush(events, (now + latency, ~user))
                continue
            missing[user] -= 1
            if not missing[user]:
                heappush(heap_of[user], place[user])
                if not is_busy[rank_of[user]]:
                    heappush(awake, rank_of[user])
    return None if inf in ends else (orders, ends)
