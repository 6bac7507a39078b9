"""A problem in whole numbers, with what follows from it before anything is tried."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from math import floor, inf, lcm

import numpy as np
from attrs import evolve, frozen

from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.passes.op_graph import Nodes, Orders
from schedlang.schedule.columns import Ints
from schedlang.schedule.fixed_point import FixedPoint, meant
from schedlang.schedule.kinds import INPUT_HALVES, OPS, Kind

#: The most units of time that all work together may have.
_MOST_UNITS = 10**9
#: Decimals that count of costs with too many digits to be exact; the rest is rounding.
_DIGITS = 9
#: A time that is short of a whole unit by less than this counts as that unit.
_ALMOST = 1e-4
#: Rounded values that differ by less than this share are equal.
_ROUNDED = 1e-6

#: The lag between two nodes that do not depend on each other.
_UNKNOWN = -(2**60)

#: Node `u` starts so long before node `v`, or longer.
Lag = tuple[int, int, int]


@frozen
class Holding:
    """An `amount` of a rank's memory that the node `taker` takes when it starts and the node `user`
    frees when it ends, at least `long` after.
    """

    amount: int
    taker: int
    user: int
    long: int


@frozen(eq=False)
class Instance(Nodes):
    """A problem whose times are multiples of a `unit`, and its amounts of memory whole numbers.

    Decimals become whole numbers as they are: `is_exact`. Where that would take more digits than a
    solver counts with, times are rounded down: what is then proved to be the least is so for the
    costs as they are too, and orders do not depend on it.

    `chains` are lists of nodes that come in this order: each node is in one. `lags` say how long
    before another one a node starts at least: what a node needs, the order in the chains, and what
    memory leaves open.
    """

    problem: Problem
    unit: Fraction
    is_exact: bool
    time: list[int]
    rise: list[int]
    change: list[int]
    rank: list[int]
    limits: list[int]
    chains: list[list[int]]
    lags: list[Lag]

    @classmethod
    def of(cls, problem: Problem) -> "Instance":
        """The instance of a problem."""
        graph = problem.graph
        delays = [delay for needs in graph.needs for _, delay in needs]
        times = [*graph.time, *delays]
        unit, whole = _in_units(times, graph.fixed, _MOST_UNITS)
        is_exact = all(
            graph.fixed.is_exact(time) and whole(time) * unit == graph.fixed.exact(time)
            for time in set(times)
        )
        _, amount = _in_units([*graph.rise, *graph.change], graph.fixed_memory)
        # More than anything can hold, for a rank without a limit.
        held = sum(map(abs, map(amount, graph.change))) + sum(
            map(abs, map(amount, graph.rise))
        )
        instance = cls(
            problem,
            unit,
            is_exact,
            [whole(time) for time in graph.time],
            [amount(rise) for rise in graph.rise],
            [amount(change) for change in graph.change],
            graph.rank,
            [amount(limit) if limit < inf else held for limit in problem.limits],
            chains_of(problem),
            [],
        )
        for node, needs in enumerate(graph.needs):
            for other, delay in needs:
                lag = instance.time[other] + whole(delay)
                instance.lags.append((other, node, lag))
        for chain in instance.chains:
            for first, second in pairwise(chain):
                instance.lags.append((first, second, instance.time[first]))
        instance.lags.extend(instance.room())
        return instance

    def room(self) -> list[Lag]:
        """Which forwards cannot start before which last uses, since there is no room before."""
        # Of a chain of forwards, so many may be under way that one more just fits. The next one
        # waits until, in the order of its own chain, what the first of them holds has been let go.
        graph = self.problem.graph
        lags: list[Lag] = []
        # Those of one stage and of microbatches that are alike begin with the same microbatch.
        by_first = {
            graph.ops[chain[0]][0]: chain
            for chain in self.chains
            if len(graph.ops[chain[0]]) == 1
        }
        for (kind, stage, microbatch), holders in by_first.items():
            # With room for three, where F holds 1 and B lets go of it:
            #
            #     F0 F1 F2 ─── F3            F3 waits for B0, F4 for B1, and so on
            #              B0 ──┘
            level = self.change[holders[0]]
            if OPS[kind].holds <= 0:
                continue
            room = self.limits[graph.rank[holders[0]]] - self.rise[holders[0]]
            for later in (*INPUT_HALVES, Kind.B, Kind.W):
                users = by_first.get((later, stage, microbatch))
                if users is None or level <= 0 or room < 0:
                    continue
                first = room // level + 1
                for use, start in zip(users, holders[first:], strict=False):
                    lags.append((use, start, self.time[use]))
                # What is still held behind this user; a later one, W, may let go of the rest.
                level = min(level, level + self.change[users[0]])
        return lags

    def reversed(self) -> "Instance":
        """The instance with time turned round: what ended last begins first, and what let go of
        memory takes it. Its orders are those of this one, backwards.
        """
        # A lag is from start to start. Turned round, starts are ends:
        #
        #     first  ████┄┄┄┄┄┄┄┄                     second  ██████┄┄┄┄┄
        #     second ├── lag ───┤██████               first   ├ lag + 6 - 4 ┤████
        lags = [
            (second, first, lag + self.time[second] - self.time[first])
            for first, second, lag in self.lags
        ]
        # Turned round, what the node left is there before it, and from that it rises to its peak.
        rise = [
            max(up, 0) - after for up, after in zip(self.rise, self.change, strict=True)
        ]
        change = [-after for after in self.change]
        chains = [chain[::-1] for chain in self.chains]
        return evolve(self, rise=rise, change=change, chains=chains, lags=lags)

    @cached_property
    def following(self) -> list[list[tuple[int, int]]]:
        """For each node, the nodes that wait for it, each with its lag."""
        following: list[list[tuple[int, int]]] = [[] for _ in self.time]
        for first, second, lag in self.lags:
            following[first].append((second, lag))
        return following

    @cached_property
    def users(self) -> list[list[tuple[int, int]]]:
        """The nodes that wait for each node, each with how long after its end they start."""
        return [
            [(second, lag - time) for second, lag in waiting]
            for waiting, time in zip(self.following, self.time, strict=True)
        ]

    @cached_property
    def missing(self) -> list[int]:
        """The number of nodes that each node waits for."""
        missing = [0] * len(self.time)
        for _, second, _ in self.lags:
            missing[second] += 1
        return missing

    @cached_property
    def room_for(self) -> list[int]:
        """What the rank of each node may hold when it starts, so that there is room left for one of
        each kind that is held later: what has begun can then go on.
        """
        room = [self.limits[rank] for rank in self.rank]
        holders = [chain for chain in self.chains if self.rise[chain[0]] > 0]
        holders.sort(key=lambda chain: self.heads[chain[0]], reverse=True)
        kept = [0] * len(self.limits)
        for chain in holders:
            rank = self.rank[chain[0]]
            for node in chain:
                room[node] -= kept[rank]
            kept[rank] += max(self.rise[node] for node in chain)
        return room

    @cached_property
    def topological(self) -> list[int]:
        """The nodes in topological order; some are missing if there is a cycle, and then there is
        no order at all.
        """
        waits = list(self.missing)
        order = [node for node, count in enumerate(waits) if not count]
        for node in order:
            for second, _ in self.following[node]:
                waits[second] -= 1
                if not waits[second]:
                    order.append(second)
        return order

    @cached_property
    def position(self) -> dict[int, int]:
        """Where each node is in `topological`."""
        return {node: index for index, node in enumerate(self.topological)}

    @cached_property
    def longest_delay(self) -> int:
        """The longest time that a result takes to arrive."""
        return max((lag - self.time[first] for first, _, lag in self.lags), default=0)

    @cached_property
    def heads(self) -> list[int]:
        """The earliest start of each node, if its rank had nothing else to do."""
        heads = [0] * len(self.time)
        for node in self.topological:
            for second, lag in self.following[node]:
                heads[second] = max(heads[second], heads[node] + lag)
        return heads

    @cached_property
    def tails(self) -> list[int]:
        """The least time between the end of each node and the end of all."""
        # From the start of each node: that it may start long before the next one counts, too.
        after = list(self.time)
        for node in reversed(self.topological):
            for second, lag in self.following[node]:
                after[node] = max(after[node], lag + after[second])
        return [length - time for length, time in zip(after, self.time, strict=True)]

    def lags_among(self, nodes: Sequence[int]) -> Ints:
        """For each two of some nodes, how long the first one starts before the second at least, by
        whatever way through others; below 0 where that is not known.
        """
        # `distance[v, i]`: how long `nodes[i]` starts before v at least. A row for every node of
        # the problem, since ways lead through others.
        distance = np.full((len(self.time), len(nodes)), _UNKNOWN)
        distance[nodes, np.arange(len(nodes))] = 0
        for node in self.topological:
            for second, lag in self.following[node]:
                np.maximum(distance[second], distance[node] + lag, out=distance[second])
        return distance[nodes].T

    def direct_lags(self, nodes: Sequence[int]) -> list[Lag]:
        """The lags between some nodes, but for those that follow from others."""
        among = self.lags_among(nodes)
        follows = np.zeros(among.shape, bool)
        for middle in range(len(nodes)):
            # By way of one that itself is known to be between.
            to = np.where(among[:, middle] >= 0, among[:, middle], _UNKNOWN)
            on = np.where(among[middle] >= 0, among[middle], _UNKNOWN)
            to[middle] = on[middle] = _UNKNOWN
            follows |= to[:, None] + on[None, :] >= among
        np.fill_diagonal(follows, True)
        pairs = zip(*np.nonzero((among >= 0) & ~follows), strict=True)
        return [
            (nodes[one], nodes[other], int(among[one, other])) for one, other in pairs
        ]

    @cached_property
    def nodes_of_rank(self) -> list[list[int]]:
        """The nodes of each rank."""
        return [list(order) for order in self.problem.graph.order]

    @cached_property
    def _known_orders(self) -> dict[int, set[tuple[int, int]]]:
        """What `known_orders` has given."""
        return {}

    def known_orders(self, rank: int) -> set[tuple[int, int]]:
        """The pairs of nodes of a rank of which the first one comes before the second in any
        order.
        """
        known = self._known_orders.get(rank)
        if known is None:
            nodes = self.nodes_of_rank[rank]
            pairs = np.argwhere(self.lags_among(nodes) >= 0).tolist()
            known = {(nodes[one], nodes[other]) for one, other in pairs if one != other}
            self._known_orders[rank] = known
        return known

    def holdings(self, rank: int) -> tuple[list[Holding], int]:
        """What nodes of a rank take and later ones of the same stage and microbatch let go of; and
        what is let go of beside that: so much more than its limit may be held at a time.
        """
        nodes = sorted(self.nodes_of_rank[rank], key=self.position.__getitem__)
        among = self.lags_among(nodes)
        ops = self.problem.graph.ops
        taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
        holdings = []
        beside = 0
        for place, node in enumerate(nodes):
            ((_, *name), *others) = ops[node]
            stage, microbatch = name
            mine = taken.setdefault((stage, microbatch), [])
            change = self.change[node]
            # What is taken and never let go of, or by ops that overlap, is left out: more may be
            # held than is counted.
            if change > 0 and not others:
                mine.append((change, place))
            left = max(-change, 0)
            while left and mine and not others and among[mine[-1][1], place] >= 0:
                amount, taker = mine.pop()
                part = min(amount, left)
                left -= part
                long = int(among[taker, place]) + self.time[node]
                holdings.append(Holding(part, nodes[taker], node, long))
                if part < amount:
                    mine.append((amount - part, taker))
            beside += left
        return holdings, beside

    @cached_property
    def windows(self) -> tuple[list[int], list[int]]:
        """For each node, how long after the begin it starts, and how long before the end it ends,
        at the least: begin and end of all, or where the objective is the span, of its rank.
        """
        if self.problem.graph.schedule.objective == "makespan":
            return self.heads, self.tails
        # How long after the first start of each rank a node starts, and how long after the node's
        # start the rank ends, by whatever way through others.
        nodes = np.arange(len(self.time))
        after = np.full((len(nodes), len(self.limits)), _UNKNOWN)
        after[nodes, self.rank] = 0
        until = np.full_like(after, _UNKNOWN)
        until[nodes, self.rank] = self.time
        for node in self.topological:
            for second, lag in self.following[node]:
                np.maximum(after[second], after[node] + lag, out=after[second])
        for node in reversed(self.topological):
            for second, lag in self.following[node]:
                np.maximum(until[node], until[second] + lag, out=until[node])
        behind = until[nodes, self.rank] - np.array(self.time)
        return after[nodes, self.rank].tolist(), behind.tolist()

    @cached_property
    def least(self) -> int:
        """A lower bound of the objective, from each rank by itself: its work, the earliest starts
        of its nodes and what follows them. It is the bound of one machine that may be interrupted
        (Jackson; Carlier 1982, The one-machine sequencing problem).
        """
        before, behind = self.windows
        return max(
            (
                _one_machine(nodes, before, self.time, behind)
                for nodes in self.nodes_of_rank
            ),
            default=0,
        )

    def in_chains(self, orders: Orders) -> Orders:
        """The orders with the nodes of each chain in the chain's order, which takes no longer."""
        chain_of = {
            node: number for number, chain in enumerate(self.chains) for node in chain
        }
        following = [iter(chain) for chain in self.chains]
        return [[next(following[chain_of[node]]) for node in order] for order in orders]

    def value_of(self, units: float) -> float:
        """A number of units as a time."""
        return float(Fraction(units) * self.unit)

    def closed(self, answer: Answer) -> Answer:
        """An answer, whose bound is its value where no more than rounding is between them."""
        if self.is_exact or answer.value > answer.bound * (1 + _ROUNDED):
            return answer
        return evolve(answer, bound=max(answer.bound, answer.value))

    def units(self, value: float) -> int:
        """A time as a number of units, not more than it is."""
        fixed = self.problem.graph.fixed
        if fixed.is_exact(value):
            return floor(fixed.exact(value) / self.unit)
        return floor(value / self.unit + _ALMOST)


def chains_of(problem: Problem) -> list[list[int]]:
    """The nodes of a problem in lists, of which each may be in order of its microbatches.

    Microbatches are alike where they have the same ops of the same costs, each of which needs the
    same of its own microbatch. Take any schedule of alike ones. Of each op, let the first start be
    that of the first microbatch, the second that of the second, and so on. Ranks are busy at the
    same times as before, and hold as much. And where an op of each microbatch started some time
    after another one of the same, it still does: the n-th start of the one is at least that long
    after the n-th start of the other, since n starts of the other stand before n of its own.

    Ops that overlap tie microbatches together: those of such microbatches are left as they are.
    """
    graph = problem.graph
    layout = graph.schedule.layout
    Group = tuple[int, int]

    def group_of(node: int) -> Group | None:
        """The microbatch that a node is of, with its pipeline; None for a node of none, or of
        several.
        """
        if len(graph.ops[node]) > 1:
            return None
        ((_, stage, microbatch),) = graph.ops[node]
        if microbatch < 0:
            return None
        return layout.pipeline_of[stage].start, microbatch // layout.slices

    groups = [group_of(node) for node in range(len(graph.ops))]
    #: What is not alike whatever it does: microbatches with ops that overlap.
    apart = {
        (layout.pipeline_of[stage].start, microbatch // layout.slices)
        for ops in graph.ops
        if len(ops) > 1
        for _, stage, microbatch in ops
    }
    likeness: dict[Group, set[object]] = {}
    for node, group in enumerate(groups):
        if group is None:
            continue
        needs = set()
        for other, delay in graph.needs[node]:
            if groups[other] == group:
                needs.add((problem.names[other], delay))
            else:
                apart.add(group)
        held = graph.rise[node], graph.change[node]
        # Two microbatches whose sets of these are equal do the same at the same costs: so either
        # may be first.
        of_node = (problem.names[node], graph.time[node], held, frozenset(needs))
        likeness.setdefault(group, set()).add(of_node)
    chains: dict[object, list[int]] = {}
    for node, group in enumerate(groups):
        key: object = node
        if group is not None and group not in apart:
            key = problem.names[node], group[0], frozenset(likeness[group])
        chains.setdefault(key, []).append(node)
    for chain in chains.values():
        chain.sort(key=lambda node: graph.ops[node][0][2])
    return list(chains.values())


def _in_units(
    values: Sequence[float], fixed: FixedPoint, most: float = inf
) -> tuple[Fraction, Callable[[float], int]]:
    """A unit, and a function that counts values in it: exactly, or, if that would take more than
    `most` units for all of them together, rounded down. A limit is rounded down, too.
    """
    numbers: dict[float, Fraction] = {}
    for value in set(values):
        is_rounded = fixed.denominator is None
        number = meant(round(value, _DIGITS)) if is_rounded else fixed.exact(value)
        numbers[value] = Fraction(number)
    scale = Fraction(lcm(*(number.denominator for number in numbers.values())))
    total = sum(abs(numbers[value]) for value in values)
    if total * scale > most:
        scale = Fraction(most) / total
    # As many units as all values have in common make one.
    return 1 / scale, lambda value: floor(numbers.get(value, meant(value)) * scale)


def _one_machine(
    nodes: Sequence[int],
    before: Sequence[int],
    time: Sequence[int],
    behind: Sequence[int],
) -> int:
    """The least end of one rank's nodes, if each may be interrupted: at any moment it does, of
    those that can start, the one with the most behind it.
    """
    # Jackson's preemptive schedule (Carlier 1982, The one-machine sequencing problem). Of a, there
    # at 0 for 4 with 1 behind it, and b, there at 1 for 2 with 6 behind it:
    #
    #     rank      a b b a a a                a makes room for b, and goes on after it
    #     behind          └ 6 ──────┘          the least end is 3 + 6 = 9, whatever comes first
    arrivals = sorted(nodes, key=lambda node: before[node])
    left = list(time)
    there: list[tuple[int, int]] = []
    least = now = index = 0
    while index < len(arrivals) or there:
        if not there:
            now = max(now, before[arrivals[index]])
        while index < len(arrivals) and before[arrivals[index]] <= now:
            heappush(there, (-behind[arrivals[index]], arrivals[index]))
            index += 1
        _, node = there[0]
        until = now + left[node]
        if index < len(arrivals):
            until = min(until, before[arrivals[index]])
        left[node] -= until - now
        now = until
        if not left[node]:
            heappop(there)
            least = max(least, now + behind[node])
    return least
