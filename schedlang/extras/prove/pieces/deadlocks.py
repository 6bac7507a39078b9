"""Deadlocks for every n: found at two sizes, then proved for all.

Each rank that deadlocks stops at a batch. If a rank stops at the same batch of the same piece at
two sizes, its round there is extrapolated to all n. A set of ranks deadlocks at every n if the
batch at which each of them stops needs something that a rank of the set makes at its own stop or
later: of all these batches, none can be the first that runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from schedlang.extras.prove.pieces.linear import ONCE, Affine
from schedlang.extras.prove.pieces.pieces import Orders
from schedlang.extras.prove.pieces.start_times import (
    NoStamps,
    Rules,
    Stamped,
    Timed,
    ideal_batches,
)
from schedlang.language.faults import Fault
from schedlang.schedule.schedule import Schedule

#: A batch: the number of its piece among all pieces, its index in the piece, and its round.
Place = tuple[int, int, Any]


def check_deadlock(orders: Orders, rules: Rules, schedules: Sequence[Schedule]) -> None:
    """Fault if the ranks deadlock for all n; NoStamps if the deadlocks of the first two sizes do
    not extend to all n.
    """
    # Without start times, since there are none.
    pieces = [
        Timed(rank, piece, (), ())
        for rank, of in enumerate(orders.ranks)
        for piece in of
    ]
    layout = schedules[0].layout
    waits = _Waits(Stamped(pieces, rules, orders, layout.slices))
    stops = waits.stops(schedules)
    while stops:
        left = {
            rank: stop for rank, stop in stops.items() if waits.is_stuck(stop, stops)
        }
        if left == stops:
            piece, batch, _ = min(stops.items())[1]
            location = pieces[piece].piece.batches[batch][0].location
            raise Fault("deadlock", "ranks wait for each other", location)
        stops = left
    raise NoStamps("ranks wait for each other, at each size in other places")


class _Waits:
    """Which batch waits for which."""

    def __init__(self, stamped: Stamped) -> None:
        self.stamped = stamped
        self.sources = stamped.sources()

    def stops(self, schedules: Sequence[Schedule]) -> dict[int, Place]:
        """For each rank that stops at the same batch at n = 0 and n = 1: the batch, and its round
        for all n.
        """
        first, second = (
            dict(self._stops_at(schedule, n))
            for n, schedule in enumerate(schedules[:2])
        )
        stops = {}
        for rank in first.keys() & second.keys():
            piece, batch, early = first[rank]
            *other, late = second[rank]
            at = Affine(early, late - early)
            if [piece, batch] == other and self._is_round(at, piece):
                stops[rank] = piece, batch, at
        return stops

    def _is_round(self, at: Affine, piece: int) -> bool:
        rounds = self.stamped.timed[piece].piece.rounds
        return not at.is_negative and (at - rounds).is_negative

    def _stops_at(self, schedule: Schedule, n: int) -> Iterator[tuple[int, Place]]:
        """The ranks that do not come to their end at one size, each with where it stops."""
        events, items = ideal_batches(schedule)
        for rank, own in enumerate(items):
            undone = np.flatnonzero(np.isinf(events.graph.ends[own]))
            if not len(undone):
                continue
            before = int(undone[0])
            for number, timed in enumerate(self.stamped.timed):
                if timed.rank != rank:
                    continue
                width = len(timed.piece.batches)
                size = timed.piece.rounds.at(n) * width
                if before < size:
                    k, batch = divmod(before, width)
                    yield rank, (number, batch, k)
                    break
                before -= size

    def is_stuck(self, stop: Place, stops: Mapping[int, Place]) -> bool:
        """Whether the batch at which a rank stops needs what a rank that stops makes there or
        later.
        """
        for maker in self._makers(stop):
            rank = self.stamped.timed[maker[0]].rank
            if rank in stops and not _is_before(maker, stops[rank]):
                return True
        return False

    def _makers(self, place: Place) -> Iterator[Place]:
        """The batches that make what a batch needs."""
        piece, batch, at = place
        for op in self.stamped.timed[piece].piece.batches[batch]:
            for made, stage, further, _, _ in self.stamped.needs(op):
                makers = self.sources.get((made, stage))
                if makers is None:
                    continue
                for cell in makers.cells(ONCE, (op.microbatch + further).in_round(at)):
                    source, source_batch, _ = makers.ops[cell.source]
                    yield source, source_batch, cell.round


def _is_before(place: Place, other: Place) -> bool:
    """Whether a batch stands before another one of its rank, for all n."""
    if place[0] != other[0]:
        return place[0] < other[0]
    if place[2] != other[2]:
        return bool((place[2] - other[2]).is_negative)
    return place[1] < other[1]
