"""Schedules without a flush: what each rank does before, in, and after the updates, for any number
of them.

A program gives the ops before the first update (`warmup`) and those of one update (`steady`), with
microbatches counted from the update's first; a number beyond its microbatches belongs to a later
update. The drain follows: it is the same list without the microbatches of updates that do not come.
"""

from itertools import product
from typing import TypeVar

import numpy as np
from attrs import evolve

from schedlang.schedule.columns import Columns, Ints, actions_of, columns_of, joined
from schedlang.schedule.kinds import ROWS, STEPS, TRANSFERS
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Kernel, Schedule

S = TypeVar("S", bound=Schedule)
_NO_ROWS = np.zeros(0, np.int64)


def unroll(schedule: Schedule, updates: int) -> Schedule:
    """The schedule of a stream for some number of updates, as one list per rank."""
    # With two microbatches an update, and one forward ahead, of three updates:
    #
    #     warmup    F0
    #     steady       F1 B0  F2 B1  U
    #     + 1                           F3 B2  F4 B3  U
    #     + 2                                            F5 B4  F6 B5  U
    #
    # F6 is of an update that does not come: the drain leaves it out.
    assert schedule.stream is not None
    layout = _for_updates(schedule.layout, updates)
    steps = steps_of(layout)
    warmup = columns_of(schedule.stream.warmup)
    steady = columns_of(schedule.stream.steady)
    of_steady = np.arange(len(steady)) + len(warmup)
    columns = _repeated(
        joined([warmup, steady]),
        np.arange(len(warmup)),
        of_steady,
        range(updates),
        steps,
    )
    units = np.array([layout.units(stage) for stage in range(len(layout.placement))])
    comes = columns.is_update | (columns.microbatch < units[columns.stage])
    ranks = actions_of(len(schedule.ranks), columns.taken(np.flatnonzero(comes)))
    return evolve(schedule, layout=layout, ranks=ranks, stream=None)


def repeat(schedule: S, kernels: tuple[Kernel, ...], times: int) -> S:
    """The schedule with the repeating part of every rank some more times; or some times less, where
    it has been repeated as often.
    """
    columns = schedule.columns
    place = np.arange(len(columns)) - columns.first[columns.rank]
    start = np.array([kernel.start for kernel in kernels])[columns.rank]
    stop = np.array([kernel.stop for kernel in kernels])[columns.rank]
    left_out = max(-times, 0) * (stop - start)
    is_before = place < stop
    before = np.flatnonzero(is_before)
    kernel = np.flatnonzero(is_before & (place >= start))
    rest = np.flatnonzero(place >= stop + left_out)
    steps = steps_of(schedule.layout)
    repeated = _repeated(
        columns, before, kernel, range(1, times + 1), steps, rest, times
    )
    layout = _for_updates(schedule.layout, schedule.layout.updates + times)
    return evolve(
        schedule, layout=layout, ranks=actions_of(len(schedule.ranks), repeated)
    )


def _for_updates(layout: Layout, updates: int) -> Layout:
    """The layout with as many microbatches for each update, and another number of updates."""
    pipelines = tuple(
        evolve(pipeline, microbatches=pipeline.microbatches // layout.updates * updates)
        for pipeline in layout.pipelines
    )
    return evolve(layout, pipelines=pipelines, updates=updates)


def steps_of(layout: Layout) -> Ints:
    """By kind and number of an action, by how much its microbatch grows from one update to the
    next.
    """
    # An optimizer step has the number of its update, which grows by one.
    steps = np.ones((ROWS, len(layout.all_numbers)), np.int64)
    stages = range(len(layout.placement))
    steps[:, : len(stages)] = [layout.units_of_update(stage) for stage in stages]
    steps[[*STEPS]] = 1
    # Only transfers have the numbers of skips.
    for kind, number in product(TRANSFERS, layout.far_edges):
        steps[kind, number] = layout.units_of_update(layout.stage_of(kind, number))
    return steps


def _repeated(
    columns: Columns,
    before: Ints,
    kernel: Ints,
    updates: range,
    steps: Ints,
    rest: Ints = _NO_ROWS,
    of_rest: int = 0,
) -> Columns:
    """Of each rank some rows as they are, then those of its kernel once for each of some updates,
    and the rest so many updates later.
    """
    rows = np.concatenate([before, np.tile(kernel, len(updates)), rest])
    lengths = [len(before), *[len(kernel)] * len(updates), len(rest)]
    moved = np.repeat([0, *updates, of_rest], lengths)
    order = np.argsort(columns.rank[rows], kind="stable")
    return later(columns.taken(rows[order]), moved[order], steps)


def later(columns: Columns, updates: Ints | int, steps: Ints) -> Columns:
    """Actions some updates later; `steps` are those of their layout."""
    step = steps[columns.kind, columns.stage]
    return evolve(columns, microbatch=columns.microbatch + updates * step)
