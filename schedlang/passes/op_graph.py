"""A schedule's ops as a graph of dependencies, for searches that reorder each rank's ops."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from attrs import evolve

from schedlang.proof.durations import latencies, op_ends
from schedlang.proof.edges import own_ideal_events
from schedlang.proof.graph import Items
from schedlang.schedule.arrays import Flags, Floats, Ints, counts_of, members, repeated
from schedlang.schedule.columns import actions_of, op_names
from schedlang.schedule.kept import keeps_all
from schedlang.schedule.kinds import Kind
from schedlang.schedule.needs import all_needs_of
from schedlang.schedule.schedule import Schedule

#: Sums of times or of memory that differ by less than this are equal.
ROUNDING = 1e-9

#: For each rank, nodes in order.
Orders = list[list[int]]
#: The kind, the stage and the microbatch of an op.
Op = tuple[int, int, int]

T = TypeVar("T")


class Nodes:
    """Nodes that ranks run, as lists that are indexed by node: its duration, by how much it raises
    its rank's memory while it runs (`rise`) and once it has run (`change`), and its rank.
    """

    time: Sequence[float]
    rise: Sequence[float]
    change: Sequence[float]
    rank: Sequence[int]

    @property
    def missing(self) -> Sequence[int]:
        """The number of nodes for which each node waits."""
        raise NotImplementedError

    @property
    def users(self) -> Sequence[Sequence[tuple[int, float]]]:
        """The nodes that wait for each node, each with the latency of the message between them."""
        raise NotImplementedError


class Graph(Nodes):
    """The ops of a schedule that can run. A node is one op, or several that overlap; nodes are
    numbers from 0, and index all lists here.

    `ops[n]` are the ops of node n, and `rank[n]` is its rank. A weight gradient is always a node of
    its own; `weights[n]` are the weight gradients that can run once node n has. `order` is the
    schedule's own order. ValueError if the schedule has communication, copies or collectives.
    """

    # Lists of lists take longer to make than everything else, so they are cached properties.

    def __init__(self, schedule: Schedule) -> None:
        columns = schedule.columns
        if columns.is_transfer.any():
            raise ValueError(
                "the communication is written out: only its own order fits it"
            )
        if columns.is_background.any():
            raise ValueError(
                "copies or exchanges are written out: only their own order fits them"
            )
        if columns.is_collective.any():
            raise ValueError(
                "gathers, sums or hops are written out: only their own order fits them"
            )
        self.schedule = schedule
        # The actions sorted by node: of an overlap, the weight gradients come last, each as a node
        # of its own. With an overlap of F1 and I0, and another one of F2 and W0:
        #
        #     actions    F0   (F1  I0)   (W0  F2)
        #     rows       0     1   2      4   3
        #     nodes      0     1   1      2   3
        is_weight = columns.kind == Kind.W
        rows = np.lexsort((is_weight, columns.batch))
        is_first = is_weight[rows] | (np.diff(columns.batch[rows], prepend=-1) != 0)
        first = np.flatnonzero(is_first)
        #: How many ops each node has, and the actions of all nodes, one node after the other.
        self._sizes = np.diff(first, append=len(rows))
        self._actions = columns.taken(rows)
        self._nodes = repeated(np.arange(len(first)), self._sizes)
        #: The node of each action, by its row in the schedule's columns.
        self.node_of = np.empty(len(rows), np.int64)
        self.node_of[rows] = self._nodes
        self.rank: list[int] = self._actions.rank[first].tolist()
        kind = self._actions.kind
        is_other = kind != repeated(kind[first], self._sizes)
        #: The kind of a node's ops; None if it has ops of several kinds.
        self.kind: list[int | None] = kind[first].tolist()
        for node in self._nodes[is_other].tolist():
            self.kind[node] = None
        starts = np.searchsorted(self.rank, np.arange(len(schedule.ranks) + 1)).tolist()
        self.order: Orders = [
            list(range(begin, end)) for begin, end in pairwise(starts)
        ]
        self._price()
        self._connect()

    def _price(self) -> None:
        """Compute the time and the memory of each node."""
        costs = self.schedule.costs
        actions = self._actions
        node = self._nodes
        overlaps = evolve(actions, group=np.where(self._sizes[node] > 1, node + 1, 0))
        durations = costs.durations(self.schedule.layout).counted()
        after = op_ends(overlaps, np.arange(len(actions)), durations)
        last = np.cumsum(self._sizes) - 1
        #: Sums are made of fixed-point counts, as in the proof, so that they are exact.
        self.fixed = costs.fixed_times
        self._time = after[last]
        self.time: list[float] = self.fixed.numbers(self._time).tolist()
        self.fixed_memory = costs.fixed_memory
        amounts = costs.memory(self.schedule.layout).counted()
        amount = amounts.of(actions.kind, actions.stage, actions.microbatch)
        stays = keeps_all(
            self.schedule, actions.kind, actions.stage, actions.microbatch
        )
        # First all ops of a node allocate their memory, then all of them free theirs.
        takes = counts_of(node, np.maximum(amount, 0), len(last))
        change = counts_of(node, amount * stays, len(last))
        rise = np.where(takes > 0, takes, change)
        #: By how much a node raises its rank's memory: at its peak, and after it.
        self._held = rise, change
        self.rise: list[float] = self.fixed_memory.numbers(rise).tolist()
        self.change: list[float] = self.fixed_memory.numbers(change).tolist()

    def _connect(self) -> None:
        """Find the edges: which node waits for which, and the latency of each edge."""
        needs = all_needs_of(self.schedule)
        transfers = self.schedule.costs.transfers(len(self.schedule.placement))
        delay = np.zeros(len(needs.user))
        messages = needs.is_message
        table = latencies(self.schedule.layout, transfers)
        delay[messages] = table[needs.made[messages], needs.number[messages]]
        users = self.node_of[needs.user]
        makers = self.node_of[needs.maker]
        # Of several edges between two nodes, the one with the longest latency counts.
        order = np.lexsort((-delay, makers, users))
        order = order[users[order] != makers[order]]
        is_new = np.diff(users[order], prepend=-1) != 0
        is_new |= np.diff(makers[order], prepend=-1) != 0
        edges = order[is_new]
        makers_of = makers[edges]
        users_of = users[edges]
        #: The edges as columns: the node that waits, the node that it waits for, and the latency.
        self._edges = users_of, makers_of, delay[edges]
        # A weight gradient is alone in its node.
        kind = self._actions.kind[np.cumsum(self._sizes) - 1]
        owed = np.flatnonzero(kind[users_of] == Kind.W)
        self.weights: dict[int, list[int]] = {}
        pairs = zip(makers_of[owed].tolist(), users_of[owed].tolist(), strict=True)
        for maker, weight in pairs:
            self.weights.setdefault(maker, []).append(weight)

    def __len__(self) -> int:
        return len(self.time)

    @cached_property
    def ops(self) -> list[list[Op]]:
        """The ops of each node."""
        columns = self._actions.kind, self._actions.stage, self._actions.microbatch
        ops = list(zip(*(column.tolist() for column in columns), strict=True))
        return _grouped(ops, self._nodes, len(self))

    @property
    def microbatch(self) -> Ints:
        """The microbatch of each node's first op, of whatever slice; 0 for an optimizer step."""
        first = np.cumsum(self._sizes) - self._sizes
        slices = self.schedule.layout.slices
        numbers: Ints = np.maximum(self._actions.microbatch[first], 0) // slices
        return numbers

    @cached_property
    def names(self) -> list[list[int]]:
        """The kinds and stages of each node's ops, as one number each."""
        names = op_names(len(self.schedule.placement), self._actions).tolist()
        return _grouped(names, self._nodes, len(self))

    @cached_property
    def needs(self) -> list[list[tuple[int, float]]]:
        """The nodes for which each node waits, each with the latency of its message."""
        users, makers, delay = self._edges
        needed = list(zip(makers.tolist(), delay.tolist(), strict=True))
        return _grouped(needed, users, len(self))

    @cached_property
    def users(self) -> list[list[tuple[int, float]]]:
        """The nodes that wait for each node, each with the latency of the message between them."""
        users, makers, delay = self._edges
        order = np.argsort(makers, kind="stable")
        waiting = list(zip(users[order].tolist(), delay[order].tolist(), strict=True))
        return _grouped(waiting, makers[order], len(self))

    @cached_property
    def missing(self) -> list[int]:
        """The number of nodes for which each node waits."""
        counts: list[int] = counts_of(self._edges[0], minlength=len(self)).tolist()
        return counts

    def is_steady(self, starts: Ints) -> Flags:
        """Which nodes start in the steady phase of their rank: after it is done with its first
        microbatch, weight gradients apart, and before it begins its last.
        """
        columns = self._actions
        units = self.schedule.layout.units
        last = np.array(
            [units(stage) - 1 for stage in range(len(self.schedule.placement))]
        )
        is_first = (columns.microbatch == 0) & (columns.kind != int(Kind.W))
        is_last = columns.microbatch == last[columns.stage]
        start = starts[self._nodes]
        begin = np.zeros(len(self.order), np.int64)
        np.maximum.at(begin, columns.rank[is_first], start[is_first])
        end = np.full(len(self.order), starts.max(initial=0))
        np.minimum.at(end, columns.rank[is_last], start[is_last])
        rank = np.array(self.rank, np.int64)
        is_steady: Flags = (begin[rank] <= starts) & (starts <= end[rank])
        return is_steady

    def runs_like(self, other: "Graph") -> bool:
        """Whether both graphs have the same times, edges and latencies."""
        pairs = zip(self._edges, other._edges, strict=True)
        return self.time == other.time and all(np.array_equal(*pair) for pair in pairs)

    def without_weights(self) -> Orders:
        """The schedule's order without its weight gradients."""
        return [
            [node for node in order if self.kind[node] != Kind.W]
            for order in self.order
        ]

    def wait_for(self, needs: list[list[tuple[int, float]]]) -> None:
        """Replace the edges: for each node, the nodes for which it waits, each with a latency."""
        self.needs = needs
        users = repeated(np.arange(len(needs)), list(map(len, needs)))
        edges = np.array([edge for of_node in needs for edge in of_node]).reshape(-1, 2)
        self._edges = users, edges[:, 0].astype(np.int64), edges[:, 1]

    @cached_property
    def own_ends(self) -> list[float]:
        """The ends of all nodes if ranks follow the schedule's own order."""
        if self.schedule.columns.group.any():
            # Ops that overlap end together, and a weight gradient among them is a node of its own.
            return self.ends(self.order)
        # Each node is one op, and the proof, which is asked before any search, knows its end.
        events = own_ideal_events(self.schedule)
        ends: list[float] = self.fixed.numbers(events.graph.ends[events.item]).tolist()
        return ends

    def ends(self, orders: Orders) -> list[float]:
        """When each node ends if ranks follow these orders; an empty list if they deadlock."""
        if sum(map(len, orders)) < len(self):
            return []
        thread = np.empty(len(self), np.int64)
        place = np.empty(len(self), np.int64)
        for rank, order in enumerate(orders):
            thread[order] = rank
            place[order] = np.arange(len(order))
        users, makers, delay = self._edges
        latency = self.fixed.counts(delay)
        is_far = thread[users] != thread[makers]
        if not (is_far | (place[makers] < place[users])).all():
            return []
        items = Items()
        items.add(thread, place, self._time)
        # Within a rank, the order itself makes a node wait; an edge matters only with a latency.
        waited = is_far | (latency > 0)
        items.wait(users[waited], makers[waited], latency[waited])
        graph = items.graph()
        return self.fixed.numbers(graph.ends).tolist() if graph.is_whole else []

    @property
    def least_objective(self) -> float:
        """A lower bound of the objective of any order: the busiest rank's work, or for a makespan,
        `least_makespan`.
        """
        if self.schedule.objective == "span":
            return float(self.work.max(initial=0.0))
        return self.least_makespan

    @cached_property
    def least_makespan(self) -> float:
        """A lower bound of the makespan of any order: a rank's work, begun as soon as the first of
        its nodes could run on ranks without any other work.
        """
        work = self.work
        begin = np.full(len(work), np.inf)
        np.minimum.at(begin, self.rank, self._least_starts)
        return float((begin + work)[work > 0].max(initial=0.0))

    @property
    def _least_starts(self) -> Floats:
        """When each node could start if every node had a rank of its own."""
        users, makers, latency = self._edges
        return self._longest_paths(makers, users, latency)

    @property
    def least_tails(self) -> Floats:
        """The least time between the end of each node and the end of the last node."""
        users, makers, latency = self._edges
        return self._longest_paths(users, makers, latency)

    def _longest_paths(self, sources: Ints, targets: Ints, latency: Floats) -> Floats:
        """For each node, the longest path of edges and nodes that leads to it."""
        order = np.argsort(sources, kind="stable")
        targets = targets[order]
        latency = latency[order]
        counts = counts_of(sources, minlength=len(self))
        time = np.array(self.time)
        lengths = np.zeros(len(self))
        missing = counts_of(targets, minlength=len(self))
        # In waves of topological order: first the nodes to which no edge leads, then always the
        # nodes whose last edge comes from the wave before.
        ready = np.flatnonzero(missing == 0)
        while len(ready):
            nth, edges = members(counts, ready)
            reached = targets[edges]
            ends = lengths[ready] + time[ready]
            np.maximum.at(lengths, reached, ends[nth] + latency[edges])
            np.subtract.at(missing, reached, 1)
            ready = np.unique(reached[missing[reached] == 0])
        return lengths

    def room(self, limit: float) -> Floats:
        """How much each node's rank may hold while it runs, so that a node of each later stage of
        the rank, and of each later slice, still fits into the limit: then a microbatch that has
        begun can always go on.
        """
        slices = self.schedule.layout.slices
        placement = np.repeat(self.schedule.placement, slices)
        slices_of = self._actions.stage * slices + self._actions.microbatch % slices
        last = np.zeros(len(self), np.int64)
        np.maximum.at(last, self._nodes, slices_of)
        most = np.zeros(len(placement))
        np.maximum.at(most, last, np.array(self.rise))
        is_later = np.triu(np.equal.outer(placement, placement), 1)
        room: Floats = limit - (is_later @ most)[last]
        return room

    @cached_property
    def work(self) -> Floats:
        """The busy time of each rank."""
        return self.fixed.numbers(counts_of(self.rank, self._time, len(self.order)))

    def objective(self, orders: Orders, ends: list[float]) -> float:
        """The value that passes minimise, of an execution: its span or its makespan; see
        `Timeline`.
        """
        busy = [order for order in orders if order]
        difference = self.fixed.difference
        starts = [difference(self.time[order[0]], ends[order[0]]) for order in busy]
        stops = [ends[order[-1]] for order in busy]
        if self.schedule.objective == "span":
            return max(map(difference, starts, stops))
        return difference(min(starts), max(stops))

    def peak(self, order: list[int]) -> float:
        """The peak memory of a rank that runs nodes in this order."""
        if not order:
            return 0.0
        rise, change = self._held
        nodes = np.array(order, np.int64)
        before = np.append(0.0, np.cumsum(change[nodes])[:-1])
        return float(self.fixed_memory.numbers((before + rise[nodes]).max()))

    def highest_peak(self, orders: Orders) -> float:
        """The highest peak memory among all ranks."""
        return max(map(self.peak, orders))

    def reordered(self, orders: Orders) -> Schedule:
        """The schedule with other orders, without slots."""
        nodes = np.array([node for order in orders for node in order], np.int64)
        _, places = members(self._sizes, nodes)
        ranks = actions_of(len(orders), self._actions.taken(places))
        return evolve(self.schedule, ranks=ranks, slots=None)


def _grouped(values: list[T], groups: Ints, count: int) -> list[list[T]]:
    """Split values into `count` lists by their group; values of one group stand together."""
    bounds = np.searchsorted(groups, np.arange(count + 1)).tolist()
    return [values[begin:end] for begin, end in pairwise(bounds)]
