"""Lower a schedule without a flush, and find the part of it that repeats with every update."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import numpy as np
from attrs import evolve

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label
from schedlang.lowering import lower
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.arrays import Ints, counts_of
from schedlang.schedule.columns import Columns, actions_of, columns_of
from schedlang.schedule.periods import repeat, steps_of
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.stream import unroll

#: With fewer updates, each is the first one or the last one.
_FEWEST_UPDATES = 3
_MOST_UPDATES = 256


def lower_stream(
    schedule: Schedule, lowering: Callable[[Schedule], Schedule] = lower
) -> tuple[Schedule, tuple[Kernel, ...]]:
    """A stream with its communication, for as few updates as show all of it; and for each rank its
    kernel, the part that repeats.

    A longer stream is lowered. If every rank has rows that directly follow themselves, one update
    later, the execution has come back to the same state, and continues so for any number of
    updates. Then repetitions are dropped as long as lowering fewer updates gives the same rows, and
    the ranks still hold as many versions of their weights as they ever will.
    """
    updates = _guess(schedule)
    while True:
        # One update more than the result has, so that some part of it is repeated.
        longest = lowering(unroll(schedule, updates + 1))
        kernels, most = _kernels(longest)
        # Drop as many repetitions as possible, if lowering fewer updates gives the same rows.
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
    """A guess of the number of updates that show all of a stream: the number by which forwards run
    ahead, once for the beginning and once for the end.
    """
    assert schedule.stream is not None
    steps = steps_of(schedule.layout)
    ahead = 0
    for actions in (schedule.stream.warmup, schedule.stream.steady):
        columns = columns_of(actions)
        of_update = steps[columns.kind, columns.stage]
        ahead = max(ahead, int((columns.microbatch // of_update).max(initial=0)))
    return min(max(2 * ahead, _FEWEST_UPDATES), _MOST_UPDATES)


def _kernels(longest: Schedule) -> tuple[tuple[Kernel, ...], int]:
    """The kernel of each rank, where it runs first; and how many repetitions could be dropped."""
    updates = longest.layout.updates
    columns = longest.columns
    steps = steps_of(longest.layout)
    # The update in the middle is in the steady state, if any is. So a rank's kernel has as many
    # rows as the rank has of that update.
    update = columns.microbatch // steps[columns.kind, columns.stage]
    length = counts_of(
        columns.rank[update == updates // 2], minlength=len(longest.ranks)
    )
    first, last = _again(columns, length, steps)
    start = first - columns.first[:-1]
    kernels = map(Kernel, start.tolist(), (start + length).tolist())
    most = min(updates - _FEWEST_UPDATES, int(((last - first) // length).min()))
    return tuple(kernels), most


def _fewer(longest: Schedule, kernels: tuple[Kernel, ...], most: int) -> int:
    """The number of updates, at most `most`, that can be dropped without a change in the number of
    weight versions that the ranks hold.
    """
    # Transfers do not matter for weights.
    columns = longest.columns
    is_op = ~columns.is_transfer
    ops_before = np.append(0, np.cumsum(is_op))
    first = columns.first[:-1]
    bounds = np.array([(kernel.start, kernel.stop) for kernel in kernels]).T + first
    # The kernels once more, counted in ops alone. If `s` is a send and `r` a receive:
    #
    #    rank 0      F0 s F1 s r B0 [F2 s r B1] …      kernel  6 to 10
    #    its ops     F0   F1     B0 [F2     B1] …      kernel  3 to 5
    of_ops = (ops_before[bounds] - ops_before[first]).T.tolist()
    kernels = tuple(Kernel(start, stop) for start, stop in of_ops)
    ranks = actions_of(len(kernels), columns.taken(np.flatnonzero(is_op)))
    ops = evolve(longest, ranks=ranks)

    @cache
    def held(by: int) -> tuple[int, ...]:
        return follow_weights(repeat(ops, kernels, -by) if by else ops).held

    return _last(lambda by: held(by) == held(by - 1), most)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The last number up to `most` before the first one, from 1 on, for which `holds` is false;
    found by galloping search.
    """
    last = 0
    step = 1
    while last + step <= most and holds(last + step):
        last += step
        step *= 2
    between = range(last + 1, min(last + step, most + 1))
    return last + bisect_left(between, True, key=lambda number: not holds(number))


def _again(columns: Columns, length: Ints, steps: Ints) -> tuple[Ints, Ints]:
    """For each rank, the longest stretch of rows that all occur again `length` rows later, for the
    next update: its first row, and the row after its last.
    """
    next_microbatch = columns.microbatch + steps[columns.kind, columns.stage]
    next_update = evolve(columns, microbatch=next_microbatch)
    # For each row, the row one kernel later, if the rank has that many rows.
    again = np.arange(len(columns)) + length[columns.rank]
    is_again = again < columns.first[1:][columns.rank]
    again = again[is_again]
    here = np.flatnonzero(is_again)
    for name in ("kind", "stage", "microbatch", "group", "source"):
        is_again[here] &= (
            getattr(next_update, name)[here] == getattr(columns, name)[again]
        )
    # The last rows of a rank do not occur again, so no stretch goes beyond its rank.
    stops = np.flatnonzero(~is_again)
    lengths = np.diff(stops, prepend=-1) - 1
    rank = columns.rank[stops]
    order = np.lexsort((stops, -lengths, rank))
    longest = order[np.diff(rank[order], prepend=-1) != 0]
    return stops[longest] - lengths[longest], stops[longest]
