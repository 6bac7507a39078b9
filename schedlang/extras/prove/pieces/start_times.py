"""Start times of all ops for any n: guessed from a few sizes, then proved for all.

In the ideal execution a batch starts when its rank has finished the batch before, and everything
that it needs has arrived. In each piece of an order, its start is assumed to be `constant + by_n *
n + by_round * k`; a piece is split where the step of its times changes. Then `Stamped.check` checks
every edge for all n and rounds. No batch starts before something that it waits for: so times grow
along all edges, and nothing deadlocks. And each batch starts exactly when the last of these is
there: so the times are those of the execution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import define, field, frozen

from schedlang.extras.prove.pieces.linear import ONCE, ZERO, Affine, NotLinear
from schedlang.extras.prove.pieces.pieces import (
    Batch,
    Cell,
    Op,
    Orders,
    Piece,
    sorted_cells,
    split,
    tiles,
)
from schedlang.proof.durations import latencies
from schedlang.proof.edges import ideal_events
from schedlang.proof.events import Events
from schedlang.schedule.actions import is_update
from schedlang.schedule.arrays import Ints, is_any
from schedlang.schedule.kinds import OF_STAGE, OPS, Kind
from schedlang.schedule.needs import needs_of
from schedlang.schedule.schedule import Schedule

#: What a rule says that an op needs: the thing, the stage that makes it, the distance of its
#: microbatch, whether another rank makes it, and how long the message takes.
Need = tuple[int, int, int, bool, Any]
#: The needs of an op, by its kind, stage and slice.
Rules = Mapping[tuple[int, int, int], tuple[Need, ...]]


class NoStamps(Exception):
    """No start times were found, or the check of them failed."""


def rules_of(schedules: Sequence[Schedule]) -> Rules:
    """The needs of all ops, the same at all these sizes; NotLinear if they differ."""
    rules: dict[tuple[int, int, int], tuple[Need, ...]] | None = None
    for schedule in schedules:
        own = _rules_of(schedule)
        if rules is not None and own != rules:
            raise NotLinear(
                "what ops need is not the same for all numbers of microbatches"
            )
        rules = own
    assert rules is not None
    return rules


def _rules_of(schedule: Schedule) -> dict[tuple[int, int, int], tuple[Need, ...]]:
    layout = schedule.layout
    columns = schedule.columns
    needs = needs_of(schedule)
    is_of_op = ~columns.is_transfer[needs.user]
    user = needs.user[is_of_op]
    microbatch = columns.microbatch[user]
    # One column for each need of each op; those that differ in the microbatch alone are equal:
    #
    #     kind  stage  slice │ made  made on stage  microbatches on  is_far  way
    #     B     1      0     │ B     2              0                1       2
    table = np.stack(
        [
            columns.kind[user],
            columns.stage[user],
            microbatch % layout.slices,
            needs.made[is_of_op],
            needs.stage[is_of_op],
            needs.microbatch[is_of_op] - microbatch,
            needs.is_far[is_of_op],
            needs.number[is_of_op],
        ]
    )
    found, counts = _distinct(table)
    ops = np.flatnonzero(~columns.is_transfer & ~is_any(columns.kind, *OF_STAGE))
    keys, times = _distinct(
        np.stack(
            [
                columns.kind[ops],
                columns.stage[ops],
                columns.microbatch[ops] % layout.slices,
            ]
        )
    )
    users = dict(zip(map(tuple, keys.T.tolist()), times.tolist(), strict=True))
    ways = latencies(layout, schedule.costs.transfers(len(layout.placement)))
    fixed = schedule.costs.fixed_times
    rules: dict[tuple[int, int, int], list[Need]] = {key: [] for key in users}
    for row, count in zip(found.T.tolist(), counts.tolist(), strict=True):
        key = tuple(row[:3])
        made, stage, further, is_far, number = row[3:]
        # If there are as many such needs as ops, each op has it.
        if count != users[key]:
            raise NotLinear("ops of one stage do not all need the same")
        way = fixed.exact(float(ways[made, number])) if is_far else 0
        rules[key].append((made, stage, further, bool(is_far), way))
    return {key: tuple(sorted(of)) for key, of in rules.items()}


def _distinct(table: Ints) -> tuple[Ints, Ints]:
    """The distinct columns of a table, and the count of each."""
    order = np.lexsort(table[::-1])
    ordered = table[:, order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    first = np.flatnonzero(is_new)
    return ordered[:, first], np.diff(first, append=len(order))


@frozen
class Timed:
    """A piece of a rank's order with the start time and the duration of each batch."""

    rank: int
    piece: Piece
    starts: tuple[Affine, ...]
    takes: tuple[Any, ...]

    def end(self, batch: int) -> Affine:
        """When a batch ends."""
        return self.starts[batch] + Affine(self.takes[batch])


def ideal_batches(schedule: Schedule) -> tuple[Events, list[Ints]]:
    """The ideal execution, and for each rank the items of its batches there."""
    events = ideal_events(schedule, schedule.costs)
    columns = schedule.columns
    is_head = columns.batch == np.arange(len(columns))
    heads = np.flatnonzero(is_head & ~columns.is_transfer)
    borders = np.searchsorted(heads, columns.first[1:-1])
    return events, np.split(events.item[heads], borders)


def walked(schedule: Schedule) -> list[list[Any]]:
    """The start time of each batch of each rank in the ideal execution; fractions where costs are
    not whole numbers. NoStamps if it deadlocks.
    """
    events, items = ideal_batches(schedule)
    if not events.graph.is_whole:
        raise NoStamps("ranks wait for each other")
    times = (events.fixed.numbers(events.graph.starts[own]) for own in items)
    return [list(map(events.fixed.exact, own.tolist())) for own in times]


def durations_of(schedule: Schedule, batch: Batch) -> Any:
    """When each op of a batch ends, counted from the batch's start; the last is the batch's
    duration.
    """
    if schedule.costs.differ_by_microbatch:
        raise NotLinear("costs differ by microbatch")
    durations = schedule.costs.durations(schedule.layout)
    ends = durations.counted().ends([(op.kind, op.stage, 0) for op in batch])
    fixed = schedule.costs.fixed_times
    return [fixed.exact(end) for end in fixed.numbers(np.array(ends)).tolist()]


def stamp(
    orders: Orders, walks: Sequence[list[list[Any]]], schedule: Schedule
) -> list[Timed]:
    """Pieces with start times, split as needed, from the start times at n = 0, 1 and 2. `schedule`
    gives the durations. NoStamps if there is no pattern.
    """
    timed: list[Timed] = []
    known: dict[Any, Any] = {}
    for rank, pieces in enumerate(orders.ranks):
        # The position in the start times of each size; a piece takes its rounds at that size.
        at = [0] * len(walks)
        for piece in pieces:
            rounds = [piece.rounds.at(n) for n in range(len(walks))]
            width = len(piece.batches)
            times = []
            for n, walk in enumerate(walks):
                flat = walk[rank][at[n] : at[n] + rounds[n] * width]
                times.append(
                    [flat[k * width : (k + 1) * width] for k in range(rounds[n])]
                )
                at[n] += rounds[n] * width
            for part, starts in _cut(piece, times):
                takes = []
                for batch in part.batches:
                    key = tuple((op.kind, op.stage) for op in batch)
                    if key not in known:
                        known[key] = durations_of(schedule, batch)[-1]
                    takes.append(known[key])
                timed.append(Timed(rank, part, starts, tuple(takes)))
    return timed


def _cut(
    piece: Piece, times: list[list[list[Any]]]
) -> Iterator[tuple[Piece, tuple[Affine, ...]]]:
    """The piece, split where the step of its start times changes, and the start times of each
    part.
    """
    # Start times of a piece at three sizes, and the runs of rounds with one step:
    #
    #     n = 0    0 2 4 6 │ 9 12                runs of 4 and 2 rounds
    #     n = 1    0 2 4 6 8 │ 11 14             5 and 2
    #     n = 2    0 2 4 6 8 10 │ 13 16          6 and 2: the first grows by n, so it is cut there
    runs = [_runs(rounds) for rounds in times]
    lengths = [[length for length, _ in of] for of in runs]
    if len({len(of) for of in lengths}) > 1:
        raise NoStamps("the times of a loop have no pattern yet")
    begin = ZERO
    rest = piece
    for number, here in enumerate(zip(*lengths, strict=True)):
        growth = here[1] - here[0]
        if any(later - earlier != growth for earlier, later in pairwise(here)):
            raise NoStamps("the times of a loop have no pattern yet")
        length = Affine(here[0], growth)
        is_last = number == len(lengths[0]) - 1
        if is_last:
            part = rest
        else:
            part, rest = split(rest, length)
        # A single round has no step.
        steps = [of[number][1] for of in runs if of[number][0] > 1] or [
            runs[0][number][1]
        ]
        if any(step != steps[0] for step in steps):
            raise NoStamps("the times of a loop have no pattern yet")
        starts = []
        for place in range(len(part.batches)):
            k, batch = divmod(place, len(piece.batches))
            first = [of[begin.at(n) + k][batch] for n, of in enumerate(times)]
            by_n = first[1] - first[0]
            if any(first[n] != first[0] + by_n * n for n in range(len(first))):
                raise NoStamps("the times of a loop have no pattern yet")
            step = steps[0][batch] if part.grows else 0
            starts.append(Affine(first[0], by_n, step))
        yield part, tuple(starts)
        begin += length


def _runs(rounds: list[list[Any]]) -> list[tuple[int, Any]]:
    """Runs of rounds with the same step: the length of each, and its step."""
    runs: list[tuple[int, Any]] = []
    at = 0
    while at < len(rounds):
        if at + 1 == len(rounds):
            runs.append((1, [0] * len(rounds[at])))
            break
        step = [b - a for a, b in zip(rounds[at], rounds[at + 1], strict=True)]
        end = at + 1
        while end + 1 < len(rounds) and all(
            c - b == s
            for b, c, s in zip(rounds[end], rounds[end + 1], step, strict=True)
        ):
            end += 1
        runs.append((end - at + 1, step))
        at = end + 1
    return runs


#: An op that makes something: its index in `Makers.ops`, the rounds of its piece, its microbatch.
_Maker = tuple[int, Affine, Affine]


@define
class Makers:
    """The ops that make one thing on one stage, each with the indices of its piece and batch.

    Only a few of them can make a given microbatch: those with one round are found by the microbatch
    itself, the others by its remainder by the `stride`, since they go on by that.
    """

    stride: int
    ops: list[tuple[int, int, Op]] = field(factory=list)
    once: dict[Affine, int] = field(factory=dict)
    growing: dict[int, list[_Maker]] = field(factory=dict)
    by_rest: dict[int, list[_Maker]] = field(factory=dict)

    def add(self, piece: int, batch: int, op: Op, rounds: Affine) -> None:
        """Add an op of a piece with these rounds."""
        maker = len(self.ops), rounds, op.microbatch
        rest = op.microbatch.constant % self.stride
        self.ops.append((piece, batch, op))
        self.by_rest.setdefault(rest, []).append(maker)
        if rounds == ONCE:
            self.once.setdefault(op.microbatch.in_round(ZERO), maker[0])
        else:
            self.growing.setdefault(rest, []).append(maker)

    def cells(self, rounds: Affine, wanted: Affine) -> list[Cell]:
        """Where the microbatch `wanted` is made, by the rounds of the op that needs it."""
        rest = wanted.constant % self.stride
        if rounds != ONCE:
            return sorted_cells(rounds, wanted, self.by_rest.get(rest, ()))
        # Each microbatch is made once, so there is no other maker.
        number = self.once.get(wanted.in_round(ZERO))
        if number is not None:
            return [Cell(ZERO, ONCE, number, ZERO)]
        return sorted_cells(rounds, wanted, self.growing.get(rest, ()))


#: The makers of each thing on each stage.
Sources = Mapping[tuple[int, int], Makers]


#: When something arrives, in the rounds from a first one up to a last one.
Arrival = tuple[Affine, Affine, Affine]


@frozen(eq=False)
class Stamped:
    """Pieces with start times, together with all that is needed to check them: the needs of ops,
    the orders, the number of slices. `summed` has for each stage the other replicas whose gradients
    its optimizer step waits for.
    """

    timed: Sequence[Timed]
    rules: Rules
    orders: Orders
    slices: int
    summed: Sequence[Collection[int]] = ()

    def check(self, looked_at: Collection[int] | None = None) -> None:
        """NoStamps if a start time is wrong, among all pieces or those `looked_at`. NeedsBase or
        NeedsPeriod if the answer differs by size.
        """
        self._check_durations()
        sources = self.sources()
        last: dict[int, int] = {}
        for number, timed in enumerate(self.timed):
            if looked_at is None or number in looked_at:
                self._check_piece(number, last.get(timed.rank), sources)
            last[timed.rank] = number

    def _check_durations(self) -> None:
        """NotLinear if an op takes no time: then times would not grow along its edges."""
        for timed in self.timed:
            for batch, takes in zip(timed.piece.batches, timed.takes, strict=True):
                if not takes and any(op.kind not in OF_STAGE for op in batch):
                    raise NotLinear("an op takes no time")

    def sources(self) -> Sources:
        """The makers of each thing on each stage."""
        makers: dict[tuple[int, int], Makers] = {}
        for number, timed in enumerate(self.timed):
            for place, batch in enumerate(timed.piece.batches):
                for op in batch:
                    for made in OPS[op.kind].makes:
                        key = made, op.stage
                        if key not in makers:
                            makers[key] = Makers(self.orders.strides[op.stage])
                        makers[key].add(number, place, op, timed.piece.rounds)
        return makers

    def _check_piece(self, number: int, before: int | None, sources: Sources) -> None:
        timed = self.timed[number]
        for place, batch in enumerate(timed.piece.batches):
            #: For each thing that is waited for, the rounds, and when it is there.
            waits: list[list[Arrival]] = [self._rank(number, before, place)]
            for op in batch:
                waits += self._needed(timed, op, sources)
            self._hold(timed, place, waits)

    def _rank(self, number: int, before: int | None, place: int) -> list[Arrival]:
        """When the batch before ends, by the rounds of the piece."""
        timed = self.timed[number]
        rounds = timed.piece.rounds
        if place:
            return [(ZERO, rounds, timed.end(place - 1))]
        first = ZERO
        if before is not None:
            earlier = self.timed[before]
            first = earlier.end(-1).in_round(earlier.piece.rounds - 1)
        # Round 0 follows the piece before, every other round the round before.
        cells = [(ZERO, ONCE, first)]
        if rounds != ONCE:
            end = timed.end(-1)
            cells.append((ONCE, rounds, end - end.by_round))
        return cells

    def _needed(self, timed: Timed, op: Op, sources: Sources) -> Iterator[Any]:
        """When each thing arrives that an op needs, by the rounds of its piece."""
        if is_update(op.kind) and self.summed:
            yield from self._gradients(op.stage, sources)
        for made, stage, further, is_far, way in self.needs(op):
            makers = sources.get((made, stage))
            wanted = op.microbatch + further
            cells = makers.cells(timed.piece.rounds, wanted) if makers else []
            if not makers or not cells or not tiles(cells, timed.piece.rounds):
                raise NoStamps("an op needs what is never made")
            there = []
            for cell in cells:
                source, place, _ = makers.ops[cell.source]
                if not is_far and self.timed[source].rank != timed.rank:
                    raise NoStamps("an op needs what another rank makes, as its own")
                end = self.timed[source].end(place).in_round(cell.round)
                there.append((cell.begin, cell.end, end + way))
            yield there

    def _gradients(self, stage: int, sources: Sources) -> Iterator[Any]:
        """When the gradients of the other replicas of a stage are there, which its update waits
        for.
        """
        for other in self.summed[stage]:
            units = self.orders.units[other]
            for source, place, op in sources[Kind.W, other].ops:
                timed = self.timed[source]
                last = timed.piece.rounds - 1
                number = op.microbatch.in_round(last)
                if not number.is_negative and (number - units).is_negative:
                    yield [(ZERO, ONCE, timed.end(place).in_round(last))]

    def needs(self, op: Op) -> tuple[Need, ...]:
        """The needs of an op. An op of a whole stage has none."""
        if op.kind in OF_STAGE:
            return ()
        constant, by_n, by_round = op.microbatch
        if by_n % self.slices or by_round % self.slices:
            raise NotLinear("a loop has slices of several numbers in one place")
        return self.rules[op.kind, op.stage, constant % self.slices]

    def _hold(self, timed: Timed, place: int, waits: list[list[Arrival]]) -> None:
        """NoStamps unless the batch starts exactly when the last thing that it waits for is
        there.
        """
        start = timed.starts[place]
        borders = {
            border
            for cells in waits
            for begin, end, _ in cells
            for border in (begin, end)
        }
        ordered = sorted(borders, key=lambda border: border.growth)
        for begin, end in pairwise(ordered):
            if not (begin - end).is_negative:
                raise NoStamps("the rounds of a loop have no order")
            is_tight = False
            for cells in waits:
                for cell_begin, cell_end, arrival in cells:
                    if not (_within(begin, end, cell_begin, cell_end)):
                        continue
                    late = start - arrival
                    # It is linear in the round, so it is least at the first or the last one.
                    spare = late.in_round(begin), late.in_round(end - 1)
                    if any(of.is_negative for of in spare):
                        raise NoStamps(
                            "something starts before what it waits for is there"
                        )
                    is_tight |= spare == (ZERO, ZERO)
            if not is_tight:
                raise NoStamps("something starts later than it might")


def _within(begin: Affine, end: Affine, cell_begin: Affine, cell_end: Affine) -> bool:
    """Whether the rounds from `begin` to `end` lie within those of a cell."""
    return cell_begin.growth <= begin.growth and end.growth <= cell_end.growth
