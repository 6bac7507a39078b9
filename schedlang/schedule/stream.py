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

from schedlang.schedule.columns import Ints, actions_from, table_of
from schedlang.schedule.kinds import ROWS, TRANSFERS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Kernel, Schedule

S = TypeVar("S", bound=Schedule)


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
    units = np.array([layout.units(stage) for stage in range(len(layout.placement))])
    steps = steps_of(layout)
    ranks = []
    for warmup, steady in zip(schedule.stream.warmup, schedule.stream.steady, strict=True):
        of_updates = _repeated(table_of(steady), range(updates), steps)
        table = np.concatenate([table_of(warmup), of_updates], axis=1)
        kind, stage, microbatch = table[:3]
        comes = (kind == Kind.U) | (microbatch < units[stage])
        ranks.append(actions_from(table[:, comes]))
    return evolve(schedule, layout=layout, ranks=tuple(ranks), stream=None)


def repeat(schedule: S, kernels: tuple[Kernel, ...], times: int) -> S:
    """The schedule with the repeating part of every rank some more times; or some times less, where
    it has been repeated as often.
    """
    steps = steps_of(schedule.layout)
    ranks = []
    for actions, kernel in zip(schedule.ranks, kernels, strict=True):
        table = table_of(actions)
        before = table[:, : kernel.stop]
        more = _repeated(table[:, kernel.start : kernel.stop], range(1, times + 1), steps)
        left_out = max(-times, 0) * (kernel.stop - kernel.start)
        rest = later(table[:, kernel.stop + left_out :], times, steps)
        ranks.append(actions_from(np.concatenate([before, more, rest], axis=1)))
    layout = _for_updates(schedule.layout, schedule.layout.updates + times)
    return evolve(schedule, layout=layout, ranks=tuple(ranks))


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
    steps[Kind.U] = 1
    # Only transfers have the numbers of skips.
    for kind, number in product(TRANSFERS, layout.skip_stages):
        steps[kind, number] = layout.units_of_update(layout.stage_of(kind, number))
    return steps


def _repeated(table: Ints, updates: range, steps: Ints) -> Ints:
    """Actions, as a table, once for each of some updates."""
    kind, number, microbatch, *_ = table
    by_updates = np.outer(np.array(updates, np.int64), steps[kind, number])
    repeated = np.tile(table, len(updates))
    repeated[2] = (microbatch + by_updates).ravel()
    return repeated


def later(table: Ints, updates: int, steps: Ints) -> Ints:
    """Actions, as a table, some updates later; `steps` are those of their layout."""
    kind, number, *_ = table
    shifted = table.copy()
    shifted[2] += updates * steps[kind, number]
    return shifted
