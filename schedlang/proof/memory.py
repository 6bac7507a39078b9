"""What a rank holds over time."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from schedlang.schedule.columns import Floats, Ints, is_any
from schedlang.schedule.costs import Amounts
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bars, Timeline


@frozen(eq=False)
class Level:
    """What a rank holds from some times on, in order of time, and at `first`; and the stage and the
    microbatch of the op that changes it there.
    """

    first: float
    times: Floats
    amounts: Floats
    stages: Ints
    microbatches: Ints

    @property
    def peak(self) -> float:
        """The most that it ever holds."""
        return float(self.amounts.max(initial=self.first))

    @property
    def steps(self) -> list[tuple[float, float]]:
        """The times at which it changes, and what it holds from each on."""
        return list(zip(self.times.tolist(), self.amounts.tolist(), strict=True))


def levels(
    schedule: Schedule,
    timeline: Timeline,
    amounts: Amounts,
    first: Sequence[float] = (),
) -> list[Level]:
    """What each rank holds over time, by what ops add to the memory of their rank; it held some
    amount at `first`, by default nothing.

    What an op takes, it takes as it begins; what it gives back, as it ends. Activations that it
    does not keep (see `Schedule.keeps`) it holds only as it begins. A rank that keeps what others
    offload holds that from the begin of their `offload` to the end of their `reload`.
    """
    return [
        _level(schedule, timeline, rank, amounts, first[rank] if first else 0.0)
        for rank in range(len(timeline.ranks))
    ]


def peaks(
    schedule: Schedule,
    timeline: Timeline,
    amounts: Amounts,
    first: Sequence[float] = (),
) -> tuple[float, ...]:
    """The most that each rank holds, as `levels` has it."""
    return tuple(level.peak for level in levels(schedule, timeline, amounts, first))


def _level(
    schedule: Schedule, timeline: Timeline, rank: int, amounts: Amounts, first: float
) -> Level:
    kept_for = schedule.layout.kept_by(rank)
    kind, stage, microbatch, start, end, sign = _changes(timeline, rank, kept_for)
    amount = sign * amounts.of(kind, stage, microbatch)
    stays = schedule.keeps_all(kind, stage, microbatch)
    time = np.where(amount > 0, start, end)
    # An op sees all that has changed up to its start, but nothing of what ops issued behind it
    # change. Of one time, what is given back comes first.
    seen_by = np.maximum(np.searchsorted(start, time, "left"), np.arange(len(time)) + 1)
    # What does not stay is taken and given back at once, when all before has changed.
    kept = np.flatnonzero(stays)
    passing = np.flatnonzero(~stays)
    op = np.concatenate([kept, passing, passing])
    changes = np.concatenate([amount[kept], amount[passing], -amount[passing]])
    times = np.concatenate([time[kept], start[passing], start[passing]])
    turns = np.concatenate([seen_by[kept], passing, passing])
    is_later = np.repeat([0, 1, 2], [len(kept), len(passing), len(passing)])
    order = np.lexsort((changes, times, is_later, turns))
    held = np.cumsum(np.append(first, changes[order]))[1:]
    return Level(first, times[order], held, stage[op[order]], microbatch[op[order]])


def _changes(
    timeline: Timeline, rank: int, kept_for: Sequence[int]
) -> tuple[Ints, Ints, Ints, Floats, Floats, Ints]:
    """What changes what a rank holds, in order of its start: its ops and copies, and the copies of
    the ranks that it keeps something for, which take from it what they give to those: their sign is
    -1. Of one start, copies come first, since an op that starts together with a copy was issued
    after it.
    """
    bars = []
    for each in (*kept_for, rank):
        # A run has recorded copies among the ops.
        bars += [
            timeline.copies[each] if timeline.copies else Bars(),
            timeline.ranks[each],
        ]
    kind, stage, microbatch, start, end = (
        np.concatenate([np.asarray(column) for column in columns])
        for columns in zip(*(each.columns for each in bars), strict=True)
    )
    sign = np.ones(len(kind), np.int64)
    sign[: sum(map(len, bars[:-2]))] = -1
    changes = np.flatnonzero((sign > 0) | is_any(kind, Kind.OFFLOAD, Kind.RELOAD))
    order = changes[np.argsort(start[changes], kind="stable")]
    return (
        kind[order],
        stage[order],
        microbatch[order],
        start[order],
        end[order],
        sign[order],
    )
