"""Greedy list scheduling, forwards and backwards in time by turns, for good orders to begin from.

An execution backwards in time gives the urgencies of nodes for the next one forwards, and the other
way round (Li and Willis 1992, An iterative scheduling technique for resource-constrained project
scheduling). When that gains no more, the urgencies of whole chains are changed at random, and a
change is kept if it gains.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import inf
from random import Random
from time import monotonic

from attrs import frozen

from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.published import published
from schedlang.passes.greedy import most_urgent_first
from schedlang.passes.op_graph import Orders

#: The number of orders to try.
_MOST = 600
#: The largest change of a chain's urgency, as a share of the makespan's lower bound.
_SHARE = 0.3


def from_greedy(
    problem: Problem, known: Answer, seconds: float, seed: int = 0
) -> Iterator[Answer]:
    """See `Solver`: the best of some hundred greedy orders. The first ones take their urgencies
    from published schedules.
    """
    deadline = monotonic() + seconds
    instance = Instance.of(problem)
    for orders, value in chain(
        _as_published(instance), islice(starts(instance, seed), _MOST)
    ):
        if value < known.value:
            known = Answer(orders, value, known.bound, "greedy")
            yield known
        if known.is_best or monotonic() > deadline:
            return


def _as_published(instance: Instance) -> Iterator[tuple[Orders, float]]:
    """Greedy orders in which nodes are as urgent as they are early in published schedules."""
    graph = instance.problem.graph
    backwards = instance.reversed()
    for _, orders in published(instance.problem):
        # Published orders may exceed the memory here, but their starts still are good urgencies.
        urgency = [
            time - end
            for end, time in zip(graph.ends(orders), graph.time, strict=False)
        ]
        if urgency:
            yield from _to_and_fro(instance, backwards, urgency, instance.room_for)


def greedy(
    instance: Instance, urgency: Sequence[float], room: Sequence[int] | None = None
) -> Orders | None:
    """The orders of a greedy execution, in which chains keep their order; None if it gets stuck.

    A node begins only if its rank then holds at most the node's `room`, by default
    `Instance.room_for`.
    """
    room = instance.room_for if room is None else room
    ranks = len(instance.nodes_of_rank)
    execution = most_urgent_first(instance, ranks, urgency, room)
    return None if execution is None else execution[0]


def starts(instance: Instance, seed: int = 0) -> Iterator[tuple[Orders, float]]:
    """An endless iterator of greedy orders and their values; it is empty if the first greedy
    execution gets stuck.
    """
    random = Random(seed)
    backwards = instance.reversed()
    change = _Change([0.0 for _ in instance.chains], [0 for _ in instance.chains])
    best = inf
    changed = change
    while True:
        values = []
        for orders, value in _to_and_fro(instance, backwards, *changed.of(instance)):
            values.append(value)
            yield orders, value
        if not values and best == inf:
            return
        least = min(values, default=inf)
        if least <= best:
            best = least
            change = changed
        changed = change.varied(random, _SHARE * max(instance.least, 1))


@frozen
class _Change:
    """A change of each chain: how much more urgent its nodes are, and by how many nodes its memory
    limit is lower.
    """

    urgency: list[float]
    fewer: list[int]

    def of(self, instance: Instance) -> tuple[list[float], list[int]]:
        """The urgencies of all nodes, and their memory limits."""
        urgency = [float(tail) for tail in instance.tails]
        room = list(instance.room_for)
        for nodes, shift, fewer in zip(
            instance.chains, self.urgency, self.fewer, strict=True
        ):
            for node in nodes:
                urgency[node] += shift
                room[node] -= fewer * max(instance.rise[node], 0)
        return urgency, room

    def varied(self, random: Random, most: float) -> "_Change":
        """A copy of this change, varied at random for some chains."""
        share = random.uniform(0.0, most)
        often = random.choice((0.1, 0.5))
        urgency = [
            shift + random.uniform(-share, share) * (random.random() < often)
            for shift in self.urgency
        ]
        fewer = [
            max(count + random.choice((-1, 0, 1)), 0)
            if random.random() < often / 2
            else count
            for count in self.fewer
        ]
        return _Change(urgency, fewer)


def _to_and_fro(
    instance: Instance,
    backwards: Instance,
    urgency: Sequence[float],
    room: Sequence[int],
) -> Iterator[tuple[Orders, float]]:
    """Greedy orders, forwards and backwards in time by turns, until that gains no more."""
    graph = instance.problem.graph
    before = inf
    while (orders := greedy(instance, urgency, room)) is not None:
        value = instance.problem.value(orders)
        yield orders, value
        # The later a node ends, the earlier it begins in reversed time.
        turned = greedy(backwards, graph.ends(orders))
        if value >= before or turned is None:
            return
        before = value
        orders = [order[::-1] for order in turned]
        value = instance.problem.value(orders)
        yield orders, value
        starts = zip(graph.ends(orders), graph.time, strict=True)
        urgency = [time - end for end, time in starts]
