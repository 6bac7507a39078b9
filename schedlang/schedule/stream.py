"""Schedules without a flush: what each rank does before, in, and after the updates, for any number
of them.

A program gives the ops before the first update (`warmup`) and those of one update (`steady`), with
microbatches counted from the update's first; a number beyond its microbatches belongs to a later
update. The drain follows: it is the same list without the microbatches of updates that do not come.
"""

import numpy as np
from attrs import evolve

from schedlang.schedule.columns import actions_of, columns_of, joined
from schedlang.schedule.periods import microbatches_of_update, repeat
from schedlang.schedule.schedule import Kernel, Schedule


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
    stream = schedule.stream
    assert stream is not None
    layout = schedule.layout
    each = zip(layout.pipelines, microbatches_of_update(layout), strict=True)
    pipelines = tuple(
        evolve(pipeline, microbatches=number) for pipeline, number in each
    )
    columns = joined([columns_of(stream.warmup), columns_of(stream.steady)])
    in_ranks = columns.taken(np.argsort(columns.rank, kind="stable"))
    first = evolve(
        schedule,
        layout=evolve(layout, pipelines=pipelines, updates=1),
        ranks=actions_of(len(schedule.ranks), in_ranks),
        stream=None,
    )
    lengths = zip(map(len, stream.warmup), map(len, stream.steady), strict=True)
    kernels = tuple(Kernel(before, before + steady) for before, steady in lengths)
    whole = repeat(first, kernels, updates - 1)
    columns = whole.columns
    units = np.array(list(map(whole.layout.units, range(len(layout.placement)))))
    comes = columns.is_update | (columns.microbatch < units[columns.stage])
    ranks = actions_of(len(schedule.ranks), columns.taken(np.flatnonzero(comes)))
    return evolve(whole, ranks=ranks)
