"""The communication of a schedule without a flush, and the part of it that repeats."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import numpy as np
from attrs import evolve

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label
from schedlang.lowering import lower
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.columns import Columns, Ints, actions_of, columns_of, counts_of
from schedlang.schedule.periods import repeat, steps_of
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.stream import unroll

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
        # As many as can be left out first: what remains to be checked is whether lowering fewer
        # updates gives the same rows as leaving kernels out of more.
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
    for actions in (schedule.stream.warmup, schedule.stream.steady):
        columns = columns_of(actions)
        of_update = steps[columns.kind, columns.stage]
        ahead = max(ahead, int((columns.microbatch // of_update).max(initial=0)))
    return min(max(2 * ahead, _FEWEST_UPDATES), _MOST_UPDATES)


def _kernels(longest: Schedule) -> tuple[tuple[Kernel, ...], int]:
    """What repeats on each rank, the first time; and how often it could be left out."""
    updates = longest.layout.updates
    columns = longest.columns
    steps = steps_of(longest.layout)
    # An update in the middle is in the steady state, if any is: what a rank does of it is as long
    # as what it does again and again.
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
    """By how many updates a schedule can be shorter, up to the most, for the ranks to hold as many
    versions of their weights as with one update more.
    """
    # Transfers have no part in this.
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


def _again(columns: Columns, length: Ints, steps: Ints) -> tuple[Ints, Ints]:
    """Of each rank the longest stretch of rows that all come again `length` of that rank later, for
    the next update: the first row, and the one behind the last.
    """
    next_microbatch = columns.microbatch + steps[columns.kind, columns.stage]
    next_update = evolve(columns, microbatch=next_microbatch)
    # For each row, the one that stands one kernel behind it, if its rank has that many.
    again = np.arange(len(columns)) + length[columns.rank]
    is_again = again < columns.first[1:][columns.rank]
    again = again[is_again]
    here = np.flatnonzero(is_again)
    for name in ("kind", "stage", "microbatch", "group", "source"):
        is_again[here] &= (
            getattr(next_update, name)[here] == getattr(columns, name)[again]
        )
    # The last rows of a rank do not come again, so no stretch goes beyond it.
    stops = np.flatnonzero(~is_again)
    lengths = np.diff(stops, prepend=-1) - 1
    rank = columns.rank[stops]
    order = np.lexsort((stops, -lengths, rank))
    longest = order[np.diff(rank[order], prepend=-1) != 0]
    return stops[longest] - lengths[longest], stops[longest]
