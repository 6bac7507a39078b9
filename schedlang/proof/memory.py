"""What a rank holds over time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from schedlang.on_demand import on_demand
from schedlang.schedule.arrays import Floats, Ints, is_any, repeated
from schedlang.schedule.columns import STREAMS
from schedlang.schedule.costs import Amounts
from schedlang.schedule.kept import keeps_all
from schedlang.schedule.kinds import AWAY, BACK, ROWS, TRANSFERS, Kind
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bars, Timeline

if TYPE_CHECKING:
    from schedlang.ranks.lifetimes import MessageTimes
else:
    # For costs of messages.
    MessageTimes = on_demand("schedlang.ranks.lifetimes.MessageTimes")


@frozen(eq=False)
class Level:
    """What one rank holds over time: the amount at `first`, and the amount from each change on,
    with the stage and microbatch of the op that changes it.
    """

    first: float
    times: Floats
    amounts: Floats
    stages: Ints
    microbatches: Ints

    @property
    def peak(self) -> float:
        """The most that the rank ever holds."""
        return float(self.amounts.max(initial=self.first))

    @property
    def steps(self) -> list[tuple[float, float]]:
        """The times of changes, and the amount from each on."""
        return list(zip(self.times.tolist(), self.amounts.tolist(), strict=True))


def levels(
    schedule: Schedule,
    timeline: Timeline,
    amounts: Amounts,
    first: Sequence[float] = (),
) -> list[Level]:
    """What each rank holds over time. `first` is the amount that it holds at the start, by default
    nothing.

    An op takes memory when it begins and gives memory back when it ends. Ops that overlap begin and
    end together. Activations that do not stay (`schedlang.schedule.kept`) count only at the begin
    of their op. A rank that keeps what others offload holds it from the begin of their `offload` to
    the end of their `reload`. Messages take memory when the op begins at which they do, by
    `schedlang.ranks.lifetimes`, and give it back when the op ends that uses them last, or before
    the op that knows them received.
    """
    ops = _changes(schedule, timeline)
    fixed = amounts.fixed
    counted = amounts.counted()
    amount = ops.sign * counted.of(ops.kind, ops.stage, ops.microbatch)
    stays = keeps_all(schedule, ops.kind, ops.stage, ops.microbatch)
    takes = amount > 0
    time = np.where(takes, ops.start, ops.end)
    # An op sees all changes up to its start, but none of ops that are issued behind it. At one
    # time, memory is given back before memory is taken. Ops that overlap first all take, then all
    # give back:
    #
    #     rows       0: F0    1: B0, overlaps 2: F1    3: B1
    #     changes    +1                      +1   -1   -1
    #     turns      1                       2    3    4
    seen_by = np.maximum(ops.seen_at(time), np.where(takes, ops.head, ops.last) + 1)
    # What is not kept is taken and given back at once, behind all earlier changes, and when the ops
    # that overlap have taken theirs.
    kept = np.flatnonzero(stays)
    passing = np.flatnonzero(~stays)
    head = ops.head[passing]
    op = np.concatenate([kept, passing, passing])
    changes = np.concatenate([amount[kept], amount[passing], -amount[passing]])
    times = np.concatenate([time[kept], ops.start[passing], ops.start[passing]])
    turns = np.concatenate([seen_by[kept], head, head + (ops.last[passing] > head)])
    places = np.repeat(
        [_OF_OPS, _PASSING, _PASSED], [len(kept), len(passing), len(passing)]
    )
    if any(amounts.messages):
        of_messages = _of_messages(schedule, ops, counted.messages)
        op, changes, times, turns, places = map(
            np.concatenate,
            zip((op, changes, times, turns, places), of_messages, strict=True),
        )
    # Without copies and messages, each change is seen by the op behind it, and all are in order.
    if (np.diff(turns) <= 0).any():
        order = np.lexsort(
            (changes, places, times, np.floor(places), turns, ops.rank[op])
        )
        op = op[order]
        changes = changes[order]
        times = times[order]
    found = []
    bounds = np.searchsorted(ops.rank[op], np.arange(len(ops.first)))
    for rank, (begin, end) in enumerate(pairwise(bounds.tolist())):
        own = slice(begin, end)
        held = first[rank] if first else 0.0
        counts = np.append(fixed.counts(held), changes[own])
        amounts_held = fixed.numbers(np.cumsum(counts)[1:])
        stages = ops.stage[op[own]]
        microbatches = ops.microbatch[op[own]]
        found.append(Level(held, times[own], amounts_held, stages, microbatches))
    return found


def peaks(
    schedule: Schedule, timeline: Timeline, amounts: Amounts
) -> tuple[float, ...]:
    """The most that each rank holds."""
    return tuple(level.peak for level in levels(schedule, timeline, amounts))


# The places of a turn, in order. Changes by ops and copies come in the order of their times, with
# the end of messages that an op has used. Then come messages until the next op works, from
# `_MESSAGES` on in the order of the rank's actions; and what that op does not keep.
_OF_OPS = 0.0
_USED = 0.5
_MESSAGES = 1.0
_PASSING = 2.0
_PASSED = 3.0


def _of_messages(
    schedule: Schedule, ops: "_Changes", amounts: Sequence[float]
) -> list[NDArray[Any]]:
    """The changes by messages, each of which takes an amount by its earlier stage: for each the row
    of an op of the stage on this rank, the change, its time, its turn, and its place in the turn.
    """
    layout = schedule.layout
    columns = schedule.columns
    message_times = MessageTimes(schedule)
    by_transfer = np.zeros((ROWS, len(layout.all_numbers)))
    for kind in TRANSFERS:
        for number in layout.all_numbers:
            by_transfer[kind, number] = amounts[layout.earlier(kind, number)]
    ended = np.maximum(ops.seen_at(ops.end), ops.last + 1)
    is_computed = (STREAMS[ops.kind] == STREAMS[Kind.F]) & (ops.sign > 0)
    parts: list[tuple[NDArray[Any], ...]] = []
    for rank, (begin, end) in enumerate(pairwise(columns.first.tolist())):
        held = message_times.of_issued(rank)
        amount = by_transfer[held.kind, held.number]
        # The row of the rank's first op at an action or behind it; behind the last one, -1.
        rows = np.append(np.flatnonzero(is_computed & (ops.rank == rank)), -1)
        index = np.flatnonzero(columns.is_computed[begin:end])
        start = rows[np.searchsorted(index, held.start)]
        stop = rows[np.searchsorted(index, held.stop)]
        of_stage = np.where(held.is_received, stop, start)
        taken, freed = held.moments / (end - begin + 1)
        head = ops.head[start]
        parts.append((of_stage, amount, ops.start[head], head, _MESSAGES + taken))
        is_sent = held.is_sent & (stop >= 0)
        head = ops.head[stop]
        last = ops.last[stop]
        for which, time, turn, place in (
            (is_sent, ops.start[head], head, _MESSAGES + freed),
            (~held.is_sent, ops.end[last], ended[last], np.full(len(last), _USED)),
        ):
            part = of_stage, -amount, time, turn, place
            parts.append(tuple(column[which] for column in part))
    return list(map(np.concatenate, zip(*parts, strict=True)))


@frozen(eq=False)
class _Changes:
    """The changes of what ranks hold, rank after rank, each rank in the order of starts: by its ops
    and copies, and by the copies of ranks that it keeps activations for. Those copies have the
    `sign` -1, since what they take from one rank they give to the other. Rank r has the rows
    `first[r]` up to `first[r + 1]`. Ops that overlap start and end together, and have the rows from
    `head` to `last`.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    start: Floats
    end: Floats
    sign: Ints
    rank: Ints
    first: Ints
    head: Ints
    last: Ints

    def seen_at(self, times: Floats) -> Ints:
        """For each row, the first row of its rank that does not start before it."""
        places = [
            begin + np.searchsorted(self.start[begin:end], times[begin:end])
            for begin, end in pairwise(self.first.tolist())
        ]
        return np.concatenate([np.zeros(0, np.int64), *places])


def _changes(schedule: Schedule, timeline: Timeline) -> _Changes:
    layout = schedule.layout
    # A run has recorded copies among the ops.
    copies = timeline.copies or [Bars()] * len(timeline.ranks)
    parts: list[Bars] = []
    signs: list[int] = []
    ranks: list[int] = []
    own_parts: list[int] = []
    for rank, own in enumerate(timeline.ranks):
        for kept in layout.kept_by(rank):
            parts += [copies[kept], timeline.ranks[kept]]
            signs += [-1, -1]
        # Of one start, copies come first, since an op that starts together with a copy was issued
        # after it.
        own_parts.append(len(parts) + 1)
        parts += [copies[rank], own]
        signs += [1, 1]
        ranks += [rank] * (len(signs) - len(ranks))
    kind, stage, microbatch, start, end = (
        np.concatenate([np.asarray(column) for column in columns])
        for columns in zip(*(part.columns for part in parts), strict=True)
    )
    lengths = list(map(len, parts))
    sign = repeated(np.array(signs), lengths)
    rank_of = repeated(np.array(ranks), lengths)
    batch = np.arange(len(start))
    if schedule.columns.group.any():
        begins = np.cumsum(lengths) - lengths
        for rank, part in enumerate(own_parts):
            items = begins[part] + np.arange(lengths[part])
            batch[items] = items[_heads(schedule, rank, len(items))]
        first_start = start.copy()
        last_end = end.copy()
        np.minimum.at(first_start, batch, start)
        np.maximum.at(last_end, batch, end)
        start = first_start[batch]
        end = last_end[batch]
    order = np.lexsort((start, rank_of))
    if -1 in signs:
        is_change = (sign > 0) | is_any(kind, *AWAY, *BACK)
        order = order[is_change[order]]
    rank_of = rank_of[order]
    # Ops that overlap start together, so they stay neighbours.
    bounds = np.flatnonzero(np.diff(batch[order], prepend=-1, append=-1))
    sizes = np.diff(bounds)
    head = repeated(bounds[:-1], sizes)
    return _Changes(
        kind[order],
        stage[order],
        microbatch[order],
        start[order],
        end[order],
        sign[order],
        rank_of,
        np.searchsorted(rank_of, np.arange(len(timeline.ranks) + 1)),
        head,
        head + repeated(sizes, sizes) - 1,
    )


def _heads(schedule: Schedule, rank: int, count: int) -> Ints:
    """For each of a rank's ops, the first of those that it overlaps with."""
    columns = schedule.columns
    rows = np.arange(columns.first[rank], columns.first[rank + 1])
    ops = rows[columns.is_computed[rows]]
    if len(ops) < count:
        ops = rows[~columns.is_transfer[rows] & ~columns.is_collective[rows]]
    return np.searchsorted(ops, columns.batch[ops])
