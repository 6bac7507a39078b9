"""The communication of a schedule without a flush, and the part of it that repeats."""

from collections.abc import Callable

import numpy as np

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label
from schedlang.lowering import lower
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.actions import Actions
from schedlang.schedule.columns import Ints, table_of
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.stream import later, repeat, steps_of, unroll

_MOST_UPDATES = 256


def lower_stream(
    schedule: Schedule, lowering: Callable[[Schedule], Schedule] = lower
) -> tuple[Schedule, tuple[Kernel, ...]]:
    """A stream with its communication, for the fewest updates that show it whole; and the part that
    repeats, per rank.

    Lowering is done for some updates, and for one and for two more. Where each list is the one
    before with the same rows inserted once more, the execution has come back to the same state, and
    goes on so for any number of updates. By then the ranks hold as many versions of their weights
    as they ever will.
    """
    # The rows of a rank for two updates, for three, and for four; `inserted` is the kernel:
    #
    #     small     A B C
    #     large     A B [inserted] C, one update later
    #     larger    A B [inserted] [inserted, one update later] C, two updates later
    small = lowering(unroll(schedule, 2))
    large = lowering(unroll(schedule, 3))
    for updates in range(4, _MOST_UPDATES + 3):
        larger = lowering(unroll(schedule, updates))
        steps = steps_of(large.layout)
        kernels = [_kernel(a, b, steps) for a, b in zip(small.ranks, large.ranks, strict=True)]
        known = tuple(kernel for kernel in kernels if kernel is not None)
        if (
            len(known) == len(kernels)
            and repeat(large, known, 1).ranks == larger.ranks
            and follow_weights(large).held == follow_weights(larger).held
        ):
            return large, known
        small = large
        large = larger
    place = Label(schedule.spans[0])
    message = f"the schedule does not repeat itself within {_MOST_UPDATES} updates"
    raise CompileError([Diagnostic("steady", message, (place,), schedule.source)])


def _kernel(small: Actions, large: Actions, steps: Ints) -> Kernel | None:
    """The rows of `large` that it has more than `small`, with all behind them one update later."""
    shorter = table_of(small)
    longer = table_of(large)
    inserted = len(large) - len(small)
    if inserted < 0:
        return None
    shifted = later(shorter, 1, steps)
    # What stands behind the inserted rows is as long as possible.
    differs = np.flatnonzero((shifted != longer[:, inserted:]).any(axis=0))
    start = int(differs[-1]) + 1 if len(differs) else 0
    if not np.array_equal(shorter[:, :start], longer[:, :start]):
        return None
    return Kernel(start, start + inserted)
