"""Schedules without a flush: what each rank does before, in, and after the updates, for any number of them.

A program gives the ops before the first update (`warmup`) and those of one update (`steady`), with microbatches counted
from the update's first; a number beyond its microbatches belongs to a later update. The drain follows: it is the same
list without the microbatches of updates that do not come.
"""

from collections.abc import Callable
from itertools import count
from typing import TypeVar

from attrs import evolve

from schedlang.actions import Actions
from schedlang.diagnostics import CompileError, Diagnostic, Label
from schedlang.kinds import Kind
from schedlang.layout import Layout
from schedlang.lowering import lower
from schedlang.schedule import Kernel, Schedule
from schedlang.versions import follow_weights

S = TypeVar("S", bound=Schedule)
Row = tuple[int, int, int, int, int]
_MOST_UPDATES = 256


def unroll(schedule: Schedule, updates: int) -> Schedule:
    """The schedule of a stream for some number of updates, as one list per rank."""
    assert schedule.stream is not None
    layout = _for_updates(schedule.layout, updates)
    ranks = []
    for warmup, steady in zip(schedule.stream.warmup, schedule.stream.steady, strict=True):
        actions = Actions()
        rows = [*_rows(warmup), *(row for update in range(updates) for row in _later(_rows(steady), update, layout))]
        for row in rows:
            if row[0] == Kind.U or row[2] < layout.units(row[1]):
                actions.add(*row)
        ranks.append(actions)
    return evolve(schedule, layout=layout, ranks=tuple(ranks), stream=None)


def lower_stream(
    schedule: Schedule, lowering: Callable[[Schedule], Schedule] = lower
) -> tuple[Schedule, tuple[Kernel, ...]]:
    """A stream with its communication, for the fewest updates that show it whole; and the part that repeats, per rank.

    Lowering is done for some updates, and for one and for two more. Where each list is the one before with the same
    rows inserted once more, the execution has come back to the same state, and goes on so for any number of updates.
    By then the ranks hold as many versions of their weights as they ever will.
    """
    for updates in count(2):
        if updates > _MOST_UPDATES:
            break
        small, large, larger = (lowering(unroll(schedule, updates + more)) for more in range(3))
        kernels = [_kernel(a, b, large.layout) for a, b in zip(small.ranks, large.ranks, strict=True)]
        found = tuple(kernel for kernel in kernels if kernel is not None)
        settled = follow_weights(large).held == follow_weights(larger).held
        if settled and len(found) == len(kernels) and repeat(large, found, 1).ranks == larger.ranks:
            return large, found
    place = Label(schedule.spans[0])
    message = f"the schedule does not repeat itself within {_MOST_UPDATES} updates"
    raise CompileError([Diagnostic("steady", message, (place,), schedule.source)])


def repeat(schedule: S, kernels: tuple[Kernel, ...], times: int) -> S:
    """The schedule with the repeating part of every rank some more times."""
    ranks = []
    for actions, kernel in zip(schedule.ranks, kernels, strict=True):
        rows, longer = _rows(actions), Actions()
        body = rows[kernel.start : kernel.stop]
        parts = [rows[: kernel.stop], *(_later(body, more, schedule.layout) for more in range(1, times + 1))]
        for row in [*(row for part in parts for row in part), *_later(rows[kernel.stop :], times, schedule.layout)]:
            longer.add(*row)
        ranks.append(longer)
    return evolve(schedule, layout=_for_updates(schedule.layout, schedule.layout.updates + times), ranks=tuple(ranks))


def _for_updates(layout: Layout, updates: int) -> Layout:
    pipelines = tuple(
        evolve(pipeline, microbatches=pipeline.microbatches // layout.updates * updates)
        for pipeline in layout.pipelines
    )
    return evolve(layout, pipelines=pipelines, updates=updates)


def _rows(actions: Actions) -> list[Row]:
    return [actions.row(index) for index in range(len(actions))]


def _later(rows: list[Row], updates: int, layout: Layout) -> list[Row]:
    """Rows of some updates later."""
    later = []
    for kind, number, microbatch, place, group in rows:
        step = 1 if kind == Kind.U else layout.units(layout.stage_of(kind, number)) // layout.updates
        later.append((kind, number, microbatch + updates * step, place, group))
    return later


def _kernel(small: Actions, large: Actions, layout: Layout) -> Kernel | None:
    """The rows of `large` that it has more than `small`, with all behind them one update later."""
    shorter, longer = _rows(small), _rows(large)
    inserted = len(longer) - len(shorter)
    shifted = _later(shorter, 1, layout)
    start = len(shorter)
    while start and shifted[start - 1] == longer[start - 1 + inserted]:
        start -= 1
    if shorter[:start] != longer[:start]:
        return None
    return Kernel(start, start + inserted)
