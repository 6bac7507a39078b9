"""A model's blocks divided among the pieces of a layout, as evenly as can be: a small, exact
dynamic program.

The slowest stage sets the pace of a pipeline: PipeDream's optimizer minimises the same (Narayanan
et al. 2019, SOSP, section 3.1). A V, and two pipelines in opposite directions, have a piece and its
mirror image on the same ranks, where one may make up for the other. So pieces are filled from both
ends of the model inwards; what is left between is then all that the next pieces need to know.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import inf, isfinite

from attrs import frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.layout import Layout

#: Sums of costs that differ by less, relative to their size, are equal.
_ROUNDING = 1e-9
#: The factor from one bound that is tried to the next.
_STEP = 1.1

#: The first block of each piece, and the end of the last one.
Cuts = tuple[int, ...]


@frozen
class Partition:
    """Piece i of the model has the blocks `cuts[i]` up to `cuts[i + 1]`; `costs` are the blocks',
    in any unit, and `weights` how many weights they have, where that is known.
    """

    layout: Layout
    costs: tuple[float, ...]
    cuts: Cuts
    weights: tuple[int, ...] = ()

    def piece_of(self, stage: int) -> int:
        """The piece of the model that a stage is; of two pipelines both have all."""
        return stage - self.layout.pipeline_of[stage].start

    def blocks_of(self, stage: int) -> range:
        """The blocks of a stage."""
        piece = self.piece_of(stage)
        return range(self.cuts[piece], self.cuts[piece + 1])

    @property
    def pieces(self) -> list[float]:
        """The cost of each piece."""
        return _pieces(_sums(self.costs), self.cuts)

    @property
    def ranks(self) -> list[float]:
        """The work of each rank per microbatch, on average over the pipelines of its stages."""
        found = [0.0] * (max(self.layout.placement) + 1)
        pieces = self.pieces
        for stage, rank in enumerate(self.layout.placement):
            share = self.layout.pipeline_of[stage].microbatches / self.layout.microbatches
            found[rank] += share * pieces[self.piece_of(stage)]
        return found

    @property
    def imbalance(self) -> float:
        """By how much the slowest stage costs more than an even share: 0.04 is 4 %."""
        return _excess(self.pieces)

    def report(self, names: Sequence[str]) -> str:
        """Which piece is where, how even the stages and the ranks are, and what limits them;
        `names` are the blocks'.
        """
        total = sum(self.costs)
        weights = _pieces(_sums(self.weights), self.cuts) if self.weights else []
        lines = []
        for piece, cost in enumerate(self.pieces):
            stages = [pipeline.start + piece for pipeline in self.layout.pipelines]
            where = [f"stage {stage} on rank {self.layout.placement[stage]}" for stage in stages]
            line = (
                f"{', '.join(where)}: {self._blocks(piece, names)}, {cost / total:.1%} of the work"
            )
            lines.append(f"{line}, {weights[piece]:,.0f} weights" if weights else line)
        if any(weights):
            most = _largest(weights)
            excess = _excess(weights)
            lines.append(f"stage {most} has {excess:.1%} more weights than an even share")
        rank = _largest(self.ranks)
        lines += [
            f"stage {_largest(self.pieces)} limits: it has {self.imbalance:.1%} more than an even "
            f"share, and {self._least()}",
            f"rank {rank} works {_excess(self.ranks):.1%} more than an even share",
        ]
        return "\n".join(lines)

    def _blocks(self, piece: int, names: Sequence[str]) -> str:
        """The blocks of a piece, in words."""
        own = names[self.cuts[piece] : self.cuts[piece + 1]]
        if not own:
            return "no block"
        return own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"

    def _least(self) -> str:
        """What the most even split has, in words."""
        if len(self.costs) < self.layout.pieces:
            return "there are not enough blocks for all stages"
        least = partition(self.costs, self.layout).imbalance
        if self.imbalance <= least * (1 + _ROUNDING) + _ROUNDING:
            return "no split has less"
        return f"the most even split {least:.1%}"


def partition(costs: Sequence[float], layout: Layout) -> Partition:
    """A partition whose slowest stage is as fast as can be; of these, in a V and in two pipelines,
    the slowest rank.

    Every piece has a block or more; ValueError where there are too few, or a cost is no number from
    0.
    """
    pieces = layout.pieces
    if len(costs) < pieces:
        raise ValueError(
            f"{counted(len(costs), 'block')} for {pieces} stages, of which each has one or more"
        )
    check_costs(costs)
    sums = _sums(costs)
    shares = _shares(layout)

    def work(pair: int, low: float, high: float) -> float:
        if max(low, high) > slowest * (1 + _ROUNDING):
            return inf
        return max(first * low + last * high for first, last in shares[pair])

    sides = [1 if 2 * pair + 1 == pieces else 2 for pair in range(len(shares))]
    cuts, slowest = _fastest(sums, pieces, lambda _, low, high: max(low, high), sides)
    if _is_mirrored(layout):
        cuts, _ = _fastest(sums, pieces, work, [len(share) for share in shares])
    return Partition(layout, tuple(costs), cuts)


def check_costs(costs: Sequence[float]) -> None:
    """ValueError unless these can be the costs of blocks."""
    if any(not isfinite(cost) or cost < 0 for cost in costs) or not any(costs):
        raise ValueError("the costs of the blocks must be numbers from 0, not all 0")


def _is_mirrored(layout: Layout) -> bool:
    """Whether each rank has stages of one piece and its mirror image at most, counted from the ends
    of the model.
    """
    mirror: dict[int, set[int]] = {}
    for stage, rank in enumerate(layout.placement):
        piece = stage - layout.pipeline_of[stage].start
        mirror.setdefault(rank, set()).add(min(piece, layout.pieces - 1 - piece))
    return all(len(own) == 1 for own in mirror.values())


def _largest(shares: Sequence[float]) -> int:
    """Which one is largest; the first of several."""
    return max(range(len(shares)), key=shares.__getitem__)


def _excess(shares: Sequence[float]) -> float:
    return max(shares) * len(shares) / sum(shares) - 1


def _sums(costs: Iterable[float]) -> list[float]:
    return list(accumulate(costs, initial=0.0))


#: For a piece and its mirror image, for each of their ranks the shares of either that are its work.
_Shares = list[tuple[float, float]]


def _shares(layout: Layout) -> list[_Shares]:
    """By pair of pieces, the outermost first; in the middle of the model, a piece may be alone."""
    found = []
    for low in range((layout.pieces + 1) // 2):
        ranks: dict[int, list[float]] = {}
        for pipeline in layout.pipelines:
            share = pipeline.microbatches / layout.microbatches
            for side, piece in enumerate(sorted({low, layout.pieces - 1 - low})):
                ranks.setdefault(layout.placement[pipeline.start + piece], [0.0, 0.0])[side] += (
                    share
                )
        found.append([(first, last) for first, last in ranks.values()])
    return found


def _fastest(
    sums: list[float], pieces: int, cost: Callable[[int, float, float], float], parts: Sequence[int]
) -> tuple[Cuts, float]:
    """The cuts whose worst cost is least, and that cost. `sums[i]` is what the blocks before block
    i cost.

    `cost(pair, low, high)` is that of a piece and its mirror image which cost so much, the
    outermost being pair 0, and `parts[pair]` how many costs these are: added up, those of all pairs
    are no less than the blocks.
    """
    further_in = [*accumulate(reversed(parts), initial=0)][::-1]
    # No cuts are better than even; what a bound near the best rules out need not be looked at.
    bound = sums[-1] / further_in[0]
    while True:
        capacity = [bound * (1 + _ROUNDING) * count for count in further_in]
        worst, cuts = _search(sums, pieces, cost, capacity, bound * (1 + _ROUNDING))
        if worst < inf:
            return (*cuts, len(sums) - 1), worst
        bound *= _STEP


def _search(
    sums: list[float],
    pieces: int,
    cost: Callable[[int, float, float], float],
    capacity: list[float],
    bound: float,
) -> tuple[float, Cuts]:
    """The least worst cost up to a bound, infinite if there is none, and where its pieces begin."""

    @cache
    def fill(pair: int, begin: int, end: int) -> tuple[float, Cuts]:
        """The same for the blocks from `begin` up to `end`, which go to a pair of pieces and all
        between them.
        """
        between = pieces - 2 * pair - 2
        if between == -2:
            return (0.0 if begin == end else inf), ()
        if between == -1:
            alone = cost(pair, sums[end] - sums[begin], 0.0)
            return (alone if alone <= bound else inf), (begin,)
        best: tuple[float, Cuts] = inf, ()
        for first in range(begin + 1, end - between):
            low = sums[first] - sums[begin]
            if cost(pair, low, 0.0) > bound:
                break
            for last in range(end - 1, first + between - 1, -1):
                own = cost(pair, low, sums[end] - sums[last])
                if own > bound or own >= best[0]:
                    break
                if sums[last] - sums[first] <= capacity[pair + 1]:
                    others, cuts = fill(pair + 1, first, last)
                    if max(own, others) < best[0]:
                        best = max(own, others), (begin, *cuts, last)
        return best

    return fill(0, 0, len(sums) - 1)


def _pieces(sums: list[float], cuts: Cuts) -> list[float]:
    return [sums[end] - sums[begin] for begin, end in pairwise(cuts)]
