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
from schedlang.schedule.stream import later, steps_of, unroll

#: Of fewer, each is the first or the last.
_FEWEST_UPDATES = 3
_MOST_UPDATES = 256


def lower_stream(
    schedule: Schedule, lowering: Callable[[Schedule], Schedule] = lower
) -> tuple[Schedule, tuple[Kernel, ...]]:
    """A stream with its communication, for the fewest updates that show it whole; and the part that
    repeats, per rank.

    Lowering is done for some updates, and for one more. Where each list then has some of its rows
    once more, right behind themselves, the execution has come back to the same state, and goes on
    so for any number of updates. By then the ranks hold as many versions of their weights as they
    ever will.
    """

    @cache
    def lowered(updates: int) -> Schedule:
        return lowering(unroll(schedule, updates))

    @cache
    def kernels(updates: int) -> tuple[Kernel, ...] | None:
        return _kernels(lowered(updates), lowered(updates + 1))

    updates = _first(lambda number: kernels(number) is not None, _guess(schedule))
    found = kernels(updates) if updates <= _MOST_UPDATES else None
    if found is not None:
        return lowered(updates), found
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


def _first(holds: Callable[[int], bool], guess: int) -> int:
    """The fewest updates for which something holds that then holds for more as well; or one more
    than the most. It is looked for from a guess on, in steps that double.
    """
    step = 1
    if holds(guess):
        low = _FEWEST_UPDATES - 1
        high = guess
        while high - step > low and holds(high - step):
            high -= step
            step *= 2
        low = max(low, high - step)
    else:
        low = guess
        high = _MOST_UPDATES + 1
        while low + step < high and not holds(low + step):
            low += step
            step *= 2
        high = min(low + step, high)
    between = range(low + 1, high)
    return low + 1 + bisect_left(between, True, key=holds)


def _kernels(shorter: Schedule, longer: Schedule) -> tuple[Kernel, ...] | None:
    """The rows of each rank that it has once more in the schedule of one more update; nothing if
    that is not all that is different.
    """
    steps = steps_of(longer.layout)
    kernels = []
    for short, long in zip(shorter.ranks, longer.ranks, strict=True):
        kernel = _kernel(table_of(short), table_of(long), steps)
        if kernel is None:
            return None
        kernels.append(kernel)
    if follow_weights(shorter).held != follow_weights(longer).held:
        return None
    return tuple(kernels)


def _kernel(shorter: Ints, longer: Ints, steps: Ints) -> Kernel | None:
    """The rows that the longer list has once more, with all from there on one update later."""
    inserted = longer.shape[1] - shorter.shape[1]
    if inserted < 0:
        return None
    # What comes one update later begins as early as possible.
    is_later = (later(shorter, 1, steps) == longer[:, inserted:]).all(axis=0)
    start = int(np.flatnonzero(~is_later).max(initial=-1)) + 1
    stop = start + inserted
    is_there = stop <= shorter.shape[1] and np.array_equal(shorter[:, :stop], longer[:, :stop])
    return Kernel(start, stop) if is_there else None
