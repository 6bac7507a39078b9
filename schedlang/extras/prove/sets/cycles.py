"""Circles of ops that wait for each other: found at one small size, and then followed through all
sizes, as the relation between the first op of the circle and the one that it leads back to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import islpy as isl
from attrs import frozen

from schedlang.extras.prove.sets.isl_functions import all_points, at_sizes
from schedlang.extras.prove.sets.relations import Edge

#: An instance: its statement, and the values of its indices.
Instance = tuple[int, tuple[int, ...]]


@frozen(eq=False)
class Circle:
    """Edges of which each begins where the one before ends, the first where the last one ends; and
    the sizes at which there are such.
    """

    edges: tuple[Edge, ...]
    holds: isl.Set


def circle_at(edges: Sequence[Edge], sizes: Mapping[str, int]) -> Circle | None:
    """The shortest circle at a size, if there is one there, for all sizes that have it."""
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
    return None if best is None else Circle(tuple(best), _sizes_of(best))


#: Two ranks, each of which has an op that waits for the other: order, need, order, need.
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
    """The edges of the shortest way from an instance back to itself."""
    came: dict[Instance, tuple[Instance, Edge]] = {}
    queue = deque([(start, 0)])
    while queue:
        at, length = queue.popleft()
        if shorter_than is not None and length + 1 >= shorter_than:
            return None
        for following, edge in waiting.get(at, ()):
            # A circle has a place where something comes later: it begins there.
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
    """The sizes at which some edges make a circle."""
    # Along all edges of the circle at once; a size has it where some instance leads back to itself.
    way = edges[0].pairs
    for edge in edges[1:]:
        way = way.apply_range(edge.pairs)
    back = way & isl.Map.identity(way.get_space())
    return back.params().coalesce()
