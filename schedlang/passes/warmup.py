"""Longer warm-ups: forwards pulled in front of a rank's first backward, while it would only wait for it."""

from itertools import chain, takewhile

from schedlang.kinds import Kind
from schedlang.passes.graph import Graph, Orders


def longer_warmups(graph: Graph, given: Orders, ends: list[float], limit: float) -> list[Orders]:
    """Orders with as many more forwards in front as fit into each rank's wait in an execution, and into the limit.

    In the first orders, the last of them ends before the wait does; in the second, after it.
    """
    return [[_pulled(graph, order, ends, limit, beyond) for order in given] for beyond in (False, True)]


def _pulled(graph: Graph, order: list[int], ends: list[float], limit: float, beyond: bool) -> list[int]:
    """One rank's order with more forwards in front; each forward after them takes the place of an earlier one."""
    first = list(takewhile(lambda node: graph.is_all(node, Kind.F), order))
    rest = order[len(first) :]
    later = [node for node in rest if graph.is_all(node, Kind.F)]
    if not rest:
        return order
    wait = ends[rest[0]] - graph.time[rest[0]] - (ends[first[-1]] if first else 0.0)
    held = sum(graph.change[node] for node in first)
    pulled: list[int] = []
    for node in later:
        if wait <= 0 or (wait < graph.time[node] and not beyond) or held + graph.rise[node] > limit:
            break
        pulled.append(node)
        wait, held = wait - graph.time[node], held + graph.change[node]
    remaining = iter(later[len(pulled) :])
    body = (next(remaining, None) if graph.is_all(node, Kind.F) else node for node in rest)
    return [node for node in chain(first, pulled, body) if node is not None]
