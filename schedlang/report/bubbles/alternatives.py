"""What a rank could run in place of waiting: ops that come later in its order."""

from bisect import bisect_left, bisect_right

import numpy as np

from schedlang.report.bubbles.op_waits import ROUNDING, Waits
from schedlang.schedule.arrays import Floats, Ints, is_any
from schedlang.schedule.costs import Amounts
from schedlang.schedule.kept import keeps_all
from schedlang.schedule.kinds import AWAY, BACK, MAKERS, Kind


class Alternatives:
    """A rank's steps, and what it holds before each of them, where `amounts` are what ops add to
    its memory.
    """

    def __init__(self, waits: Waits, rank: int, amounts: Amounts) -> None:
        self.waits = waits
        begin, stop = waits.first[rank : rank + 2].tolist()
        columns = waits.schedule.columns
        rows = np.arange(*columns.first[rank : rank + 2])
        rows = rows[~columns.is_transfer[rows]]
        kind = columns.kind[rows]
        stage = columns.stage[rows]
        head = waits.head[begin:stop]
        #: Of each step, where its ops begin and stop among all of the rank.
        # Three steps of a rank with four ops, of which two overlap:
        #
        #     op       0    1    2    3           step     0    1    2
        #     kind     F    F    B    B           first    0    1    3
        #                    └────┘ step 1        last     1    3    4
        first = np.searchsorted(rows, head)
        last = first + columns.sizes[head]
        #: The indices of the first step with a backward, and of the last one with a forward.
        backwards = _steps_with(first, np.flatnonzero(is_any(kind, *MAKERS[Kind.B])))
        forwards = _steps_with(first, np.flatnonzero(kind == Kind.F))
        self.first_backward = int(backwards.min(initial=len(head)))
        self.last_forward = int(forwards.max(initial=-1))
        #: The indices of the steps that do the same on the same stages.
        self.alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        words = list(zip(kind.tolist(), stage.tolist(), strict=True))
        for index, (start, end) in enumerate(
            zip(first.tolist(), last.tolist(), strict=True)
        ):
            self.alike.setdefault(tuple(words[start:end]), []).append(index)
        self.kept = _Kept(waits, rank, amounts)
        self.arrivals: list[float] = waits.arrival[begin:stop].tolist()
        self.lengths: list[float] = (
            waits.ends[begin:stop] - waits.starts[begin:stop]
        ).tolist()
        self._measure(amounts, rows, first, last)
        # What is held up to the end of each step, while the rank waits for it and while it runs.
        starts = waits.starts[begin:stop].tolist()
        ends = waits.ends[begin:stop].tolist()
        waiting = [
            self.kept.most(*times) for times in zip([0.0, *ends], starts, strict=False)
        ]
        running = [self.kept.most(*times) for times in zip(starts, ends, strict=True)]
        self.highest: Floats = self.held + np.maximum(waiting, self.rise + running)
        self.peak = float(self.highest.max(initial=0.0))

    def between(self, index: int, start: float, end: float) -> dict[str, float]:
        """From when an op could run in a gap before step `index`, and be over by its end.

        Of each op and stage the next one is looked at. By `order`, where it fits into the rank's
        peak memory, or by `memory`, where it does not.
        """
        earliest: dict[str, float] = {}
        for indices in self.alike.values():
            place = bisect_right(indices, index)
            # Later ones of the same ops and stage are as long, and there no earlier.
            if place < len(indices):
                later = indices[place]
                ready = max(start, self.arrivals[later])
                if ready + self.lengths[later] <= end + ROUNDING * self.waits.makespan:
                    cause = "order" if self._fits(index, later, ready) else "memory"
                    earliest[cause] = min(earliest.get(cause, end), ready)
        return earliest

    def _measure(self, amounts: Amounts, rows: Ints, first: Ints, last: Ints) -> None:
        """Find what the rank holds before each step, what the step adds at most, and what it
        leaves.
        """
        schedule = self.waits.schedule
        columns = schedule.columns
        kind = columns.kind[rows]
        stage = columns.stage[rows]
        microbatch = columns.microbatch[rows]
        amount = amounts.of(kind, stage, microbatch)
        # What is held before each op, one entry more than there are ops. While a step runs, it may
        # hold more than is left of it, such as a forward that drops its activations, or overlaps
        # with a backward:
        #
        #     op          0F0    0F1    0B0            amounts 1, 1, -1
        #     levels      0      1      2      1
        #     rise        1      1      0              what all ops of the step take
        levels = np.append(
            0.0, np.cumsum(amount * keeps_all(schedule, kind, stage, microbatch))
        )
        # What goes on beside two steps is of neither.
        takes = np.where(columns.is_beside[rows], 0.0, np.maximum(amount, 0.0))
        self.held: Floats = levels[first]
        self.rise: Floats = np.add.reduceat(takes, first) if len(first) else takes[:0]
        self.change: Floats = levels[last] - self.held

    def _fits(self, index: int, later: int, start: float) -> bool:
        """Whether a later step could run before step `index`, from a time on, within the rank's
        peak.
        """
        peak = self.peak * (1 + ROUNDING)
        kept = self.kept.most(start, start + self.lengths[later])
        if self.held[index] + kept + self.rise[later] > peak:
            return False
        more = self.change[later]
        # What it leaves lies there until its own place in the order, so all steps up to that hold
        # more.
        between = slice(index, later)
        return bool(more <= 0 or (self.highest[between] + more <= peak).all())


class _Kept:
    """What a rank keeps for others over time: from the begin of their offloads to the end of their
    reloads.
    """

    def __init__(self, waits: Waits, rank: int, amounts: Amounts) -> None:
        columns = waits.schedule.columns
        copies = np.arange(waits.first[-1], len(waits.head))
        head = waits.head[copies]
        kind = columns.kind[head]
        is_kept = np.isin(waits.rank[copies], waits.schedule.layout.kept_by(rank))
        is_kept &= is_any(kind, *AWAY, *BACK)
        copies = copies[is_kept]
        head = head[is_kept]
        kind = kind[is_kept]
        # What another rank gives away, this one takes.
        amount = -amounts.of(kind, columns.stage[head], columns.microbatch[head])
        time = np.where(is_any(kind, *AWAY), waits.starts[copies], waits.ends[copies])
        order = np.lexsort((amount, time))
        self.times: list[float] = time[order].tolist()
        self.levels: list[float] = [0.0, *np.cumsum(amount[order]).tolist()]

    def most(self, start: float, end: float) -> float:
        """The most between two times."""
        first = bisect_right(self.times, start)
        return max(self.levels[first : max(first, bisect_left(self.times, end)) + 1])


def _steps_with(first: Ints, ops: Ints) -> Ints:
    """The steps that some ops are of."""
    return np.searchsorted(first, ops, "right") - 1
