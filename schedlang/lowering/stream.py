"""The communication of a schedule without a flush, and the part of it that repeats."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import numpy as np

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label
from schedlang.lowering import lower
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.columns import Ints, table_of
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.stream import later, repeat, steps_of, unroll

#: Of fewer, each is the first or the last.
_FEWEST_UPDATES = 3
_MOST_UPDATES = 256


def lower_stream(
    schedule: Schedule, lowering: Callable[[Schedule], Schedule] = lower
) -> tuple[Schedule, tuple[Kernel, ...]]:
    """A stream with its communication, for the fewest updates that show it whole; and the part that
    repeats, per rank.

    Lowering is done for some more updates. Where each list then has some of its rows again, one
    update later, right behind themselves, the execution has come back to the same state, and goes
    on so for any number of updates. These rows are left out as often as that makes no difference:
    as lowering for fewer updates does without them, and by the end of these the ranks have held as
    many versions of their weights as they ever will.
    """
    updates = _guess(schedule)
    while True:
        # One more than are shown, so that there is something that is repeated.
        longest = lowering(unroll(schedule, updates + 1))
        kernels, most = _kernels(longest)
        for by in range(_fewer(longest, kernels, most), 0, -1):
            shorter = lowering(unroll(schedule, updates + 1 - by))
            if shorter.ranks == repeat(longest, kernels, -by).ranks:
                return shorter, kernels
        if updates == _MOST_UPDATES:
            break
        updates = min(2 * updates, _MOST_UPDATES)
    place = Label(schedule.spans[0])
    message = f"the schedule does not repeat itself within {_MOST_UPDATES} updates"
    raise CompileError([Diagnostic("steady", message, (place,), schedule.source)])


def _guess(schedule: Schedule) -> int:
    """How many updates are likely to show a stream whole: as many as forwards run ahead before the
    first update, and again after the last one, when they are missing.
    """
    assert schedule.stream is not None
    steps = steps_of(schedule.layout)
    ahead = 0
    for actions in (*schedule.stream.warmup, *schedule.stream.steady):
        kind, stage, microbatch, *_ = table_of(actions)
        ahead = max(ahead, int((microbatch // steps[kind, stage]).max(initial=0)))
    return min(max(2 * ahead, _FEWEST_UPDATES), _MOST_UPDATES)


def _kernels(longest: Schedule) -> tuple[tuple[Kernel, ...], int]:
    """What repeats on each rank, the first time; and how often it could be left out."""
    updates = longest.layout.updates
    steps = steps_of(longest.layout)
    kernels = []
    most = updates - _FEWEST_UPDATES
    for actions in longest.ranks:
        table = table_of(actions)
        kind, number, microbatch, *_ = table
        length = int(np.count_nonzero(microbatch // steps[kind, number] == updates // 2))
        again = _again(table, length, steps)
        kernels.append(Kernel(again.start, again.start + length))
        most = min(most, len(again) // length)
    return tuple(kernels), most


def _fewer(longest: Schedule, kernels: tuple[Kernel, ...], most: int) -> int:
    """By how many updates a schedule can be shorter, up to the most, for the ranks to hold as many
    versions of their weights as with one update more.
    """

    @cache
    def held(by: int) -> tuple[int, ...]:
        return follow_weights(repeat(longest, kernels, -by) if by else longest).held

    return _last(lambda by: held(by) == held(by - 1), most)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The last number from 1 up to the most for which something holds that holds for all before; 0
    if for none. It is looked for in steps that double.
    """
    last = 0
    step = 1
    while last + step <= most and holds(last + step):
        last += step
        step *= 2
    between = range(last + 1, min(last + step, most + 1))
    return last + bisect_left(between, True, key=lambda number: not holds(number))


def _again(table: Ints, length: int, steps: Ints) -> range:
    """The longest stretch of rows that all come again so many rows later, for the next update."""
    is_again = (later(table[:, :-length], 1, steps) == table[:, length:]).all(axis=0)
    stops = np.flatnonzero(np.append(~is_again, True))
    lengths = np.diff(stops, prepend=-1) - 1
    longest = int(lengths.argmax())
    stop = int(stops[longest])
    return range(stop - int(lengths[longest]), stop)
