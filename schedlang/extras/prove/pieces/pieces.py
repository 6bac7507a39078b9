"""The orders of ranks for any n, as pieces that repeat. Microbatches depend on n and on the round.

`orders_of` makes them from an expansion: it fills in what calls leave open, which are stages,
`next`, and the weight gradients that a bare `W` takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import lcm
from typing import Any, TypeVar

import numpy as np
from attrs import evolve, frozen

from schedlang.extras.prove.pieces.expansion import Expansion, Part
from schedlang.extras.prove.pieces.linear import (
    ONCE,
    ZERO,
    Affine,
    NotLinear,
    holds_from,
    linear,
)
from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.columns import Ints
from schedlang.schedule.kinds import OF_STAGE, OPS, Kind, op_of

T = TypeVar("T")


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


def of_n(number: Any) -> Affine:
    """A number of the program that depends on n alone."""
    parts = linear(number).parts
    if parts.by_round:
        raise NotLinear(
            "a number that depends on the round of a loop stands where none can"
        )
    return parts


# Filling in what calls leave open


def orders_of(expansion: Expansion, unroll: int = 1) -> Orders:
    """The orders of an expansion, with `unroll` rounds of every growing piece taken as one."""
    slices = expansion.params.get("slices", 1)
    ranks = []
    for rank, parts in enumerate(expansion.ranks):
        held = tuple(
            stage for stage, of in enumerate(expansion.placement) if of == rank
        )
        calls = [
            _Calls(
                part,
                [
                    _completed(call, expansion.sites, held, slices)
                    for call in part.calls
                ],
            )
            for part in parts
        ]
        # `next` comes first, since a bare `W` takes the microbatch of an `I`.
        _count_next(calls, expansion.sites)
        pieces = [
            piece for each in calls for piece in [each.piece(expansion.sites, held)]
        ]
        pieces = _with_owed(pieces, expansion.sites)
        ranks.append(tuple(pieces))
    units = tuple(map(of_n, expansion.units))
    factor = _strides(ranks)
    unrolled = tuple(
        tuple(part for piece in pieces for part in _alike(piece, factor, unroll))
        for pieces in ranks
    )
    strides = (factor * unroll,) * len(units)
    return Orders(unrolled, units, expansion.placement, strides)


class _Calls:
    """The calls of a part, as lists of location, stage and microbatch."""

    def __init__(self, part: Part, calls: list[list[Any]]) -> None:
        self.rounds = of_n(part.rounds)
        self.calls = calls

    def piece(self, sites: Sites, held: Sequence[int]) -> Piece:
        """The piece of these calls."""
        batches: list[list[Op]] = []
        for location, stage, microbatch in self.calls:
            kind = sites.kinds[location]
            op = Op(kind, stage, ZERO if kind in OF_STAGE else microbatch, location)
            first = sites.batches.get(location)
            if first is None or location == first or not batches:
                batches.append([op])
            else:
                batches[-1].append(op)
        return Piece(self.rounds, tuple(map(tuple, batches)))


def _completed(call: Any, sites: Sites, held: Sequence[int], slices: int) -> list[Any]:
    location, stage, microbatch, *of_slice = call
    site = sites.ops[location]
    if stage is None and not site.is_bare:
        stage = held[0] if len(held) == 1 else None
    if stage is None and not (site.is_bare and site.word == "W"):
        if len(held) != 1:
            raise Fault(
                "which-stage", f"`{site.word}` does not say which stage", location
            )
        stage = held[0]
    if stage is None and len(held) == 1:
        stage = held[0]
    if stage is not None and stage not in held:
        raise Fault(
            "not-on-this-rank", f"`{site.word}` of a stage of another rank", location
        )
    if microbatch is not None:
        for number in of_slice:
            if number is None or not 0 <= number < slices:
                raise Fault(
                    "no-such-slice", f"`{site.word}` of slice {number}", location
                )
            microbatch = microbatch * slices + number
        number = linear(microbatch)
        if any(not isinstance(part, int) for part in number.parts):
            raise NotLinear(f"`{site.word}` of a microbatch that is no whole number")
        microbatch = number.parts
    return [location, stage, microbatch]


def _count_next(parts: list[_Calls], sites: Sites) -> None:
    """Fill in each `next`: the number of earlier calls of that op on that stage."""
    takes_next = sites.takes_next
    if not takes_next:
        return
    if sites.is_mixed:
        raise NotLinear("`next` counts ops that name their microbatch as well")
    groups = [(part.rounds, part.calls) for part in parts]
    places = numbered(groups, lambda call: (sites.counted_as[call[0]], call[1]))
    for part, of_part in zip(parts, places, strict=True):
        for call, place in zip(part.calls, of_part, strict=True):
            if call[0] in takes_next:
                call[2] = place


def numbered(
    groups: Sequence[tuple[Affine, Sequence[T]]], key_of: Callable[[T], Any]
) -> list[list[Affine]]:
    """Number things through consecutive groups. A group is its number of rounds and the things of
    each round; the number of a thing is how many things with the same key come before it.
    """
    # `before` has the count of earlier groups, for all n. Within a group that repeats, each round
    # adds the same number:
    #
    #     2 x F(next) │ (n + 1) x { F(next) B(next) }         second F: microbatch 2 + k
    before: dict[Any, Affine] = {}
    result = []
    for rounds, things in groups:
        in_round = Counter(map(key_of, things))
        seen: Counter[Any] = Counter()
        places = []
        for key in map(key_of, things):
            first = before.get(key, ZERO) + seen[key]
            places.append(first + Affine(0, 0, in_round[key]))
            seen[key] += 1
        for key, count in in_round.items():
            before[key] = before.get(key, ZERO) + rounds * count
        result.append(places)
    return result


# Weight gradients that are owed


def _with_owed(pieces: list[Piece], sites: Sites) -> list[Piece]:
    """Fill in each `W` without a microbatch: it takes the weight gradient that is owed longest."""
    oldest = sites.takes_oldest
    weights = [location for location, kind in sites.kinds.items() if kind == Kind.W]
    if not oldest or not any(
        op.location in oldest for piece in pieces for op in piece.ops
    ):
        return pieces
    if len(weights) > len(oldest):
        raise NotLinear("some `W` name their microbatch, and some take the oldest")
    bare = {sites.ops[location].is_bare for location in oldest}
    stages = {op.stage for piece in pieces for op in piece.ops if op_of(op.kind).owes}
    if len(bare) > 1 and len(stages) > 1:
        raise NotLinear("some `W` name their stage, and some do not")
    by_stage = not bare.pop()
    # If different rounds of a piece take by different rules, the piece is split there, and all is
    # done again.
    while True:
        completed, cut = _owed_once(pieces, oldest, by_stage)
        if cut is None:
            return completed
        index, at = cut
        pieces = [*pieces[:index], *split(pieces[index], at), *pieces[index + 1 :]]


def _owed_once(
    pieces: list[Piece], oldest: frozenset[int], by_stage: bool
) -> tuple[list[Piece], tuple[int, Affine] | None]:
    """The pieces with every `W` filled in; or no pieces, but the piece to split and the round at
    which.
    """

    # Gradients form a queue: the i-th `W` takes the i-th gradient that was made. Both are numbered
    # through all pieces, and `sorted_cells` finds where the numbers are equal.
    def key_of(op: Op) -> int | None:
        return op.stage if by_stage else None

    owing = [[op for op in piece.ops if op_of(op.kind).owes] for piece in pieces]
    taking = [[op for op in piece.ops if op.location in oldest] for piece in pieces]
    rounds = [piece.rounds for piece in pieces]
    sources: dict[Any, list[tuple[Affine, Op, Affine]]] = {}
    made = numbered(list(zip(rounds, owing, strict=True)), key_of)
    for of, ops, places in zip(rounds, owing, made, strict=True):
        for op, place in zip(ops, places, strict=True):
            sources.setdefault(key_of(op), []).append((of, op, place))
    taken = numbered(list(zip(rounds, taking, strict=True)), key_of)
    completed = []
    for index, piece in enumerate(pieces):
        filled: dict[int, Op] = {}
        for op, position in zip(taking[index], taken[index], strict=True):
            there = sources.get(key_of(op), [])
            makers = [
                (number, of, place) for number, (of, _, place) in enumerate(there)
            ]
            cells = sorted_cells(piece.rounds, position, makers)
            if not cells or not tiles(cells, piece.rounds):
                raise Fault(
                    "nothing-next",
                    "`W`, but no weight gradient is owed here",
                    op.location,
                )
            met = [
                (owing.stage, owing.microbatch.in_round(cell.round))
                for cell in cells
                for _, owing, _ in [there[cell.source]]
            ]
            # All rounds must take by one rule, or the piece is split.
            stage, microbatch = met[
                max(range(len(cells)), key=lambda at: cells[at].is_long)
            ]
            for cell, (of_stage, number) in zip(cells, met, strict=True):
                first, expected = (
                    of.in_round(cell.begin) for of in (number, microbatch)
                )
                are_alike = stage == of_stage and first == expected
                if not are_alike or (cell.is_long and number != microbatch):
                    return [], (index, cell.end if cell.begin == ZERO else cell.begin)
            filled[id(op)] = evolve(op, stage=stage, microbatch=microbatch)
        completed.append(_filled_in(piece, filled))
    return completed, None


def _filled_in(piece: Piece, filled: Mapping[int, Op]) -> Piece:
    """The piece with some ops replaced, by the ids of the old ones."""
    return piece.changed(lambda op: filled.get(id(op), op))


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
