"""Cycles of ops that wait for each other: found at one small size, then followed through all sizes.
The edges of the cycle, one after the other, are a relation from ops to ops; a size has the cycle if
some op is related to itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import islpy as isl
from attrs import frozen

from schedlang.extras.prove.sets.isl_functions import all_points, at_sizes
from schedlang.extras.prove.sets.relations import Edge

#: An instance: the number of its statement, and the values of its indices.
Instance = tuple[int, tuple[int, ...]]


@frozen(eq=False)
class Cycle:
    """Edges that form a cycle, and the sizes at which it exists."""

    edges: tuple[Edge, ...]
    holds: isl.Set


def cycle_at(edges: Sequence[Edge], sizes: Mapping[str, int]) -> Cycle | None:
    """The shortest cycle at a size, if there is one; with all sizes at which it exists."""
    waiting: dict[Instance, list[tuple[Instance, Edge]]] = defaultdict(list)
    for edge in edges:
        for one, other in instances(edge, sizes):
            waiting[one].append((other, edge))
    best: list[Edge] | None = None
    for start in list(waiting):
        path = _back_to(start, waiting, len(best) if best else None)
        if path is not None:
            best = path
            if len(best) == _SHORTEST:
                break
    return None if best is None else Cycle(tuple(best), _sizes_of(best))


#: The length of the shortest possible cycle: two ranks, each with an op before one that the other
#: waits for.
_SHORTEST = 4


def instances(edge: Edge, sizes: Mapping[str, int]) -> list[tuple[Instance, Instance]]:
    """The pairs of instances of an edge at some sizes."""
    points = all_points(at_sizes(edge.pairs, sizes).wrap().flatten())
    ones = len(edge.source.indices)
    return [
        ((edge.source.number, point[:ones]), (edge.target.number, point[ones:]))
        for point in points
    ]


def _back_to(
    start: Instance,
    waiting: Mapping[Instance, Sequence[tuple[Instance, Edge]]],
    shorter_than: int | None,
) -> list[Edge] | None:
    """The edges of the shortest path from an instance back to itself; None if it is not shorter
    than `shorter_than`.
    """
    came: dict[Instance, tuple[Instance, Edge]] = {}
    queue = deque([(start, 0)])
    while queue:
        at, length = queue.popleft()
        if shorter_than is not None and length + 1 >= shorter_than:
            return None
        for following, edge in waiting.get(at, ()):
            # Every cycle has an edge that is not "together"; it starts with one of those.
            if at == start and edge.why == "together":
                continue
            if following == start:
                path = [edge]
                while at != start:
                    at, edge = came[at]
                    path.append(edge)
                return path[::-1]
            if following not in came:
                came[following] = (at, edge)
                queue.append((following, length + 1))
    return None


def _sizes_of(edges: Sequence[Edge]) -> isl.Set:
    """The sizes at which the edges form a cycle."""
    # Compose all edges; a size has the cycle if an instance is related to itself.
    way = edges[0].pairs
    for edge in edges[1:]:
        way = way.apply_range(edge.pairs)
    back = way & isl.Map.identity(way.get_space())
    return back.params().coalesce()
