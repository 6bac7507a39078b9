"""The pattern of orders that a search has made: what passes do does not follow from the text.

The orders at some sizes that follow each other are compared. Where each has, in the middle, one
more round of the same ops for later microbatches, that is a pattern: so many ops first, then
rounds, then the rest. What is proved of it is proved of all orders that go on like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedlang.parametric.orders import Op, Orders, Piece
from schedlang.parametric.stamps import NoStamps
from schedlang.schedule.schedule import Schedule

#: An op of a concrete order, and what it is issued with: kind, stage, microbatch, location, batch.
_Row = tuple[int, int, int, int, int]


def pattern_of(schedules: Sequence[Schedule]) -> Orders:
    """The orders for n = 0, 1, … where the schedules after the first are those of n; NoStamps where
    they have no pattern.
    """
    first, second, third, *_ = schedules
    layout = second.layout
    stages = range(len(layout.placement))
    grows = [second.layout.units(stage) - first.layout.units(stage) for stage in stages]
    ranks = tuple(
        _pieces(_rows(first, rank), _rows(second, rank), _rows(third, rank), grows)
        for rank in range(len(first.ranks))
    )
    units = tuple((layout.units(stage), grows[stage]) for stage in stages)
    strides = {abs(op.microbatch[2]) for pieces in ranks for op in _growing(pieces)}
    if len(strides) != 1:
        raise NoStamps("the orders have no pattern yet")
    return Orders(ranks, units, layout.placement, strides.pop())


def _growing(pieces: tuple[Piece, ...]) -> list[Op]:
    return [op for piece in pieces if piece.grows for batch in piece.batches for op in batch]


def _rows(schedule: Schedule, rank: int) -> list[_Row]:
    actions = schedule.ranks[rank]
    rows = []
    for number, batch in enumerate(actions.batches()):
        for i in batch:
            row = (actions.kind[i], actions.stage[i], actions.microbatch[i], actions.source[i])
            rows.append((*row, number))
    return rows


def _pieces(
    first: list[_Row], second: list[_Row], third: list[_Row], grows: list[int]
) -> tuple[Piece, ...]:
    """What is before the rounds, the rounds, and the rest, of the orders of one rank."""

    def later(row: _Row, by: int) -> Any:
        kind, stage, microbatch, *_ = row
        return kind, stage, microbatch + by * grows[stage]

    def plain(row: _Row) -> Any:
        return row[:3]

    # Three sizes that follow each other, of one rank; `more` is what one microbatch adds:
    #
    #                before        rounds                    rest
    #     first      F0 F1 B0      F2 B1                     B2
    #     second     F0 F1 B0      F2 B1   F3 B2             B3
    #     third      F0 F1 B0      F2 B1   F3 B2   F4 B3     B4
    more = len(second) - len(first)
    if more <= 0 or len(third) - len(second) != more:
        raise NoStamps("the orders have no pattern yet")
    # How many are the same in the first two, from the begin, and from the end, but for being later.
    same = 0
    while same < len(first) and plain(first[same]) == plain(second[same]):
        same += 1
    after = len(first)
    while after and later(first[after - 1], 1) == plain(second[after - 1 + more]):
        after -= 1
    if after > same:
        raise NoStamps("the orders have no pattern yet")
    begin = after
    # Batches are whole: the rounds begin with one.
    while begin <= same and begin and second[begin][4] == second[begin - 1][4]:
        begin += 1
    if begin > same:
        raise NoStamps("the orders have no pattern yet")
    # The same ops again and again, as often as they are there.
    count = 1 + (same - begin) // more
    end = begin + count * more
    before = [_op(row, (0, 0)) for row in second[:begin]]
    rounds = [_op(row, (0, grows[row[1]])) for row in second[begin : begin + more]]
    rest = [_op(row, (grows[row[1]], 0)) for row in second[end:]]
    parts = [((1, 0), before), ((count, 1), rounds), ((1, 0), rest)]
    return tuple(Piece(number, _batches(part)) for number, part in parts if part)


def _op(row: _Row, further: tuple[int, int]) -> tuple[Op, int]:
    kind, stage, microbatch, location, batch = row
    return Op(kind, stage, (microbatch, *further), location), batch


def _batches(ops: list[tuple[Op, int]]) -> tuple[tuple[Op, ...], ...]:
    batches: dict[int, list[Op]] = {}
    for op, batch in ops:
        batches.setdefault(batch, []).append(op)
    return tuple(map(tuple, batches.values()))
