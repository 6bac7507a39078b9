"""What a rank holds over time."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush, merge
from math import inf

from attrs import define, field

from schedlang.proof.columnwise import is_large
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Timeline

#: What each kind of op adds to the memory of its rank, on each stage.
Amounts = Mapping[int, Sequence[float]]


@define
class Level:
    """What a rank holds now, and the most it has held; amounts are taken and given back in order of
    time.

    `steps` has what it holds from each time on when that changes, in order of time.
    """

    now: float = 0.0
    peak: float = 0.0
    steps: list[tuple[float, float]] = field(factory=list)
    #: What will be taken or given back, as (time, amount); of one time, what is given back comes
    #: first.
    _later: list[tuple[float, float]] = field(factory=list)

    def change(self, time: float, amount: float) -> None:
        """Let an amount be taken, or given back where it is negative, at a time from now on."""
        heappush(self._later, (time, amount))

    def hold(self, start: float, amount: float) -> None:
        """Take an amount at a time, and give it back at once: it counts for the peak only."""
        self.advance(start)
        self.peak = max(self.peak, self.now + amount)
        self.steps += (start, self.now + amount), (start, self.now)

    def run(self, begin: float, end: float, amount: float, stays: bool) -> None:
        """Run an op: what it takes, it takes as it begins, what it gives back, as it ends; or it
        holds it meanwhile.
        """
        if not stays:
            self.hold(begin, amount)
        else:
            self.change(begin if amount > 0 else end, amount)

    def advance(self, time: float = inf) -> None:
        """Let time go on, by default to the end."""
        while self._later and self._later[0][0] <= time:
            at, amount = heappop(self._later)
            self.now += amount
            self.peak = max(self.peak, self.now)
            self.steps.append((at, self.now))


def levels(
    schedule: Schedule, timeline: Timeline, amounts: Amounts, first: Sequence[float] = ()
) -> list[Level]:
    """What each rank holds over time, where it held some amount at `first`, by default nothing."""
    return [
        _level(schedule, timeline, rank, amounts, first[rank] if first else 0.0)
        for rank in _ranks(timeline)
    ]


def peaks(
    schedule: Schedule, timeline: Timeline, amounts: Amounts, first: Sequence[float] = ()
) -> tuple[float, ...]:
    """The most that each rank holds, as `levels` has it."""
    found = None
    # Of ops that stay and take time, one after the other, a running sum is enough.
    if is_large(schedule) and not (
        any(timeline.copies) or schedule.recomputed or schedule.is_forward_only
    ):
        from schedlang.proof.columnwise import memory

        found = memory.peaks(timeline, amounts, first or [0.0] * len(timeline.ranks))
    return found or tuple(level.peak for level in levels(schedule, timeline, amounts, first))


def _ranks(timeline: Timeline) -> range:
    return range(len(timeline.ranks))


def _level(
    schedule: Schedule, timeline: Timeline, rank: int, amounts: Amounts, first: float
) -> Level:
    level = Level(first, first)
    copies = timeline.copies[rank] if timeline.copies else ()
    # An op that starts together with a copy was issued after it.
    for kind, stage, microbatch, begin, end in merge(
        copies, timeline.ranks[rank], key=lambda bar: bar.start
    ):
        level.advance(begin)
        level.run(begin, end, amounts[kind][stage], schedule.keeps(kind, stage, microbatch))
    level.advance()
    return level
