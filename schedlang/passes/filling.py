"""One execution of a schedule's ops that puts weight gradients into the waits of ranks.

The heuristics of Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3.1:
ranks keep the order of their forwards and backwards. A rank that waits for its next op computes the
oldest weight gradient that it owes, if the wait is long enough or its memory is full.
"""

from collections.abc import Sequence
from heapq import heappush
from math import inf
from operator import lt

from attrs import define, field, frozen

from schedlang.passes.online import Choices, Online
from schedlang.passes.op_graph import ROUNDING
from schedlang.schedule.kinds import Kind

#: Nodes that have not run yet, the next one at the end.
Queue = list[int]


@frozen
class Rules:
    """Choices that the paper leaves open; several are tried, and the best result is kept.

    A weight gradient fills a wait that is at least `share` of its own time. With `even`, it also
    fills a wait that would make the rank's waits exceed its `spare` and those of every other rank.
    With `skips`, a backward that can run goes before a forward that cannot.
    """

    share: float = 1.0
    even: bool = True
    skips: bool = False
    #: For each rank: by how much less it waited, in an earlier execution, than the rank that waited
    #: longest.
    spare: tuple[float, ...] = ()


@define
class Greedy(Online):
    """The execution. If `run` returns True, `orders` and `ends` are its result."""

    rules: Rules
    #: Per rank: how long it may wait before the execution is given up.
    patience: list[float]
    #: Per rank: its forwards, and its other nodes.
    queues: list[tuple[Queue, Queue]] = field(factory=list)
    #: By node: its place in the given order of its rank.
    place: list[int] = field(init=False)
    waited: list[float] = field(init=False)
    spare: Sequence[float] = field(init=False)
    longest: float = 0.0
    #: Which other rules would have made the same choices: any `share` above `share_below` and up to
    #: `share_above`; the other `skips`, unless it counted once; the other `even`, unless a rank
    #: came to wait longest; any `spare` that is, for each rank, less than `came_to_wait`.
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
        """Execute; return whether all ops ran before memory or some rank's patience ran out."""
        self.execute()
        return inf not in self.ends

    def is_like(self, rules: Rules) -> bool:
        """Whether other rules would give the execution that these have given."""
        mine = self.rules
        is_share_alike = self.share_below < rules.share <= self.share_above
        are_skips_alike = rules.skips == mine.skips or not self.do_skips_count
        if mine.spare:
            # Other values to spare could let other waits count.
            is_even_alike = (rules.even, rules.spare) == (mine.even, mine.spare)
        elif rules.even == mine.even:
            is_even_alike = all(map(lt, rules.spare, self.came_to_wait))
        else:
            is_even_alike = min(self.came_to_wait) == inf
        return is_share_alike and are_skips_alike and is_even_alike

    def choices(self, rank: int) -> Choices:
        """Yield the rank's next node, or a weight gradient, or None if the rank waits."""
        # An idle rank decides by the next node of its order:
        #
        #     it can run                        run it
        #     it is late, and a W is worth it   run the oldest W that is owed
        #     it does not fit into memory       the same, since a W frees memory
        #     otherwise                         wait, and decide again when its inputs are there
        #
        # The choices that another rule would have made differently are noted, so that trials with
        # the same result are not run.
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
                    # If the inputs are there, memory alone is in the way.
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
        """Whether a weight gradient should fill a wait."""
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
        """Add a rank's wait before the node that it begins now, unless that is its first node."""
        if self.orders[rank]:
            waited = self.waited[rank] + (now - self.free[rank])
            self.waited[rank] = waited
            if waited > self.longest:
                self.longest = waited

    def notice(self, node: int, rank: int, now: float) -> None:
        """Wake an idle rank if this node is its next one: now it knows when the inputs arrive."""
        if self.free[rank] <= now:
            forwards, others = self.queues[rank]
            if (forwards and forwards[-1] == node) or (others and others[-1] == node):
                heappush(self.events, (now, rank))
