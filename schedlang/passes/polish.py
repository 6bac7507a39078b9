"""A local search that swaps neighbouring ops on the critical path as long as it gains."""

from collections.abc import Iterator

from schedlang.passes.op_graph import ROUNDING, Graph, Orders

#: The budget of the search for a whole schedule: trials times nodes.
_MOST_VISITS = 2_000_000


def polish(graph: Graph, given: Orders, limit: float, share: float) -> Orders:
    """The orders after every swap that lowers the objective, or else the average end of an op; no
    rank holds more than `limit`.

    Only swaps on the critical path can lower the objective (van Laarhoven et al. 1992, Job Shop
    Scheduling by Simulated Annealing). A swap that gains is kept, and the search goes on from
    there. `share` is the part of the whole schedule that the graph contains: it may spend that
    share of the budget.
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
            # The critical path may have changed, so its pairs are computed again.
            pairs = _critical_pairs(graph, orders, changed)
        else:
            order[index : index + 2] = order[index + 1], order[index]
    return orders


def _value(graph: Graph, orders: Orders, ends: list[float]) -> tuple[float, float]:
    """The objective, then the sum of all ends: a swap that makes room for others gains, too."""
    return round(graph.objective(orders, ends), 6), round(sum(ends), 6)


def _critical_pairs(
    graph: Graph, orders: Orders, ends: list[float]
) -> Iterator[tuple[list[int], int]]:
    """Neighbours on the critical path, the latest first: a rank's order, and the first one's index.

    Each op on the critical path starts when the op before it on its rank ends, or otherwise when
    its last input arrives.
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
            # Two neighbours cannot be swapped if the second needs the first.
            if all(need != node for need, _ in graph.needs[order[index + 1]]):
                yield order, index
        else:
            needs = graph.needs[node]
            last = (need for need, lag in needs if ends[need] + lag >= start - ROUNDING)
            node = next(last, None)
