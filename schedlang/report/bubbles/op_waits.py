"""What every op of an execution waited for, and the chain of ops and waits that makes it as long as
it is.
"""

from functools import cached_property
from typing import Literal

import numpy as np
from attrs import frozen

from schedlang.proof.durations import latencies
from schedlang.schedule.arrays import Floats, Ints
from schedlang.schedule.costs import Costs
from schedlang.schedule.fixed_point import FixedPoint
from schedlang.schedule.needs import all_needs_of
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bars, Timeline

#: Times that differ by this part of the makespan are equal.
ROUNDING = 1e-9

#: No step, where there could be one.
NOTHING = -1


@frozen
class Step:
    """An op, or ops that overlap, or a copy, as it ran: on `rank`, the rows `rows` of its
    actions.
    """

    rank: int
    rows: range
    start: float
    end: float
    is_copy: bool


@frozen(eq=False)
class Waits:
    """The steps of an execution of a schedule, as columns: those of each rank in order, then all
    copies.

    Rank r has the steps `first[r]` up to `first[r + 1]`. The first row of step s in the schedule's
    columns is `head[s]`. It waited last for the result of the step `maker[s]`, or NOTHING, which
    was there at `arrival[s]`. The sum or the gather that it waited for, if any, went on from
    `held_from[s]` to `held_to[s]`. Where a step index of a rank is asked for, one past its last
    step stands for the end of the whole execution, for which every rank waits, and which waits for
    the step `last`.
    """

    schedule: Schedule
    makespan: float
    first: Ints
    head: Ints
    starts: Floats
    ends: Floats
    maker: Ints
    arrival: Floats
    held_from: Floats
    held_to: Floats
    last: int

    @cached_property
    def rank(self) -> Ints:
        """The rank of each step."""
        return self.schedule.columns.rank[self.head].astype(np.int64)

    @cached_property
    def steps(self) -> list[Step]:
        """All steps, by their numbers."""
        columns = self.schedule.columns
        row = self.head - columns.first[self.rank]
        stop = row + columns.sizes[self.head]
        is_copy = np.arange(len(row)) >= self.first[-1]
        fields = (self.rank, row, stop, self.starts, self.ends, is_copy)
        return [
            Step(rank, range(begin, stop), start, end, is_copy)
            for rank, begin, stop, start, end, is_copy in zip(
                *(column.tolist() for column in fields), strict=True
            )
        ]

    def gaps(self, rank: int) -> tuple[Ints, Floats, Floats]:
        """The idle time of a rank, as columns: the index of the step that it waits with, from when,
        until when.
        """
        steps = slice(int(self.first[rank]), int(self.first[rank + 1]))
        ends = np.append(0.0, self.ends[steps])
        starts = np.append(self.starts[steps], self.makespan)
        index = np.flatnonzero(starts - ends > ROUNDING * self.makespan)
        return index, ends[index], starts[index]

    def begun(self, rank: Ints, time: Floats, side: Literal["left", "right"]) -> Ints:
        """The number of the first step of some ranks that begins after a time, or if `side` is
        left, at it.
        """
        # One search for many ranks: the keys of rank 1 are all larger than those of rank 0.
        values, key = self._by_start
        moment = np.searchsorted(values, time, side)
        found: Ints = np.searchsorted(key, rank * np.int64(len(values) + 1) + moment)
        return found

    @cached_property
    def _by_start(self) -> tuple[Floats, Ints]:
        """All times at which steps start; and of each step a number that grows with its rank, and
        with its start.
        """
        ops = int(self.first[-1])
        values, which = np.unique(self.starts[:ops], return_inverse=True)
        return values, self.rank[:ops] * np.int64(len(values) + 1) + which

    @cached_property
    def before(self) -> Ints:
        """Of each step the one that kept what it runs on and ended last: the step before it on its
        rank, or the copy before it on its link; or NOTHING.
        """
        numbers = np.arange(len(self.head))
        ops = int(self.first[-1])
        begins = self.first[self.rank]
        # A copy comes before the first step behind it.
        following = np.searchsorted(self.head[: self.first[-1]], self.head)
        before = np.where(following > begins, following - 1, NOTHING)
        # By default each rank has a link to the host of its own.
        links = np.array(self.schedule.layout.links or range(len(self.first) - 1))
        link = links[self.rank[ops:]]
        order = np.lexsort((self.starts[ops:], link))
        is_same = np.diff(link[order], prepend=NOTHING) == 0
        earlier = np.full(len(order), NOTHING)
        earlier[order[is_same]] = ops + order[np.flatnonzero(is_same) - 1]
        copies = numbers[ops:]
        is_later = self._end_of(earlier) > self._end_of(before[copies])
        before[copies] = np.where(is_later, earlier, before[copies])
        return before

    def _end_of(self, steps: Ints) -> Floats:
        """When some steps end; NOTHING before all others."""
        return np.where(steps == NOTHING, -np.inf, self.ends[steps])


def waits(schedule: Schedule, timeline: Timeline, costs: Costs) -> Waits:
    """What the ops of a schedule with communication waited for, in an execution that was simulated
    with some costs.
    """
    columns = schedule.columns
    is_head = columns.batch == np.arange(len(columns))
    ops = np.flatnonzero(columns.is_computed)
    copies = np.flatnonzero(columns.is_beside)
    heads = np.flatnonzero(is_head[ops])
    starts, ends = _times(timeline.ranks)
    copy_starts, copy_ends = _times(timeline.copies)
    head = np.concatenate([ops[heads], copies])
    # Of each row of the schedule its step, first for heads, then for all of their batches:
    #
    #     row       0: 0F0   1: 0SEND_F0   2: 0F1   3: 0B0, which overlaps 0F1
    #     batch     0        1             2        2
    #     step      0        NOTHING       1        1
    step_of = np.full(len(columns), NOTHING)
    step_of[head] = np.arange(len(head))
    step_of = step_of[columns.batch]
    last = heads + columns.sizes[ops[heads]] - 1
    end = np.concatenate([ends[last], copy_ends])
    first = np.searchsorted(ops[heads], columns.first)
    maker, arrival = _latest(schedule, costs, step_of, end, timeline.fixed)
    start = np.concatenate([starts[heads], copy_starts])
    held_from, held_to = np.zeros((2, len(head)))
    for each in timeline.beside:
        if each.before != NOTHING:
            held_from[step_of[each.before]] = each.start
            held_to[step_of[each.before]] = each.end
    # It ends with an op, or with a sum.
    ends_with = int(np.argmax(end[: first[-1]]))
    sums = [each for each in timeline.beside if each.after != NOTHING]
    latest = max(sums, key=lambda each: each.end, default=None)
    if latest and latest.end > end[ends_with]:
        ends_with = int(step_of[latest.after])
    return Waits(
        schedule,
        timeline.makespan,
        first,
        head,
        start,
        end,
        maker,
        arrival,
        held_from,
        held_to,
        ends_with,
    )


def _times(ranks: tuple[Bars, ...]) -> tuple[Floats, Floats]:
    """When the bars of all ranks start and end."""
    starts = [np.asarray(bars.start) for bars in ranks]
    ends = [np.asarray(bars.end) for bars in ranks]
    return np.concatenate([np.zeros(0), *starts]), np.concatenate([np.zeros(0), *ends])


def _latest(
    schedule: Schedule, costs: Costs, step_of: Ints, end: Floats, fixed: FixedPoint
) -> tuple[Ints, Floats]:
    """Of each step the one whose result arrived last, and when it did."""
    needs = all_needs_of(schedule)
    transfers = costs.over(schedule.costs).transfers(len(schedule.placement))
    table = latencies(schedule.layout, transfers)
    user = step_of[needs.user]
    maker = step_of[needs.maker]
    delay = np.zeros(len(user))
    messages = needs.is_message
    delay[messages] = table[needs.made[messages], needs.number[messages]]
    # Nearest to the exact time, as all times of the timeline are, or a bit of one would be a wait.
    arrival = fixed.numbers(fixed.counts(end[maker] + delay))
    items = np.flatnonzero((user != NOTHING) & (user != maker))
    # Of those that arrive at one time, the first one that is needed.
    items = items[np.lexsort((needs.user[items], -arrival[items], user[items]))]
    # The first row of each step: sorted by arrival, so it is the one that came last.
    items = items[np.diff(user[items], prepend=-1) != 0]
    makers = np.full(len(end), NOTHING)
    arrivals = np.zeros(len(end))
    makers[user[items]] = maker[items]
    arrivals[user[items]] = arrival[items]
    return makers, arrivals
