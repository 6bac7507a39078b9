"""One execution of a schedule's ops, in which weight gradients are put where they cost least.

The heuristics of Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3.1:
ranks keep the order of their forwards and backwards; what a rank does while it waits for the next
one is to work off the oldest weight gradient that it owes, if the wait is long enough, or the
memory is full.
"""

from collections.abc import Sequence
from heapq import heappush
from math import inf
from operator import lt

from attrs import define, field, frozen

from schedlang.passes.online import Choices, Online
from schedlang.passes.op_graph import ROUNDING, Graph
from schedlang.schedule.kinds import Kind

#: Nodes that are still to come, last first.
Queue = list[int]


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
class Greedy(Online[Graph]):
    """The execution: `orders` and `ends` are its result, once `run` says that it reached the
    end.
    """

    rules: Rules
    #: Per rank: how long it may wait, before the execution is given up.
    patience: list[float]
    #: Per rank: the forwards and the others.
    queues: list[tuple[Queue, Queue]] = field(factory=list)
    #: By node: its place in the given order of its rank.
    place: list[int] = field(init=False)
    waited: list[float] = field(init=False)
    spare: Sequence[float] = field(init=False)
    longest: float = 0.0
    #: What other rules would decide the same all along: any share above `share_below` and up to
    #: `share_above`; others in `skips`, unless these counted; others in `even`, unless a rank came
    #: to wait longest; others in `spare`, if each rank has less than what it had waited by then.
    share_below: float = 0.0
    share_above: float = inf
    do_skips_count: bool = False
    came_to_wait: list[float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.waited = [0.0 for _ in self.given]
        self.spare = self.rules.spare or [0.0 for _ in self.given]
        self.came_to_wait = [inf for _ in self.given]
        self.place = [0] * len(self.graph)
        kind = self.graph.kind
        forward = int(Kind.F)
        for order in self.given:
            for place, node in enumerate(order):
                self.place[node] = place
            forwards = [node for node in reversed(order) if kind[node] == forward]
            others = [node for node in reversed(order) if kind[node] != forward]
            self.queues.append((forwards, others))

    def run(self) -> bool:
        """Whether all ops can run in these orders, within the limit, and before any rank loses its
        patience.
        """
        self.execute()
        return inf not in self.ends

    def is_like(self, rules: Rules) -> bool:
        """Whether the execution by some other rules, once this one has run, is the same."""
        mine = self.rules
        is_share_alike = self.share_below < rules.share <= self.share_above
        are_skips_alike = rules.skips == mine.skips or not self.do_skips_count
        if mine.spare:
            # With less to spare, more waits could count.
            is_even_alike = (rules.even, rules.spare) == (mine.even, mine.spare)
        elif rules.even == mine.even:
            is_even_alike = all(map(lt, rules.spare, self.came_to_wait))
        else:
            is_even_alike = min(self.came_to_wait) == inf
        return is_share_alike and are_skips_alike and is_even_alike

    def choices(self, rank: int) -> Choices:
        """What is next, or a weight gradient; or None, and the rank waits."""
        # What an idle rank does, by what is next in its order:
        #
        #     next can run                       it runs
        #     next is late, but W is worth it    the oldest W that is owed
        #     next does not fit into memory      the same: a W lets go of some
        #     otherwise                          it waits, and is asked again when next is there
        #
        # Whether another rule would have decided otherwise is noted by the way, so that runs that
        # would come out the same are left out.
        skips = self.rules.skips
        most = self.limit + ROUNDING
        weights = self.graph.weights
        rise = self.graph.rise
        place = self.place
        arrival = self.arrival
        free = self.free
        held = self.held
        forwards, others = self.queues[rank]
        owed = list[int]()
        paid = 0
        node = None
        while True:
            now = yield node
            until = inf
            is_full = False
            queue = others
            if forwards and not (others and place[others[-1]] < place[forwards[-1]]):
                queue = forwards
            if queue:
                until = arrival[queue[-1]]
                if held[rank] + rise[queue[-1]] > most:
                    # Only the memory may be in the way of what is next.
                    is_full = until <= now
                    until = inf
                if until > now and queue is forwards and others:
                    # A backward may go before a forward that cannot run.
                    earlier = arrival[others[-1]]
                    is_other_full = False
                    if held[rank] + rise[others[-1]] > most:
                        is_other_full = earlier <= now
                        earlier = inf
                    if earlier < until or is_other_full > is_full:
                        self.do_skips_count = True
                        if skips:
                            queue = others
                            until = min(until, earlier)
                            is_full = is_full or is_other_full
            if until <= now:
                node = queue.pop()
                if node in weights:
                    owed += weights[node]
            elif paid < len(owed) and (
                is_full or self.is_worth(rank, owed[paid], until - now)
            ):
                node = owed[paid]
                paid += 1
            else:
                node = None
                if until < inf:
                    heappush(self.events, (until, rank))
                continue
            if now > free[rank]:
                self.count_wait(rank, now)
                if self.waited[rank] > self.patience[rank]:
                    return

    def is_worth(self, rank: int, weight: int, wait: float) -> bool:
        """Whether a weight gradient is to fill a wait."""
        time = self.graph.time[weight]
        share = (wait + ROUNDING) / time if time else inf
        if share >= self.rules.share:
            if share < self.share_above:
                self.share_above = share
            return True
        if share > self.share_below:
            self.share_below = share
        waited = self.waited[rank] + wait
        is_longest = waited > self.longest and waited > self.spare[rank]
        if is_longest and waited < self.came_to_wait[rank]:
            self.came_to_wait[rank] = waited
        return self.rules.even and is_longest

    def count_wait(self, rank: int, now: float) -> None:
        """Count how long a rank has waited by now for what it begins, unless that is its first."""
        if self.orders[rank]:
            waited = self.waited[rank] + (now - self.free[rank])
            self.waited[rank] = waited
            if waited > self.longest:
                self.longest = waited

    def notice(self, node: int, rank: int, now: float) -> None:
        """An idle rank learns how long it has to wait for what is next."""
        if self.free[rank] <= now:
            forwards, others = self.queues[rank]
            if (forwards and forwards[-1] == node) or (others and others[-1] == node):
                heappush(self.events, (now, rank))
