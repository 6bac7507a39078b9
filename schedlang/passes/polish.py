"""Swaps of neighbouring ops on the critical path, while they gain."""

from collections.abc import Iterator

from schedlang.passes.op_graph import ROUNDING, Graph, Orders

#: How many node visits the search may take for a whole schedule, all its trials together.
_MOST_VISITS = 2_000_000


def polish(graph: Graph, given: Orders, limit: float, share: float) -> Orders:
    """The orders after every swap that lets it, or else the average op, end earlier; no rank holds
    more than `limit`.

    Only swaps on the critical path can change the end (van Laarhoven et al. 1992, Job Shop
    Scheduling by Simulated Annealing). A swap is kept if it gains, and the search goes on from
    there. As many swaps are tried as in the whole schedule, of which the graph is a `share`.
    """
    orders = [list(order) for order in given]
    ends = graph.ends(given)
    if not ends:
        return given
    trials = int(share * _MOST_VISITS) // (len(graph) + 1)
    pairs = _critical_pairs(graph, orders, ends)
    while trials and (pair := next(pairs, None)):
        trials -= 1
        order, index = pair
        order[index : index + 2] = order[index + 1], order[index]
        changed = graph.ends(orders) if graph.peak(order) <= limit + ROUNDING else []
        if changed and _value(graph, orders, changed) < _value(graph, orders, ends):
            ends = changed
            # The path may be another one now, so its pairs are looked for anew.
            pairs = _critical_pairs(graph, orders, changed)
        else:
            order[index : index + 2] = order[index + 1], order[index]
    return orders


def _value(graph: Graph, orders: Orders, ends: list[float]) -> tuple[float, float]:
    """The objective; and how late ops end on the whole, so that a swap counts that only makes room
    for others.
    """
    return round(graph.objective(orders, ends), 6), round(sum(ends), 6)


def _critical_pairs(
    graph: Graph, orders: Orders, ends: list[float]
) -> Iterator[tuple[list[int], int]]:
    """Neighbours on the path that decides the end, latest first, as an order and an index in it.

    Each op on this path starts when the one before it on its rank ends, or else when an input
    arrives.
    """
    before = {
        node: (order, index - 1) for order in orders for index, node in enumerate(order)
    }
    busy = [order for order in orders if order]
    latest = max(busy, key=lambda order: graph.objective([order], ends))
    node: int | None = latest[-1]
    while node is not None:
        order, index = before[node]
        start = ends[node] - graph.time[node]
        if index >= 0 and ends[order[index]] >= start - ROUNDING:
            node = order[index]
            # One cannot go before what it needs.
            if all(need != node for need, _ in graph.needs[order[index + 1]]):
                yield order, index
        else:
            needs = graph.needs[node]
            last = (need for need, lag in needs if ends[need] + lag >= start - ROUNDING)
            node = next(last, None)
