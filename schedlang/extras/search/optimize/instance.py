"""A problem in whole numbers, with the lags, orders and bounds that follow without a search."""

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
from schedlang.schedule.arrays import Ints
from schedlang.schedule.fixed_point import FixedPoint, meant
from schedlang.schedule.kinds import INPUT_HALVES, OPS, Kind

#: The limit of all durations together, in units.
_MOST_UNITS = 10**9
#: Decimals that are kept of costs with too many digits to be exact.
_DIGITS = 9
#: A time that is less than this below a whole unit is rounded up to it.
_ALMOST = 1e-4
#: Rounded values that differ by less than this share are equal.
_ROUNDED = 1e-6

#: The lag between two nodes that do not depend on each other.
_UNKNOWN = -(2**60)

#: Nodes u and v and a time: u starts at least that long before v.
Lag = tuple[int, int, int]


@frozen
class Holding:
    """An `amount` of a rank's memory: the node `taker` allocates it when it starts, and the node
    `user` frees it when it ends, at least `long` later.
    """

    amount: int
    taker: int
    user: int
    long: int


@frozen(eq=False)
class Instance(Nodes):
    """A problem whose times and amounts of memory are whole numbers; times are multiples of `unit`.

    Decimal costs are scaled to whole numbers, without an error if `is_exact`. If that would need
    more digits than the solver has, times are rounded down: then a lower bound still holds for the
    real costs, and orders are valid at any costs.

    Each node is in one of the `chains`, whose nodes keep their order. `lags` are least times
    between the starts of two nodes. They come from dependencies, from chains, and from memory.
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
        # A rank without a limit gets one that no order can exceed.
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
        """Lags between an op that frees memory and the forward that cannot start before it."""
        # Only some forwards of a chain fit into memory. The next one waits until the first of them
        # is freed, since ops that free memory come in the order of their chain, too.
        graph = self.problem.graph
        lags: list[Lag] = []
        # Chains of one stage, for microbatches that are alike, begin with the same microbatch.
        by_first = {
            graph.ops[chain[0]][0]: chain
            for chain in self.chains
            if len(graph.ops[chain[0]]) == 1
        }
        for (kind, stage, microbatch), holders in by_first.items():
            # With room for three, where F allocates 1 and B frees it:
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
                # The rest that is held after this op; a W may free it later.
                level = min(level, level + self.change[users[0]])
        return lags

    def reversed(self) -> "Instance":
        """The instance with time reversed: the last node comes first, and a node that frees memory
        allocates it. Its orders are those of this instance, reversed.
        """
        # A lag is from start to start. In reversed time, starts are ends:
        #
        #     first  ████┄┄┄┄┄┄┄┄                     second  ██████┄┄┄┄┄
        #     second ├── lag ───┤██████               first   ├ lag + 6 - 4 ┤████
        lags = [
            (second, first, lag + self.time[second] - self.time[first])
            for first, second, lag in self.lags
        ]
        # In reversed time, the memory after the node is there before it, and rises to the peak.
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
        """The nodes that wait for each node, each with the lag from its end to their start."""
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
        """How much each node's rank may hold once the node runs, so that one node of every later
        chain still fits: then a microbatch that has begun can always continue.
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
        """The nodes in topological order. If the lags have a cycle, some nodes are missing, and no
        order exists.
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
        """The index of each node in `topological`."""
        return {node: index for index, node in enumerate(self.topological)}

    @cached_property
    def longest_delay(self) -> int:
        """The longest latency of a message."""
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
        """The least time between the end of each node and the end of the last node."""
        # Computed from starts, since lags are from start to start.
        after = list(self.time)
        for node in reversed(self.topological):
            for second, lag in self.following[node]:
                after[node] = max(after[node], lag + after[second])
        return [length - time for length, time in zip(after, self.time, strict=True)]

    def lags_among(self, nodes: Sequence[int]) -> Ints:
        """For each two of these nodes, the longest path of lags from the first to the second, also
        through other nodes; negative if there is none.
        """
        # `distance[v, i]`: the longest path from `nodes[i]` to v, for every node v of the problem,
        # since paths lead through other nodes.
        distance = np.full((len(self.time), len(nodes)), _UNKNOWN)
        distance[nodes, np.arange(len(nodes))] = 0
        for node in self.topological:
            for second, lag in self.following[node]:
                np.maximum(distance[second], distance[node] + lag, out=distance[second])
        return distance[nodes].T

    def direct_lags(self, nodes: Sequence[int]) -> list[Lag]:
        """The longest paths between these nodes, without those that follow from two others."""
        among = self.lags_among(nodes)
        follows = np.zeros(among.shape, bool)
        for middle in range(len(nodes)):
            # Only a node that is known to lie between the two counts.
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
        """A cache for `known_orders`."""
        return {}

    def known_orders(self, rank: int) -> set[tuple[int, int]]:
        """The pairs of a rank's nodes in which the first comes before the second in any order."""
        known = self._known_orders.get(rank)
        if known is None:
            nodes = self.nodes_of_rank[rank]
            pairs = np.argwhere(self.lags_among(nodes) >= 0).tolist()
            known = {(nodes[one], nodes[other]) for one, other in pairs if one != other}
            self._known_orders[rank] = known
        return known

    def holdings(self, rank: int) -> tuple[list[Holding], int]:
        """The memory that nodes of a rank allocate and later nodes of the same stage and microbatch
        free; and the sum of what is freed besides, by which holdings may exceed the limit.
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
            # Memory that is never freed, or is allocated by overlapped ops, is left out: it only
            # makes the constraint weaker.
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
        """For each node, the least time from the begin to its start, and from its end to the end.
        Begin and end are those of all ranks, or of the node's rank if the objective is the span.
        """
        if self.problem.graph.schedule.objective == "makespan":
            return self.heads, self.tails
        # The longest path from the first start of each rank to the node's start, and from the
        # node's start to the end of each rank.
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
        """The orders with the nodes of each chain in the chain's order; they take no longer."""
        chain_of = {
            node: number for number, chain in enumerate(self.chains) for node in chain
        }
        following = [iter(chain) for chain in self.chains]
        return [[next(following[chain_of[node]]) for node in order] for order in orders]

    def value_of(self, units: float) -> float:
        """Convert units to a time."""
        return float(Fraction(units) * self.unit)

    def closed(self, answer: Answer) -> Answer:
        """Raise an answer's bound to its value if only rounding is between them."""
        if self.is_exact or answer.value > answer.bound * (1 + _ROUNDED):
            return answer
        return evolve(answer, bound=max(answer.bound, answer.value))

    def units(self, value: float) -> int:
        """Convert a time to units, rounded down."""
        fixed = self.problem.graph.fixed
        if fixed.is_exact(value):
            return floor(fixed.exact(value) / self.unit)
        return floor(value / self.unit + _ALMOST)


def chains_of(problem: Problem) -> list[list[int]]:
    """The nodes of a problem as chains: lists that may be sorted by microbatch without a loss.

    Two microbatches are alike if they have the same ops with the same costs, and each op needs the
    same ops of its own microbatch. Take any schedule of alike microbatches and exchange them: the
    first start of each op now belongs to the first microbatch, the second start to the second, and
    so on. Ranks are busy at the same times as before, and hold as much. The dependencies still
    hold: if an op started some time after another one for every microbatch, the n-th start of the
    one is at least that long after the n-th start of the other.

    Overlapped ops tie microbatches to each other: these form chains of single nodes.
    """
    graph = problem.graph
    layout = graph.schedule.layout
    Group = tuple[int, int]

    def group_of(node: int) -> Group | None:
        """A node's microbatch and its pipeline; None if it has no microbatch, or several."""
        if len(graph.ops[node]) > 1:
            return None
        ((_, stage, microbatch),) = graph.ops[node]
        if microbatch < 0:
            return None
        return layout.pipeline_of[stage].start, microbatch // layout.slices

    groups = [group_of(node) for node in range(len(graph.ops))]
    #: Microbatches that are alike to no other one, since they have overlapped ops.
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
        # Two microbatches whose sets of these are equal are alike.
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
    """A unit, and a function that converts values to it. That is exact, unless all values together
    would have more than `most` units: then values are rounded down, as limits are in any case.
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
    # The unit is one over the least common denominator, or larger.
    return 1 / scale, lambda value: floor(numbers.get(value, meant(value)) * scale)


def _one_machine(
    nodes: Sequence[int],
    before: Sequence[int],
    time: Sequence[int],
    behind: Sequence[int],
) -> int:
    """The least end of one rank's nodes, if they may be interrupted: the rank always runs the ready
    node with the longest tail (`behind`).
    """
    # Jackson's preemptive schedule (Carlier 1982, The one-machine sequencing problem). Node a is
    # ready at 0, takes 4 and has a tail of 1; b is ready at 1, takes 2 and has a tail of 6:
    #
    #     rank      a b b a a a                b interrupts a
    #     behind          └ 6 ──────┘          the least end is 3 + 6 = 9, in any order
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
