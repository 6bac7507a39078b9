"""The event graph: what waits for what, and how long after; and the one walk over it.

Events stand on *threads*: what a rank does, one thing after the other, is a thread, and so is a
lane of a transport, or a link to the host. An event happens once the one before it on its thread
has happened, and, if it waits for another event, once that one has, plus a delay; then it takes its
time:

    rank 0   --o F0 ----o F1 --------------------o B0
                |                               |
                | delay: the transfer           | delay
                |                               |
    rank 1      +-------o F0 ---------o B0 -----+

Programs of ranks have no choices, so all of this is known before anything runs: it is a timed event
graph. What the walk does not reach never happens: that is a deadlock. When an event happens is the
longest path to it.
"""

from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from math import inf

import numpy as np
from attrs import define, field, fields, frozen

from schedlang.schedule.arrays import Flags, Floats, Ints, counts_of, repeated

#: An event that never happens, as what something waits for; and none.
NEVER = -2
NOTHING = -1


@frozen(eq=False)
class Graph:
    """Events as columns, thread after thread: thread t has the events `first[t]` up to `first[t +
    1]`.

    An event waits for the event `waits` (NOTHING is the begin of all, at 0) and for `delay` more,
    and `takes` time. Events are made for *items*: item i is over with the event `over[i]`, and
    begins after the event `begin[i]`, which is the last one before it on its thread, or NOTHING.
    `edge[e]` is the edge, by its number, for which event e waits, or NOTHING.
    """

    first: Ints
    waits: Ints
    delay: Floats
    takes: Floats
    edge: Ints
    begin: Ints
    over: Ints

    @cached_property
    def times(self) -> Floats:
        """When each event happens; infinite for those that never do."""
        return walk(self)

    def among(self, walked: Iterable["Graph"]) -> "Graph":
        """The one of some graphs that is equal to this one, whose times are known; or this one."""
        return next(filter(self._equals, walked), self)

    def _equals(self, other: "Graph") -> bool:
        columns = (getattr(self, each.name) for each in fields(Graph))
        others = (getattr(other, each.name) for each in fields(Graph))
        return all(map(np.array_equal, columns, others))

    @cached_property
    def before(self) -> Ints:
        """For each event the one before it on its thread, or NOTHING."""
        before = np.arange(-1, len(self.waits) - 1)
        firsts = self.first[:-1]
        # The last threads may have no events.
        before[firsts[firsts < len(before)]] = NOTHING
        return before

    @cached_property
    def begins(self) -> Floats:
        """For each event, when all that it waits for is there, and it begins to take its time."""
        arrival = self.times_of(self.waits) + self.delay
        return np.maximum(self.times_of(self.before), arrival)

    @property
    def starts(self) -> Floats:
        """For each item, when it has waited for everything, and begins to take its time."""
        return self.begins[self.over]

    @property
    def ends(self) -> Floats:
        """For each item, when it is over; infinite if it never is."""
        return self.times[self.over]

    @property
    def is_whole(self) -> bool:
        """Whether everything happens."""
        return not np.isinf(self.times).any()

    def times_of(self, events: Ints) -> Floats:
        """When some events happen: NOTHING at 0, which is the begin of all, and NEVER never."""
        return np.append(self.times, [inf, 0.0])[events]

    def happened(self, event: int) -> bool:
        """Whether an event happens, or there is none to wait for."""
        return event == NOTHING or (event >= 0 and self.times[event] < inf)


@define
class Items:
    """Items and edges that are put together to a graph.

    Items of one thread happen in the order of their `order`. An edge lets an item wait for another
    one: until that is over, or `at_begin`, until the one before that is over.
    """

    count: int = 0
    #: Of each item: its thread, its place in the order there, and how long it takes.
    threads: list[Ints] = field(factory=list)
    orders: list[Ints] = field(factory=list)
    takes: list[Floats] = field(factory=list)
    #: Of each edge: the item that waits, the one that it waits for, whether for its begin, and how
    #: long after.
    waiters: list[Ints] = field(factory=list)
    targets: list[Ints] = field(factory=list)
    at_begins: list[Flags] = field(factory=list)
    delays: list[Floats] = field(factory=list)

    def add(self, thread: Ints, order: Ints, takes: Floats | float = 0.0) -> Ints:
        """More items; their numbers."""
        numbers = np.arange(self.count, self.count + len(order))
        self.count += len(order)
        self.threads.append(np.broadcast_to(thread, order.shape))
        self.orders.append(order)
        self.takes.append(np.full(len(order), takes, np.float64))
        return numbers

    def wait(
        self,
        waiter: Ints,
        target: Ints,
        delay: Floats | float = 0.0,
        at_begin: bool = False,
    ) -> None:
        """More edges. A target may be NEVER."""
        self.waiters.append(waiter)
        self.targets.append(target)
        self.at_begins.append(np.full(len(waiter), at_begin))
        self.delays.append(np.full(len(waiter), delay, np.float64))

    def graph(self) -> Graph:
        """The graph: an item that waits for n others has n events, of which the last takes its
        time.
        """
        # An item i that waits for items a and b, and then takes 4:
        #
        #     its thread   … ───●─────────────●─────────────●──── …
        #                    begin[i]      waits[e]       over[i]
        #                  the last of    = over[a]    waits for over[b],
        #                  the one before               then takes 4
        #
        # Without any edge, over[i] is its only event. For an edge `at_begin` of b, the event waits
        # for begin[b], where b may still have to wait for others.
        threads = np.concatenate(self.threads)
        orders = np.concatenate(self.orders)
        waiters = np.concatenate(self.waiters)
        targets = np.concatenate(self.targets)
        at_begins = np.concatenate(self.at_begins)
        delays = np.concatenate(self.delays)

        # Where the events of each item are: as many as it has edges, or one.
        sequence = np.lexsort((orders, threads))
        edges = counts_of(waiters, minlength=self.count)
        size = np.maximum(edges, 1)
        ends = np.cumsum(size[sequence])
        over = np.empty(self.count, np.int32)
        over[sequence] = ends - 1
        begin = over - size
        is_first = np.diff(threads[sequence], prepend=-1) != 0
        begin[sequence[is_first]] = NOTHING

        # What each event waits for: the edges of an item in the order in which they were given.
        events = int(size.sum())
        waits = np.full(events, NOTHING, np.int32)
        delay = np.zeros(events)
        edge = np.full(events, NOTHING, np.int32)
        order = np.argsort(waiters, kind="stable")
        nth = np.arange(len(order)) - repeated(np.cumsum(edges) - edges, edges)
        waiter = waiters[order]
        event = over[waiter] - size[waiter] + 1 + nth
        target = targets[order]
        waits[event] = target
        is_item = target >= 0
        reached = target[is_item]
        at_begin = at_begins[order][is_item]
        waits[event[is_item]] = np.where(at_begin, begin[reached], over[reached])
        delay[event] = delays[order]
        edge[event] = order

        takes = np.zeros(events)
        takes[over] = np.concatenate(self.takes)
        first = np.append(
            over[sequence[is_first]] - size[sequence[is_first]] + 1, events
        )
        return Graph(first, waits, delay, takes, edge, begin, over)


def walk(graph: Graph) -> Floats:
    """When each event of a graph happens; infinite for those that never do.

    Each thread goes on until it has to wait. What it waits for stays there once it is there, so the
    order in which threads are visited does not matter, and one walk decides (Kahn 1974). It takes
    time linear in the events.
    """
    # Two threads; b waits for e. The walk takes thread 0 to b, where it leaves it, thread 1 to its
    # end, and from e on thread 0 again:
    #
    #     thread 0   ─ a ─────── b ─ c           waiting = {e: [0]}  until e happens
    #                            │
    #     thread 1   ─ d ─── e ──┘
    # Numbers side by side are read faster than the objects of a list, and take less room.
    waits = array("i", graph.waits.astype(np.int32).tobytes())
    delay = array("d", graph.delay.tobytes())
    takes = array("d", graph.takes.tobytes())
    times = array("d", [inf]) * len(waits)
    #: The threads that wait for an event, and those that can go on.
    waiting: dict[int, list[Iterator[int]]] = {}
    ready: list[Iterator[int]] = []

    def thread(first: int, end: int) -> Iterator[int]:
        """Let the events of a thread happen; comes to each event that has not happened by then."""
        now = 0.0
        here = slice(first, end)
        events = zip(
            range(first, end), waits[here], delay[here], takes[here], strict=True
        )
        for event, other, late, take in events:
            if other >= 0:
                there = times[other] + late
                if there == inf:
                    yield other
                    there = times[other] + late
                if there > now:
                    now = there
            elif other == NEVER:
                return
            # The begin of all, at 0, and the delay after it.
            elif late > now:
                now = late
            now += take
            times[event] = now
            if event in waiting:
                ready.extend(waiting.pop(event))

    bounds = graph.first.tolist()
    ready += map(thread, bounds[:-1], bounds[1:])
    while ready:
        goes_on = ready.pop()
        other = next(goes_on, NOTHING)
        if other != NOTHING:
            waiting.setdefault(other, []).append(goes_on)
    return np.frombuffer(times) if len(times) else np.zeros(0)
