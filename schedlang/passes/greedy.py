"""One execution of a schedule's ops, in which weight gradients are put where they cost least.

The heuristics of Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3.1:
ranks keep the order of their forwards and backwards; what a rank does while it waits for the next
one is to work off the oldest weight gradient that it owes, if the wait is long enough, or the
memory is full.
"""

from heapq import heappop, heappush
from math import inf

from attrs import define, field, frozen

from schedlang.passes.graph import ROUNDING, Graph, Orders
from schedlang.schedule.kinds import Kind

#: Nodes that are still to come, last first, each with its place in the given order before it.
Queue = list[tuple[int, int]]


@frozen
class Rules:
    """What the paper leaves open: several are tried, and the best result is kept.

    A weight gradient is put into a wait of at least `share` of its own time, and, if `even`, into
    any wait that would make this rank the one that has waited longest, and let it wait longer than
    it has to `spare`. If `skips`, a backward that can run goes before a forward that cannot.
    """

    share: float = 1.0
    even: bool = True
    skips: bool = False
    #: For each rank, from an execution before: how much less it waited than the rank that waited
    #: longest.
    spare: tuple[float, ...] = ()


@define
class Greedy:
    """The execution: `orders` and `ends` are its result, once `run` says that it reached the
    end. Any other share above `share_below` and up to `share_above` gives the same one.
    """

    graph: Graph
    given: Orders
    limit: float
    rules: Rules
    orders: Orders = field(init=False)
    ends: list[float] = field(init=False)
    #: Per rank: the forwards and the others.
    queues: list[tuple[Queue, Queue]] = field(factory=list)
    owed: Orders = field(init=False)
    paid: list[int] = field(init=False)
    free: list[float] = field(init=False)
    held: list[float] = field(init=False)
    waited: list[float] = field(init=False)
    longest: float = 0.0
    share_below: float = 0.0
    share_above: float = inf
    #: When a rank may have something to do.
    events: list[tuple[float, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        ranks = len(self.given)
        self.orders = [[] for _ in range(ranks)]
        self.owed = [[] for _ in range(ranks)]
        self.ends = [inf] * len(self.graph.ops)
        self.paid = [0] * ranks
        self.events = [(0.0, rank) for rank in range(ranks)]
        self.free = [0.0] * ranks
        self.held = [0.0] * ranks
        self.waited = [0.0] * ranks
        for order in self.given:
            forwards: Queue = []
            others: Queue = []
            for place, node in reversed(list(enumerate(order))):
                is_forward = self.graph.kind[node] == Kind.F
                (forwards if is_forward else others).append((place, node))
            self.queues.append((forwards, others))

    def run(self) -> bool:
        """Whether all ops can run in these orders and within the limit."""
        while self.events:
            now, rank = heappop(self.events)
            if self.free[rank] <= now:
                self.decide(rank, now)
        return inf not in self.ends

    def decide(self, rank: int, now: float) -> None:
        """Let an idle rank do what is next, or a weight gradient, or wait."""
        until = inf
        full = False
        forwards, others = self.queues[rank]
        is_forward = bool(forwards) and not (others and others[-1][0] < forwards[-1][0])
        # A backward may go before a forward that cannot run.
        queues = [forwards if is_forward else others]
        queues += [others] if is_forward and self.rules.skips else []
        for queue in filter(None, queues):
            node = queue[-1][1]
            arrival = self.arrival(node)
            if self.held[rank] + self.graph.rise[node] > self.limit + ROUNDING:
                full = full or arrival <= now
            elif arrival <= now:
                queue.pop()
                self.owed[rank] += self.graph.weights.get(node, ())
                self.start(rank, node, now)
                return
            elif arrival < until:
                until = arrival
        if self.paid[rank] < len(self.owed[rank]) and (full or self.is_worth(rank, until - now)):
            self.paid[rank] += 1
            self.start(rank, self.owed[rank][self.paid[rank] - 1], now)
        elif until < inf:
            heappush(self.events, (until, rank))

    def arrival(self, node: int) -> float:
        """When everything that a node waits for is there; infinite while some of it has not
        begun.
        """
        # Most of the time of a pass is spent here: `max` would take twice as long.
        ends = self.ends
        latest = 0.0
        for need, latency in self.graph.needs[node]:
            there = ends[need] + latency
            if there > latest:
                latest = there
        return latest

    def is_worth(self, rank: int, wait: float) -> bool:
        """Whether the oldest weight gradient owed is to fill a wait."""
        time = self.graph.time[self.owed[rank][self.paid[rank]]]
        share = (wait + ROUNDING) / time if time else inf
        if share >= self.rules.share:
            self.share_above = min(self.share_above, share)
            return True
        self.share_below = max(self.share_below, share)
        longest = max([self.longest, *self.rules.spare[rank : rank + 1]])
        return self.rules.even and self.waited[rank] + wait > longest

    def start(self, rank: int, node: int, now: float) -> None:
        """Let a rank do an op, and look again at the ranks that it concerns."""
        if self.orders[rank]:
            waited = self.waited[rank] + (now - self.free[rank])
            self.waited[rank] = waited
            self.longest = max(self.longest, waited)
        self.orders[rank].append(node)
        end = now + self.graph.time[node]
        self.ends[node] = end
        self.free[rank] = end
        self.held[rank] += self.graph.change[node]
        heappush(self.events, (end, rank))
        for user in self.graph.users[node]:
            other = self.graph.rank[user]
            if self.free[other] <= now:
                heappush(self.events, (now, other))
