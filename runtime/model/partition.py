"""A model's blocks divided among the pieces of a layout, as evenly as can be.

The slowest stage sets the pace of a pipeline. A V, and two pipelines in opposite directions, have a
piece and its mirror image on the same ranks, where one may make up for the other. What is minimised
is minimised exactly, by `schedlang.schedule.cuts`.
"""

from collections.abc import Sequence

from attrs import frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.cuts import (
    ROUNDING,
    Cuts,
    Limit,
    NoCuts,
    best_cuts,
    check_costs,
    costs_of_pieces,
    loads_of_ranks,
)
from schedlang.schedule.layout import Layout


@frozen
class Partition:
    """Piece i of the model has the blocks `cuts[i]` up to `cuts[i + 1]`; `costs` are the blocks',
    in any unit, and `weights` how many weights they have, where that is known; `trained` are those
    that no frozen stage may have. `first` is the number in the plan of the layout's first stage.
    """

    layout: Layout
    costs: tuple[float, ...]
    cuts: Cuts
    weights: tuple[int, ...] = ()
    trained: frozenset[int] = frozenset()
    first: int = 0

    def piece_of(self, stage: int) -> int:
        """The piece of the model that a stage is; of two pipelines both have all."""
        return self.layout.piece(stage)

    def blocks_of(self, stage: int) -> range:
        """The blocks of a stage."""
        piece = self.piece_of(stage)
        return range(self.cuts[piece], self.cuts[piece + 1])

    @property
    def pieces(self) -> list[float]:
        """The cost of each piece."""
        return costs_of_pieces(self.costs, self.cuts)

    @property
    def ranks(self) -> list[float]:
        """The work of each rank per microbatch, on average over the pipelines of its stages."""
        found = [0.0] * (max(self.layout.placement) + 1)
        pieces = self.pieces
        for stage, rank in enumerate(self.layout.placement):
            share = (
                self.layout.pipeline_of[stage].microbatches / self.layout.microbatches
            )
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
        weights = costs_of_pieces(self.weights, self.cuts) if self.weights else []
        lines = []
        for piece, cost in enumerate(self.pieces):
            stages = self.layout.replicas(piece)
            where = [
                f"stage {self.first + stage} on rank {self.layout.placement[stage]}"
                for stage in stages
            ]
            share = f"{cost / total:.1%} of the work"
            line = f"{', '.join(where)}: {self._blocks(piece, names)}, {share}"
            lines.append(f"{line}, {weights[piece]:,.0f} weights" if weights else line)
        if any(weights):
            most = _largest(weights)
            excess = _excess(weights)
            lines.append(
                f"stage {self.first + most} has {excess:.1%} more weights than an even share"
            )
        rank = _largest(self.ranks)
        lines += [
            f"stage {self.first + _largest(self.pieces)} limits: it has {self.imbalance:.1%} more "
            f"than an even share, and {self._least()}",
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
        least = partition(self.costs, self.layout, self.trained).imbalance
        if self.imbalance <= least * (1 + ROUNDING) + ROUNDING:
            return "no split has less"
        return f"the most even split {least:.1%}"


def partition(
    costs: Sequence[float], layout: Layout, trained: frozenset[int] = frozenset()
) -> Partition:
    """A partition whose slowest stage is as fast as can be; of these, in a V and in two pipelines,
    the slowest rank.

    Every piece has a block or more, and a frozen one none of those that are `trained`; ValueError
    where there are too few, or a cost is no number from 0.
    """
    pieces = layout.pieces
    if len(costs) < pieces:
        raise ValueError(
            f"{counted(len(costs), 'block')} for {pieces} stages, of which each has one or more"
        )
    check_costs(costs)
    stages = [{piece: 1.0} for piece in range(pieces)]
    of_training = [float(block in trained) for block in range(len(costs))]
    limits = [Limit({piece: of_training}, 0) for piece in layout.frozen]
    try:
        # Two questions, the second one among the best answers to the first:
        #
        #     1. how fast can the slowest stage be?
        #     2. of the cuts with such a slowest stage, which has the fastest slowest rank?
        cuts, slowest = best_cuts(costs, pieces, stages, limits)
        if _is_mirrored(layout):
            within = [(stages, slowest)]
            cuts, _ = best_cuts(costs, pieces, loads_of_ranks(layout), limits, within)
    except NoCuts:
        numbers = ", ".join(map(str, layout.frozen))
        raise ValueError(
            f"the plan has the frozen stages {numbers}, and the model no blocks there whose "
            "weights want no gradient: freeze some, `requires_grad_(False)`"
        ) from None
    return Partition(layout, tuple(costs), cuts, trained=trained)


def _is_mirrored(layout: Layout) -> bool:
    """Whether each rank has stages of one piece and its mirror image at most, counted from the ends
    of the model.
    """
    mirror: dict[int, set[int]] = {}
    for stage, rank in enumerate(layout.placement):
        piece = layout.piece(stage)
        mirror.setdefault(rank, set()).add(min(piece, layout.pieces - 1 - piece))
    return all(len(own) == 1 for own in mirror.values())


def _largest(shares: Sequence[float]) -> int:
    """Which one is largest; the first of several."""
    return max(range(len(shares)), key=shares.__getitem__)


def _excess(shares: Sequence[float]) -> float:
    return max(shares) * len(shares) / sum(shares) - 1
