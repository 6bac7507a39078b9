"""Improve orders window by window: the nodes that start within a window of time are put into the
best order, while the nodes before and after it keep theirs.

This is large neighbourhood search (Shaw 1998, Using constraint programming and local search methods
to solve vehicle routing problems) with windows of time as neighbourhoods.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from time import monotonic

import numpy as np
from attrs import define, evolve, field, frozen
from ortools.sat.python import cp_model

from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.solver import (
    Before,
    hold_within,
    solved,
    which_is_first,
)
from schedlang.passes.op_graph import Orders
from schedlang.schedule.arrays import Ints

#: The nodes of a rank in the first windows, and the factor by which windows grow once none gains.
_NODES = 12
_GROWTH = 1.5
#: The limit of the solver's deterministic time for a window, in seconds.
_EFFORT = 5.0
#: The distance to the end of a group in which no node waits for this one.
_NEVER = -(2**60)


def windows(
    problem: Problem, known: Answer, seconds: float, workers: int = 1
) -> Iterator[Answer]:
    """See `Solver`. It needs orders to begin with, and proves no bound."""
    if not known.orders:
        return
    for answer in Windows(problem, known, monotonic() + seconds, workers).answers():
        if answer.value < known.value:
            known = answer
            yield answer


@frozen
class _Execution:
    """The starts of all nodes in some orders; and `after`, by node and group of ranks: the longest
    path from the node's start to the group's end, `_NEVER` if there is none.

    If the objective is the makespan, all ranks are one group; if it is the span, each rank is one.
    """

    orders: Orders
    start: list[int]
    after: Ints


@define
class Windows:
    """The search from an `answer`, until a deadline. `spent` are the deterministic seconds of
    CP-SAT that it has taken so far.
    """

    problem: Problem
    answer: Answer
    deadline: float
    workers: int
    spent: float = 0.0
    instance: Instance = field(init=False)
    #: By node: the number of its chain.
    chain: dict[int, int] = field(init=False)
    is_span: bool = field(init=False)
    now: _Execution = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.instance = Instance.of(self.problem)
        self.chain = {
            node: number
            for number, chain in enumerate(self.instance.chains)
            for node in chain
        }
        self.is_span = self.problem.graph.schedule.objective == "span"
        begin = self.execute(self.instance.in_chains(self.answer.orders))
        # Known orders cannot deadlock.
        assert begin is not None
        self.now = begin

    def answers(self) -> Iterator[Answer]:
        """Yield the answer after each window, improved or not, until no window of any size gains,
        or the time is over.
        """
        most = max(map(len, self.now.orders))
        nodes = _NODES
        while True:
            gains = False
            # The windows of the second round lie across the borders of the first.
            for shift in (0.0, 0.5):
                for window in self.cut(nodes, shift):
                    if monotonic() >= self.deadline or self.answer.is_best:
                        return
                    gains = self.improves(window) or gains
                    yield self.answer
            if not gains:
                if nodes >= most:
                    return
                nodes = int(nodes * _GROWTH)

    def cut(self, nodes: int, shift: float) -> list[tuple[float, float]]:
        """Cut the makespan into windows, each of about as many nodes of a rank as `nodes` says."""
        count = max(round(max(map(len, self.now.orders)) / nodes), 1)
        width = max(self.now.start) / count + 1
        begins = [(number - shift) * width for number in range(count + 1)]
        return [(begin, begin + width) for begin in begins]

    def improves(self, window: tuple[float, float]) -> bool:
        """Put a window into its best order; return whether that gains."""
        orders = _Window(self, *window).solved()
        execution = orders and self.execute(orders)
        if not execution or not orders:
            return False
        value = self.problem.value(orders)
        if value > self.answer.value:
            return False
        # Equal orders are taken, too: the next window then begins from other ones.
        self.now = execution
        is_better = value < self.answer.value
        self.answer = evolve(self.answer, orders=orders, value=value, source="windows")
        return is_better

    def execute(self, orders: Orders) -> _Execution | None:
        """The execution of some orders; None if they deadlock."""
        instance = self.instance
        time = instance.time
        # The node after each one on its rank: it waits for that one.
        behind = [-1] * len(time)
        waits = [0] * len(time)
        for order in orders:
            for node, following in pairwise(order):
                behind[node] = following
                waits[following] += 1
        for _, second, _ in instance.lags:
            waits[second] += 1
        start = [0] * len(time)
        ready = [node for node, count in enumerate(waits) if not count]
        for node in ready:
            following_nodes = instance.following[node]
            if behind[node] >= 0:
                following_nodes = [*following_nodes, (behind[node], time[node])]
            for second, lag in following_nodes:
                start[second] = max(start[second], start[node] + lag)
                waits[second] -= 1
                if not waits[second]:
                    ready.append(second)
        if len(ready) < len(time):
            return None
        group = instance.problem.graph.rank if self.is_span else [0] * len(time)
        after = np.full((len(time), len(orders) if self.is_span else 1), _NEVER)
        for node in reversed(ready):
            # This is a view, so writing to it changes the table.
            row = after[node]
            row[group[node]] = time[node]
            for second, lag in instance.following[node]:
                np.maximum(row, after[second] + lag, out=row)
            if behind[node] >= 0:
                np.maximum(row, after[behind[node]] + time[node], out=row)
        return _Execution(orders, start, after)


class _Window:
    """The nodes that start within a window, as a model in which they may come in any order."""

    def __init__(self, search: Windows, begin: float, end: float) -> None:
        self.search = search
        self.instance = search.instance
        now = search.now
        # By rank: the range of its order that lies in the window; the rest keeps its place.
        #
        #     order       a b c │ d e f │ g h
        #     places            3       6
        self.places = [
            (
                sum(now.start[node] < begin for node in order),
                sum(now.start[node] < end for node in order),
            )
            for order in now.orders
        ]
        self.nodes = [
            order[i:j] for order, (i, j) in zip(now.orders, self.places, strict=True)
        ]
        self.inside = {node for nodes in self.nodes for node in nodes}

    def solved(self) -> Orders | None:
        """The orders with the window in the best order found; None if the solver finds none."""
        if len(self.inside) < 2:
            return None
        self.model = cp_model.CpModel()
        self._start()
        for rank, nodes in enumerate(self.nodes):
            self._order(rank, nodes)
        self._minimise()
        left = self.search.deadline - monotonic()
        solver, is_found = solved(self.model, self.search.workers, _EFFORT, left)
        self.search.spent += solver.deterministic_time
        if not is_found:
            return None
        orders: Orders = []
        for order, (i, j) in zip(self.search.now.orders, self.places, strict=True):
            inside = sorted(
                order[i:j],
                key=lambda node: (
                    solver.value(self.start[node]),
                    self.instance.time[node],
                ),
            )
            orders.append([*order[:i], *inside, *order[j:]])
        return orders

    def _start(self) -> None:
        """Let nodes start after those before the window, and wait for the nodes that they need."""
        now = self.search.now
        # An upper bound of starts: all nodes of the window run one after the other.
        latest = max(now.start[node] for node in self.inside)
        latest += sum(self.instance.time[node] for node in self.inside)
        self.start = {}
        for order, (i, j) in zip(now.orders, self.places, strict=True):
            # The end of the rank's last node before the window.
            free = (
                now.start[order[i - 1]] + self.instance.time[order[i - 1]] if i else 0
            )
            for node in order[i:j]:
                self.start[node] = self.model.new_int_var(free, latest, "")
                self.model.add_hint(self.start[node], now.start[node])
        for first, second, lag in self.instance.lags:
            # Nodes before the window are fixed, and nodes after it count by `after`.
            if second not in self.inside:
                continue
            begin = self.start[first] if first in self.inside else now.start[first]
            self.model.add(self.start[second] >= begin + lag)

    def _order(self, rank: int, nodes: Sequence[int]) -> None:
        """Let the nodes of a rank run one after the other, within its memory."""
        instance = self.instance
        start = self.start
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(start[node], instance.time[node], "")
            for node in nodes
        )
        before: dict[tuple[int, int], Before] = {}
        for first, second in combinations(nodes, 2):
            # The nodes of a chain keep their order.
            literal: Before = True
            if self.search.chain[first] != self.search.chain[second]:
                starts = start[first], start[second]
                times = instance.time[first], instance.time[second]
                literal = which_is_first(self.model, *starts, *times)
                self.model.add_hint(literal, True)
            before[first, second] = literal
            before[second, first] = (
                not literal if isinstance(literal, bool) else ~literal
            )
        i, _ = self.places[rank]
        held = sum(instance.change[node] for node in self.search.now.orders[rank][:i])
        room = instance.limits[rank] - held
        hold_within(self.model, instance, nodes, before, room)

    def _minimise(self) -> None:
        """Minimise the objective, and then the sum of the ranks' ends in the window."""
        now = self.search.now
        horizon = 2 * (
            max(now.start) + sum(self.instance.time[node] for node in self.inside)
        )
        value = self.model.new_int_var(0, horizon, "value")
        groups = range(now.after.shape[1])
        begins = [self._begin(group) for group in groups]
        for order, (_, j) in zip(now.orders, self.places, strict=True):
            following = order[j] if j < len(order) else None
            for node in self.inside.intersection(order):
                for group, length in self._lengths(node, following):
                    self.model.add(self.start[node] + length - begins[group] <= value)
        ends = []
        for nodes in self.nodes:
            if nodes:
                end = self.model.new_int_var(0, horizon, "")
                for node in nodes:
                    self.model.add(self.start[node] + self.instance.time[node] <= end)
                ends.append(end)
        # The weight of the objective exceeds all ends together, so ends only choose among equals.
        self.model.minimize(2 * len(ends) * value + sum(ends))

    def _begin(self, group: int) -> cp_model.IntVar:
        """The begin of a group: 0 for all ranks together, the first start for a single rank."""
        if not self.search.is_span:
            return self.model.new_constant(0)
        now = self.search.now
        order = now.orders[group]
        i, j = self.places[group]
        if i > 0 or j == 0:
            # A rank that begins after the window might begin earlier than now; this is a guess.
            return self.model.new_constant(now.start[order[0]] if order else 0)
        begin = self.model.new_int_var(0, max(now.start), "")
        for node in order[:j]:
            self.model.add(begin <= self.start[node])
        return begin

    def _lengths(self, node: int, following: int | None) -> Iterator[tuple[int, int]]:
        """The longest path from a node's start to the end of each group, among the paths that leave
        the window right after the node.
        """
        now = self.search.now
        longest = np.full(now.after.shape[1], _NEVER)
        group = self.instance.problem.graph.rank[node] if self.search.is_span else 0
        longest[group] = self.instance.time[node]
        for second, lag in self.instance.following[node]:
            if second not in self.inside:
                np.maximum(longest, now.after[second] + lag, out=longest)
        if following is not None:
            np.maximum(
                longest, now.after[following] + self.instance.time[node], out=longest
            )
        for number, length in enumerate(longest.tolist()):
            if length > 0:
                yield number, length
