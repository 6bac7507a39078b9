"""A row of blocks cut into pieces, so that the largest of some loads is as small as can be: a
dynamic program, and exact.

The slowest rank sets the pace of a pipeline: PipeDream's optimizer minimises the same (Narayanan et
al. 2019, SOSP, section 3.1), for one piece on each rank. Here a load may be of several pieces, such
as those of a rank in a V. Pieces whose loads depend on each other are filled together, one group
after the other; where the pieces that are filled end is all that the next groups need to know.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import isfinite

from attrs import define, field, frozen

from schedlang.schedule.layout import Layout

#: Sums that differ by less, relative to their size, are equal.
ROUNDING = 1e-9
#: How far the first bound that is tried is above an even share; the next one is twice as far.
_FIRST = 1 / 1024

#: The first block of each piece, and the end of the last one.
Cuts = tuple[int, ...]
#: A sum over pieces: how much of a piece's cost is part of it.
Load = Mapping[int, float]


class NoCuts(ValueError):
    """No cuts keep all limits."""


@frozen
class Limit:
    """What some pieces hold together, at most: `amounts[p][b]` is what block b takes in piece p."""

    amounts: Mapping[int, Sequence[float]]
    most: float


def check_costs(costs: Sequence[float]) -> None:
    """ValueError unless these can be the costs of blocks."""
    if any(not isfinite(cost) or cost < 0 for cost in costs) or not any(costs):
        raise ValueError("the costs of the blocks must be numbers from 0, not all 0")


def sums_of(costs: Sequence[float]) -> list[float]:
    """What the blocks before each block cost, and all of them."""
    return list(accumulate(costs, initial=0.0))


def costs_of_pieces(costs: Sequence[float], cuts: Cuts) -> list[float]:
    """The cost of each piece."""
    sums = sums_of(costs)
    return [sums[end] - sums[begin] for begin, end in pairwise(cuts)]


def loads_of_ranks(layout: Layout) -> list[Load]:
    """The work of each rank: of which stages of the model it does what share."""
    loads: list[dict[int, float]] = [{} for _ in range(max(layout.placement) + 1)]
    for stage, rank in enumerate(layout.placement):
        pipeline = layout.pipeline_of[stage]
        piece = layout.piece(stage)
        share = pipeline.microbatches / layout.microbatches
        loads[rank][piece] = loads[rank].get(piece, 0.0) + share
    return [load for load in loads if load]


def best_cuts(
    costs: Sequence[float],
    pieces: int,
    loads: Sequence[Load],
    limits: Sequence[Limit] = (),
    within: Sequence[tuple[Sequence[Load], float]] = (),
) -> tuple[Cuts, float]:
    """The cuts into so many pieces whose largest load is least, and that load; NoCuts where none
    keep all limits, and other loads `within` what goes with them.

    Every piece has a block or more, and its shares in some loads that go together add up to 1. Of
    cuts with the same largest load, one whose other loads are even.
    """
    search = _Search(costs, pieces, [loads, *(others for others, _ in within)], limits)
    others = [most * (1 + ROUNDING) for _, most in within]
    # No cuts are better than even; what a bound near the best rules out need not be looked at.
    even = search.sums[-1] / len(loads)
    above = _FIRST
    while True:
        cuts = search.within([even * (1 + above), *others])
        if cuts is not None:
            return cuts
        if above > len(loads):
            raise NoCuts("no cuts keep all limits")
        above *= 2


def cuts_at_once(pieces: int, loads: Sequence[Load]) -> int:
    """How many cuts `best_cuts` tries together at most: its time grows with as high a power of the
    number of blocks. 1 for one piece on each rank, 2 for a V, 3 for a loop with two pieces.
    """
    return max(len(group.open) for group in _groups(pieces, [loads], ()))


@frozen
class _Group:
    """Pieces that are filled together: those of loads and limits which have a piece in common."""

    pieces: tuple[int, ...]
    #: Those that are minimised, then those that have other bounds.
    loads: tuple[tuple[tuple[tuple[int, float], ...], ...], ...]
    limits: tuple[tuple[dict[int, list[float]], float], ...]
    #: The cuts at the ends of its pieces that earlier groups leave open, and those that later
    #: groups need to know, of all that are known then.
    open: tuple[int, ...]
    needed: tuple[int, ...]


#: Where the cuts that matter are: the largest load so far, a measure of how uneven the loads are,
#: and all cuts that are known.
_States = dict[tuple[int, ...], tuple[float, float, tuple[int, ...]]]


@define
class _Search:
    """The dynamic program: `within` tries one bound."""

    costs: Sequence[float]
    pieces: int
    loads: Sequence[Sequence[Load]]
    limits: Sequence[Limit]
    sums: list[float] = field(init=False)
    groups: list[_Group] = field(init=False)
    #: By group, how many loads those after it have, of those that go together.
    loads_left: list[list[int]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.sums = sums_of(self.costs)
        self.groups = _groups(self.pieces, self.loads, self.limits)
        for index in range(len(self.groups)):
            after = self.groups[index + 1 :]
            self.loads_left.append(
                [
                    sum(len(group.loads[nth]) for group in after)
                    for nth in range(len(self.loads))
                ]
            )

    def within(self, bounds: Sequence[float]) -> tuple[Cuts, float] | None:
        """The best cuts with no load above its bound, if there are any."""
        rounding = ROUNDING * self.sums[-1]
        blocks = len(self.costs)
        unknown = -1
        start = (0, *[unknown] * (self.pieces - 1), blocks)
        states: _States = {(): (0.0, 0.0, start)}
        for group, left in zip(self.groups, self.loads_left, strict=True):
            following: _States = {}
            for worst, uneven, cuts in states.values():
                for filled in self._filled(group, list(cuts), 0, bounds):
                    rest = self._rest(filled) - rounding
                    if any(
                        rest > bound * count
                        for bound, count in zip(bounds, left, strict=True)
                    ):
                        continue
                    own = [self._load(load, filled) for load in group.loads[0]]
                    value = max(worst, *own), uneven + sum(load * load for load in own)
                    key = tuple(filled[cut] for cut in group.needed)
                    if key not in following or value < following[key][:2]:
                        following[key] = (*value, tuple(filled))
            states = following
        if not states:
            return None
        ((worst, _, cuts),) = states.values()
        return cuts, worst

    def _filled(
        self, group: _Group, cuts: list[int], index: int, bounds: Sequence[float]
    ) -> Iterator[list[int]]:
        """The cuts with those added that a group leaves open, from one of them on, as far as loads
        and limits allow.
        """
        if index == len(group.open):
            if self._allows(group, cuts, bounds):
                yield cuts
            return
        cut = group.open[index]
        before = max(other for other in range(cut) if cuts[other] >= 0)
        after = min(other for other in range(cut + 1, len(cuts)) if cuts[other] >= 0)
        places = range(cuts[before] + cut - before, cuts[after] - (after - cut) + 1)
        # A piece of the group that ends here grows with the cut, one that begins here shrinks.
        grows = before == cut - 1 and before in group.pieces
        shrinks = after == cut + 1 and cut in group.pieces
        is_monotonous = grows != shrinks
        for place in places if grows or not shrinks else reversed(places):
            cuts[cut] = place
            if self._allows(group, cuts, bounds):
                yield from self._filled(group, cuts, index + 1, bounds)
            elif is_monotonous:
                break
        cuts[cut] = -1

    def _allows(self, group: _Group, cuts: list[int], bounds: Sequence[float]) -> bool:
        """Whether the pieces of a group whose ends are known keep the bounds and the limits."""
        for loads, bound in zip(group.loads, bounds, strict=True):
            if any(self._load(load, cuts) > bound for load in loads):
                return False
        for amounts, most in group.limits:
            held = 0.0
            for piece, sums in amounts.items():
                begin = cuts[piece]
                end = cuts[piece + 1]
                if begin >= 0 and end >= 0:
                    held += sums[end] - sums[begin]
            if held > most * (1 + ROUNDING):
                return False
        return True

    def _load(self, load: Sequence[tuple[int, float]], cuts: list[int]) -> float:
        """A load, as far as the ends of its pieces are known."""
        total = 0.0
        for piece, share in load:
            begin = cuts[piece]
            end = cuts[piece + 1]
            if begin >= 0 and end >= 0:
                total += share * (self.sums[end] - self.sums[begin])
        return total

    def _rest(self, cuts: list[int]) -> float:
        """What the blocks cost that are in no piece yet."""
        rest = self.sums[-1]
        for begin, end in pairwise(cuts):
            if begin >= 0 and end >= 0:
                rest -= self.sums[end] - self.sums[begin]
        return rest


def _groups(
    pieces: int, loads: Sequence[Sequence[Load]], limits: Sequence[Limit]
) -> list[_Group]:
    """The groups of pieces, in the order of their first ones."""
    root_of = list(range(pieces))
    for connected in (
        *chain.from_iterable(loads),
        *(limit.amounts for limit in limits),
    ):
        roots = {root_of[piece] for piece in connected}
        root_of = [min(roots) if root in roots else root for root in root_of]
    of_root: dict[int, list[int]] = {}
    for piece, root in enumerate(root_of):
        of_root.setdefault(root, []).append(piece)
    groups: list[_Group] = []
    known = {0, pieces}
    left = set(range(pieces))
    for own in of_root.values():
        left -= set(own)
        ends = {piece + side for piece in own for side in (0, 1)}
        open = tuple(sorted(ends - known))
        known |= ends
        needed = tuple(cut for cut in sorted(known) if {cut - 1, cut} & left)
        groups.append(
            _Group(
                tuple(own),
                tuple(
                    tuple(
                        tuple(load.items()) for load in together if set(load) & set(own)
                    )
                    for together in loads
                ),
                tuple(
                    (
                        {piece: sums_of(of) for piece, of in limit.amounts.items()},
                        limit.most,
                    )
                    for limit in limits
                    if set(limit.amounts) & set(own)
                ),
                open,
                needed,
            )
        )
    return groups
