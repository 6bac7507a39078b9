"""Ops made of components, each on a resource of its rank, and how long two of them take together.

DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) takes a chunk of experts apart into attention,
all-to-all dispatch, MLP and all-to-all combine. Alone, an op runs its components one after the
other, and while one of them uses the network, nothing computes. Of two ops that overlap, each goes
through its components in order, and a resource runs one component at a time:

    compute      attn F    MLP B     MLP F     attn B
    all_to_all   combine B   disp F    disp B    comb F

How they are best put together is the job-shop problem with two jobs, which has an exact answer: the
shortest way through the plane whose axes are the times of the two ops, around the rectangles in
which both would use one resource (Akers 1956, "A graphical approach to production scheduling
problems", Operations Research 4).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from attrs import frozen

from schedlang.diagnostics.wrong_arguments import shown
from schedlang.schedule.kinds import OPS, Kind

#: The resource of an op that has no components.
COMPUTE = "compute"

#: The kinds of op that may have components: those that run the module of their stage.
_KINDS = [Kind(kind).name for kind, op in OPS.items() if op.reads]
_FORM = (
    'such as "attention 2 compute": a name, its share of the op\'s time, and a resource'
)


@frozen
class Component:
    """A part of an op: its name, its share of the op's time, in proportion to those of the others,
    and the resource of its rank that it occupies.
    """

    name: str
    share: float
    resource: str

    def __str__(self) -> str:
        return f"{self.name} {self.share:.10g} {self.resource}"


@frozen
class Piece:
    """A component in time, after the start of its op or of the ops that overlap."""

    component: Component
    start: float
    end: float


#: Where a shortest way turns, in the times of both ops.
_Corners = tuple[tuple[float, float], ...]
#: Shares of the whole time below this are rounding.
_ALMOST = 1e-12

#: For each kind of op, its components in order.
Components = tuple[tuple[str, tuple[Component, ...]], ...]


def components_of(given: Any) -> Any:
    """Components from `{"F": ["attention 2 compute", …], …}`, as files and scripts give them; None
    as it is. TypeError for what has another form, ValueError for what cannot be one.
    """
    if given is None or (isinstance(given, tuple) and all(map(_is_made, given))):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`components` is {shown(given)}: it must be lists by the kinds of ops, such as "
            '{"F": ["attention 2 compute", "dispatch 1 all_to_all"]}'
        )
    made = []
    for kind, components in given.items():
        if kind not in _KINDS:
            raise ValueError(
                f"`components` of {shown(kind)}: the kinds of ops that have some are "
                f"{', '.join(_KINDS)}"
            )
        if isinstance(components, str) or not isinstance(components, Iterable):
            raise TypeError(
                f"`components` of {kind} is {shown(components)}: it must be a list"
            )
        made.append((kind, tuple(_component(kind, each) for each in components)))
        if not made[-1][1]:
            raise ValueError(
                f"`components` of {kind} is an empty list: leave {kind} out"
            )
    return tuple(made)


def _is_made(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], tuple)


def _component(kind: str, given: Any) -> Component:
    if isinstance(given, Component):
        return given
    words = given.split() if isinstance(given, str) else []
    try:
        name, share, resource = words
        value = float(share)
    except ValueError:
        raise ValueError(
            f"`components` of {kind} has {shown(given)}: it must be {_FORM}"
        ) from None
    if not 0 < value < inf:
        raise ValueError(
            f"`components` of {kind}: the share of {name} is {share}, not above 0"
        )
    return Component(name, value, resource)


def alone(components: Sequence[Component], time: float) -> list[Piece]:
    """The components of an op that takes so long, one after the other."""
    whole = sum(component.share for component in components)
    pieces = []
    start = 0.0
    done = 0.0
    for component in components:
        done += component.share
        end = time * done / whole
        pieces.append(Piece(component, start, end))
        start = end
    return pieces


def pieces_of(
    ops: Iterable[tuple[str, tuple[Component, ...] | None, float]],
) -> list[list[Piece]]:
    """When the components of ops that are issued as one run, counted from their start: of two, as
    they fit together best; of more, one op after the other. Each op has a name, its components or
    None, and the time that it takes alone.
    """
    chains = [
        alone(components or (Component(name, 1.0, COMPUTE),), time)
        for name, components, time in ops
    ]
    if len(chains) == 2:
        return list(together(*chains))
    starts = accumulate((chain[-1].end for chain in chains), initial=0.0)
    return [
        [
            Piece(piece.component, start + piece.start, start + piece.end)
            for piece in chain
        ]
        for start, chain in zip(starts, chains, strict=False)
    ]


def together(
    first: Sequence[Piece], second: Sequence[Piece]
) -> tuple[list[Piece], list[Piece]]:
    """The components of two ops, each given as it runs alone, as they run together: the last of
    them ends as early as it can.
    """
    ends = (first[-1].end, second[-1].end)
    almost = _ALMOST * sum(ends)
    #: Pairs of components that cannot run at once.
    obstacles = [
        (a, b)
        for a in first
        for b in second
        if a.component.resource == b.component.resource
    ]

    # The plane of the two ops, with one rectangle in which both would use the same resource. A way
    # goes along the diagonal while both run, and along an axis while one waits:
    #
    #    time of   │             /───▶ end       the way goes around a rectangle by its upper
    #    the       │   ┌─────┐  /                left corner, where the second op goes first,
    #    second    │   │     │ /                 or its lower right one, where the first does
    #    op        │   └─────┘/
    #              │ /────────
    #              └────────────────────── time of the first op
    @cache
    def shortest(x: float, y: float) -> tuple[float, _Corners]:
        """The least time from a point to the ends of both, and the corners on the way."""
        # Both go on until one waits for the other: the way goes around the first obstacle.
        hit: tuple[float, Piece, Piece] | None = None
        for a, b in obstacles:
            begin = max(a.start - x, b.start - y)
            is_hit = begin + almost < min(a.end - x, b.end - y)
            if is_hit and begin > -almost and (hit is None or begin < hit[0]):
                hit = begin, a, b
        if hit is None:
            return max(ends[0] - x, ends[1] - y), ()
        _, a, b = hit
        ways = []
        for corner_x, corner_y in ((a.end, b.start), (a.start, b.end)):
            if corner_x > x - almost and corner_y > y - almost:
                corner = max(corner_x, x), max(corner_y, y)
                rest, corners = shortest(*corner)
                time = max(corner[0] - x, corner[1] - y) + rest
                ways.append((time, (corner, *corners)))
        return min(ways, key=lambda way: way[0])

    _, corners = shortest(0.0, 0.0)
    # The way as points: where both are, and when.
    x = y = time = 0.0
    points = [(x, y, time)]
    for corner in (*corners, ends):
        both = min(corner[0] - x, corner[1] - y)
        points.append((x + both, y + both, time + both))
        time += max(corner[0] - x, corner[1] - y)
        x, y = corner
        points.append((x, y, time))
    ways = [[(point[axis], point[2]) for point in points] for axis in (0, 1)]
    return _placed(first, ways[0], almost), _placed(second, ways[1], almost)


def _placed(
    pieces: Sequence[Piece], way: Sequence[tuple[float, float]], almost: float
) -> list[Piece]:
    """The pieces of an op that is so far at such times: it stands still only between two pieces."""
    placed = []
    for piece in pieces:
        # It begins when the op leaves its start, which may be after a wait.
        start = next(
            time + max(piece.start - place, 0.0)
            for (place, time), (following, _) in pairwise(way)
            if following > piece.start + almost or following == way[-1][0]
        )
        placed.append(Piece(piece.component, start, start + piece.end - piece.start))
    return placed
