"""The orders of ranks for any n, as pieces that repeat. Microbatches depend on n and on the
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from math import lcm
from typing import Any

import numpy as np
from attrs import evolve, frozen

from schedlang.extras.prove.pieces.linear import (
    ONCE,
    ZERO,
    Affine,
    NotLinear,
    holds_from,
)
from schedlang.language.faults import Fault
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.arrays import Ints
from schedlang.schedule.kinds import OF_STAGE, OPS


@frozen
class Op:
    """An op in each round of a piece: kind, stage, microbatch, and its location in the program. An
    op of a whole stage has microbatch 0.
    """

    kind: int
    stage: int
    microbatch: Any
    location: int


#: Ops that are issued together.
Batch = tuple[Op, ...]


@frozen
class Piece:
    """Batches that a rank repeats for `rounds` rounds."""

    rounds: Affine
    batches: tuple[Batch, ...]

    @property
    def grows(self) -> bool:
        """Whether the number of rounds grows with n."""
        return bool(self.rounds.by_n)

    @property
    def ops(self) -> Iterator[Op]:
        """The ops of one round, in order."""
        return chain.from_iterable(self.batches)

    def changed(self, change: Callable[[Op], Op | None]) -> Piece:
        """The piece with a function applied to each op; None leaves the op out."""
        batches = (tuple(filter(None, map(change, batch))) for batch in self.batches)
        return evolve(self, batches=tuple(filter(None, batches)))

    def table(self, n: int) -> Ints:
        """All ops at some n, round after round, as columns: kind, stage, microbatch, and whether
        the op is the first of its batch.
        """
        kind, stage, constant, by_n, by_round, is_first = self._ops
        rounds = self.rounds.at(n)
        numbers = np.arange(rounds)[:, np.newaxis]
        microbatches = (constant + by_n * n + by_round * numbers).ravel()
        kinds, stages, firsts = (
            np.tile(column, rounds) for column in (kind, stage, is_first)
        )
        return np.stack([kinds, stages, microbatches, firsts])

    @cached_property
    def _ops(self) -> Ints:
        rows = [
            (op.kind, op.stage, *op.microbatch, place == 0)
            for batch in self.batches
            for place, op in enumerate(batch)
        ]
        return np.array(rows, np.int64).reshape(-1, 6).T


@frozen
class Orders:
    """The orders of all ranks, for microbatches = base + period * n. `units` says how many
    microbatches (or slices) each stage runs.
    """

    ranks: tuple[tuple[Piece, ...], ...]
    units: tuple[Affine, ...]
    placement: tuple[int, ...]
    #: For each stage, the number of microbatches by which a round of a growing piece goes on.
    strides: tuple[int, ...]

    @property
    def pieces(self) -> Iterator[Piece]:
        """The pieces of all ranks."""
        return chain.from_iterable(self.ranks)

    @property
    def ops(self) -> Iterator[Op]:
        """The ops of all pieces, each once."""
        return chain.from_iterable(piece.ops for piece in self.pieces)

    def changed(self, change: Callable[[Op], Op | None]) -> Orders:
        """The orders with a function applied to each op; None leaves the op out."""
        ranks = (
            tuple(
                piece
                for piece in (of.changed(change) for of in pieces)
                if piece.batches
            )
            for pieces in self.ranks
        )
        return evolve(self, ranks=tuple(ranks))

    def makers(self) -> dict[tuple[int, int], list[tuple[Piece, Op]]]:
        """For each thing and stage, the ops that make it, each with its piece."""
        made: dict[tuple[int, int], list[tuple[Piece, Op]]] = {}
        for piece in self.pieces:
            for op in piece.ops:
                for thing in OPS[op.kind].makes:
                    made.setdefault((thing, op.stage), []).append((piece, op))
        return made

    def table(self, rank: int, n: int) -> Ints:
        """The ops of a rank at some n, with the columns of `Piece.table`."""
        pieces = [piece.table(n) for piece in self.ranks[rank]]
        return np.concatenate(pieces, axis=1) if pieces else np.empty((4, 0), np.int64)


def later(orders: Orders, by: int) -> Orders:
    """The orders with n counted from `by` on."""

    def moved(number: Affine) -> Affine:
        return number + Affine(number.by_n * by)

    def of(piece: Piece) -> Piece:
        of_ops = piece.changed(lambda op: evolve(op, microbatch=moved(op.microbatch)))
        return evolve(of_ops, rounds=moved(piece.rounds))

    ranks = tuple(tuple(map(of, pieces)) for pieces in orders.ranks)
    return evolve(orders, ranks=ranks, units=tuple(map(moved, orders.units)))


def is_computed(kind: int) -> bool:
    """Whether ops of this kind have a microbatch and are no transfers."""
    return kind not in OF_STAGE and not is_transfer(kind)


# Splitting pieces, and taking rounds together


def shifted(piece: Piece, rounds: Affine, by: Affine) -> Piece:
    """`rounds` rounds of a piece, from round `by` on."""

    def later(op: Op) -> Op:
        # A `W` may not have its microbatch yet.
        if op.microbatch is None:
            return op
        later_round = by + Affine(0, 0, 1)
        return evolve(op, microbatch=op.microbatch.in_round(later_round))

    return evolve(piece.changed(later), rounds=rounds)


def split(piece: Piece, at: Affine) -> list[Piece]:
    """The piece as two, split before round `at`."""
    parts = shifted(piece, at, ZERO), shifted(piece, piece.rounds - at, at)
    return [part if part.grows else one_by_one(part) for part in parts]


def one_by_one(piece: Piece) -> Piece:
    """A piece with a fixed number of rounds as a piece of one round."""
    count = piece.rounds.constant
    rounds = (shifted(piece, ONCE, Affine(number)) for number in range(count))
    batches = chain.from_iterable(_paced(each, 0).batches for each in rounds)
    return Piece(ONCE, tuple(batches))


def _paced(piece: Piece, factor: int) -> Piece:
    """The piece with `factor` times as many microbatches from round to round."""

    def changed(op: Op) -> Op:
        if op.microbatch is None:
            return op
        return evolve(op, microbatch=op.microbatch.in_round(Affine(0, 0, factor)))

    return piece.changed(changed)


def unrolled(piece: Piece, factor: int) -> list[Piece]:
    """The piece with `factor` rounds taken as one, and a piece of the rounds that are left over."""
    if factor == 1 or not piece.grows:
        return [piece]
    rounds = piece.rounds.over(factor)
    left = piece.rounds.constant % factor
    if rounds.constant < 1:
        holds_from(-((rounds.constant - 1) // rounds.by_n))
    parts = (shifted(piece, rounds, Affine(number)) for number in range(factor))
    batches = chain.from_iterable(_paced(part, factor).batches for part in parts)
    whole = Piece(rounds, tuple(batches))
    rest = shifted(piece, Affine(left), rounds * factor)
    return [whole, one_by_one(rest)] if left else [whole]


def aligned(
    ranks: Sequence[Sequence[Piece]],
    units: tuple[Affine, ...],
    placement: tuple[int, ...],
    unroll: int,
) -> Orders:
    """The orders of all ranks. All pieces that grow go on by the same number of microbatches in a
    round, as `unroll` rounds are taken as one, or more.
    """
    stride = _strides(ranks)
    orders = tuple(
        tuple(part for piece in pieces for part in _alike(piece, stride, unroll))
        for pieces in ranks
    )
    return Orders(orders, units, placement, (stride * unroll,) * len(units))


def _strides(ranks: Sequence[Sequence[Piece]]) -> int:
    """The least number of microbatches that is a whole number of rounds in every growing piece."""
    strides = {
        abs(op.microbatch.by_round)
        for pieces in ranks
        for piece in pieces
        if piece.grows
        for op in piece.ops
        if is_computed(op.kind)
    }
    if 0 in strides:
        raise Fault(
            "repeated-op", "an op runs in every round of a loop, for one microbatch", 0
        )
    return lcm(*strides) if strides else 1


def _alike(piece: Piece, stride: int, unroll: int) -> list[Piece]:
    """A piece, unrolled so that a round goes on by `stride * unroll` microbatches."""
    if not piece.grows:
        return [piece]
    own = {abs(op.microbatch.by_round) for op in piece.ops if is_computed(op.kind)}
    if len(own) != 1:
        raise NotLinear(
            "the ops of a loop go on by different numbers of microbatches in a round"
        )
    return unrolled(piece, stride // own.pop() * unroll)


# Finding the round of a piece in which a number occurs


@frozen
class Cell:
    """In the rounds `begin` up to `end` of a piece, a number is found in the source number
    `source`, there in the round `round`, which depends on n and on the round here.
    """

    begin: Affine
    end: Affine
    source: int
    round: Affine

    @property
    def is_long(self) -> bool:
        """Whether it is more than one round."""
        return self.end - self.begin != ONCE


def sorted_cells(
    rounds: Affine, wanted: Affine, sources: Sequence[tuple[int, Affine, Affine]]
) -> list[Cell]:
    """Where the number `wanted` is found, for each of `rounds` rounds. Each source is its index,
    its rounds and its number. The cells are in the order of their rounds.
    """
    cells = [
        cell
        for number, of, there in sources
        for cell in [_cell(number, rounds, wanted, of, there)]
        if cell
    ]
    # For all n from 0 on, the number with the smaller slope is the smaller one.
    return sorted(cells, key=lambda cell: cell.begin.growth)


def tiles(cells: Sequence[Cell], rounds: Affine) -> bool:
    """Whether the cells cover all rounds, each once."""
    begins = [*(cell.begin for cell in cells), rounds]
    return begins == [ZERO, *(cell.end for cell in cells)]


def _cell(
    source: int, rounds: Affine, wanted: Affine, of: Affine, there: Affine
) -> Cell | None:
    """The rounds in which `wanted` is the number `there` of a source with `of` rounds."""
    apart = wanted.in_round(ZERO) - there.in_round(ZERO)
    if rounds == of == ONCE:
        constant, by_n, _ = apart
        # They are equal at one n only: from the next one on they differ.
        if by_n and constant % by_n == 0 and -constant // by_n >= 0:
            holds_from(-constant // by_n + 1)
        return Cell(ZERO, ONCE, source, ZERO) if apart == ZERO else None
    if of == ONCE:
        # The one round k here in which it occurs: apart + step * k = 0.
        at = _quotient(-apart, wanted.by_round)
        if at is None or at.is_negative or not (at - rounds).is_negative:
            return None
        return Cell(at, at + 1, source, ZERO)
    # The round there that has the number of round 0 here.
    first = _quotient(apart, there.by_round)
    if first is None:
        return None
    if rounds == ONCE:
        is_there = not first.is_negative and (first - of).is_negative
        return Cell(ZERO, ONCE, source, first) if is_there else None
    if abs(wanted.by_round) != abs(there.by_round):
        raise NotLinear(
            "two loops go on by different numbers of microbatches in a round"
        )
    if wanted.by_round == there.by_round:
        # Both count the same way: round k here meets round first + k there.
        begin = -first
        end = of - first
        step = 1
    else:
        # They count against each other: round k here meets round first - k there.
        begin = first - of + 1
        end = first + 1
        step = -1
    begin = begin if not begin.is_negative else ZERO
    end = end if (end - rounds).is_negative else rounds
    if not (begin - end).is_negative:
        return None
    return Cell(begin, end, source, first + Affine(0, 0, step))


def _quotient(number: Affine, divisor: Any) -> Affine | None:
    """The quotient of two numbers; None if it is not a whole number for any n."""
    quotient = number.over(divisor)
    return None if number.constant % divisor else quotient
