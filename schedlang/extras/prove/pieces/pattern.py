"""The pattern in orders that a search made.

What a search pass does does not follow from the text. So the orders at three consecutive sizes are
compared. Each order has loops: rows that come again, for later microbatches, a fixed distance
later. If all three sizes have the same loops, some of which gain a round from size to size, and
everything else is the same but for later microbatches, that is a pattern. A proof about it holds
for all sizes whose orders go on in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from schedlang.extras.prove.pieces.linear import ONCE, Affine
from schedlang.extras.prove.pieces.pieces import Op, Orders, Piece
from schedlang.extras.prove.pieces.start_times import NoStamps
from schedlang.schedule.arrays import Ints
from schedlang.schedule.schedule import Schedule

_NONE_YET = "the orders have no pattern yet"


def pattern_of(schedules: Sequence[Schedule]) -> Orders:
    """The orders for n = 0, 1, …, from three schedules at n = 0, 1 and 2; NoStamps if they have no
    pattern.
    """
    first, second, _ = schedules
    layout = first.layout
    stages = range(len(layout.placement))
    grows = [second.layout.units(stage) - first.layout.units(stage) for stage in stages]
    steps = np.array(grows)
    ranks = tuple(
        _pieces([_Order.of(schedule, rank, steps) for schedule in schedules], steps)
        for rank in range(len(first.ranks))
    )
    units = tuple(Affine(layout.units(stage), grows[stage]) for stage in stages)
    strides = tuple(max(grow, 1) for grow in grows)
    return Orders(ranks, units, layout.placement, strides)


@frozen
class _Loop:
    """A range of `size` rows from `begin` on, each of which comes again `length` rows later, for
    later microbatches.
    """

    begin: int
    length: int
    size: int


@frozen(eq=False)
class _Order:
    """The order of a rank at one size, as columns (kind, stage, microbatch, whether it is the first
    of its batch, location), and its loops.
    """

    rows: Ints
    loops: tuple[_Loop, ...]

    @classmethod
    def of(cls, schedule: Schedule, rank: int, steps: Ints) -> _Order:
        """The order of a rank. `steps` says by how many microbatches of each stage a round goes
        on.
        """
        columns = schedule.columns
        begin, end = columns.first[rank : rank + 2].tolist()
        is_first = columns.batch[begin:end] == np.arange(begin, end)
        columns_of_rank = [
            columns.kind[begin:end],
            columns.stage[begin:end],
            # An optimizer step has no microbatch.
            np.maximum(columns.microbatch[begin:end], 0),
            is_first,
            columns.source[begin:end],
        ]
        rows = np.stack(columns_of_rank).astype(np.int64)
        return cls(rows, tuple(_loops(rows, steps)))


def _loops(rows: Ints, steps: Ints) -> Iterator[_Loop]:
    """The loops of an order; each has at least two rounds."""
    kind, stage, microbatch, is_first, _ = rows
    step = steps[stage]
    places = {
        row: place for place, row in enumerate(zip(*rows[:3].tolist(), strict=True))
    }
    later = zip(
        kind.tolist(), stage.tolist(), (microbatch + step).tolist(), strict=True
    )
    count = len(kind)
    again = np.array([places.get(row, -1) for row in later], np.int64)
    again[step == 0] = -1
    again[is_first != is_first[again]] = -1
    distance = np.where(again < 0, 0, again - np.arange(count))
    borders = np.flatnonzero(np.diff(distance)) + 1
    for begin, end in pairwise([0, *borders.tolist(), count]):
        length = int(distance[begin]) if begin < count else 0
        # A round begins with the first op of a batch.
        while begin < end and not is_first[begin]:
            begin += 1
        if 0 < length <= end - begin:
            yield _Loop(begin, length, end - begin)


def _pieces(orders: Sequence[_Order], steps: Ints) -> tuple[Piece, ...]:
    """The order of a rank for all n: growing loops, and what stands between them."""
    if len({len(order.loops) for order in orders}) > 1:
        raise NoStamps(_NONE_YET)
    #: How far the orders have come.
    at = [0] * len(orders)
    pieces: list[Piece] = []
    for loops in zip(*(order.loops for order in orders), strict=True):
        sizes = [loop.size for loop in loops]
        if len(set(sizes)) == 1:
            continue
        length = loops[0].length
        # Rows that belong to two loops are given to the first one.
        skipped = {
            max(begin - loop.begin, 0) for begin, loop in zip(at, loops, strict=True)
        }
        if len(skipped) > 1 or any(loop.length != length for loop in loops):
            raise NoStamps(_NONE_YET)
        skip = skipped.pop()
        begins = [loop.begin + skip for loop in loops]
        rounds = [(size - skip) // length + 1 for size in sizes]
        if rounds[0] < 1 or {after - before for before, after in pairwise(rounds)} != {
            1
        }:
            raise NoStamps(_NONE_YET)
        pieces += _piece(ONCE, orders, at, begins, None)
        at = [
            begin + length * times for begin, times in zip(begins, rounds, strict=True)
        ]
        ends = [begin + length for begin in begins]
        pieces += _piece(Affine(rounds[0], 1), orders, begins, ends, steps)
    pieces += _piece(ONCE, orders, at, [order.rows.shape[1] for order in orders], None)
    return tuple(pieces)


def _piece(
    rounds: Affine,
    orders: Sequence[_Order],
    begins: Sequence[int],
    ends: Sequence[int],
    steps: Ints | None,
) -> Iterator[Piece]:
    """Rows of the three orders as a piece; for a loop, the rows of one round, with its steps."""
    cut = zip(orders, begins, ends, strict=True)
    parts = [order.rows[:, begin:end] for order, begin, end in cut]
    first, second, third = parts
    if len({part.shape for part in parts}) > 1:
        raise NoStamps(_NONE_YET)
    by_n = second[2] - first[2]
    for part, microbatch in ((second, first[2] + by_n), (third, first[2] + 2 * by_n)):
        same = np.stack([*first[:2], microbatch, first[3]])
        if not np.array_equal(part[:4], same):
            raise NoStamps(_NONE_YET)
    if first.size and not first[3, 0]:
        raise NoStamps(_NONE_YET)
    by_round = np.zeros_like(by_n) if steps is None else steps[first[1]]
    numbers = np.stack([first[2], by_n, by_round]).T.tolist()
    batches: list[list[Op]] = []
    kinds, stages, _, firsts, locations = first.tolist()
    for kind, stage, is_first, location, number in zip(
        kinds, stages, firsts, locations, numbers, strict=True
    ):
        if is_first:
            batches.append([])
        batches[-1].append(Op(kind, stage, Affine(*number), location))
    if batches:
        yield Piece(rounds, tuple(map(tuple, batches)))
