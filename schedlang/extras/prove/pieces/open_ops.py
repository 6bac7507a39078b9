"""Fills in what the ops of a rank leave open: `next`, and the weight gradient that a `W` without a
microbatch takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import evolve

from schedlang.extras.prove.pieces.linear import ZERO, Affine, NotLinear
from schedlang.extras.prove.pieces.pieces import Op, Piece, sorted_cells, split, tiles
from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.schedule.kinds import Kind, op_of

T = TypeVar("T")


def with_next(pieces: list[Piece], sites: Sites) -> list[Piece]:
    """Fill in each `next`: the number of earlier calls of that op on that stage."""
    takes_next = sites.takes_next
    if not takes_next:
        return pieces
    if sites.is_mixed:
        raise NotLinear("`next` counts ops that name their microbatch as well")
    groups = [(piece.rounds, list(piece.ops)) for piece in pieces]
    places = numbered(groups, lambda op: (sites.counted_as[op.location], op.stage))
    filled = {
        id(op): evolve(op, microbatch=place)
        for (_, ops), of_piece in zip(groups, places, strict=True)
        for op, place in zip(ops, of_piece, strict=True)
        if op.location in takes_next
    }
    return [_filled_in(piece, filled) for piece in pieces]


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


def with_owed(pieces: list[Piece], sites: Sites) -> list[Piece]:
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
