"""What frozen stages leave out: a program says what every stage does, and a frozen one does of it
what there is to do.

    stage               trained          frozen, behind a trained one     frozen, behind none
    forward             F                F                                F
    whole backward      B                I                                (I)
    in two halves       I, W             I                                (I)
    forward again       R                R
    copies              offload, reload  offload, reload
    exchanges           exchange F and B exchange F and B                 exchange F
    optimizer step      U
    gathers of weights  unshard, reshard  unshard, reshard               unshard, reshard
    sums of gradients   reduce

A backward in brackets does nothing and takes no time. It is there until transfers are placed, since
it says how many forwards a stage is to be ahead: without it, the first stages would send all that
they make at once, and the next ones would have to keep it.
"""

import numpy as np
from attrs import evolve

from schedlang.schedule.arrays import Flags, Ints
from schedlang.schedule.columns import Columns
from schedlang.schedule.kinds import (
    GATHERS,
    INPUT_HALVES,
    MAKERS,
    OPS,
    RECEIVES,
    ROWS,
    SENDS,
    STEPS,
    SUMS,
    Kind,
    kinds_of,
)
from schedlang.schedule.layout import Layout

#: What a stage does not do whose weights do not change; and what of it is left of a backward.
_OF_WEIGHTS = (Kind.W, *STEPS, *SUMS)
(_LEFT,) = INPUT_HALVES
#: What it does all the same: its forward needs its weights, and what is done before it.
_OF_ALL = (Kind.F, *GATHERS, *kinds_of(lambda op: Kind.F in op.before))
#: No kind.
NOTHING = 0


def runs_as(layout: Layout) -> Ints:
    """For each kind of op, and each number of a stage or a skip, the kind as which a program's op
    runs there: another one, or NOTHING. Transfers stay as they are.
    """
    table: Ints = np.repeat(
        np.arange(ROWS)[:, np.newaxis], len(layout.all_numbers), axis=1
    )
    for stage in range(len(layout.placement)):
        if layout.trains(stage):
            continue
        for kind in OPS.keys() - {*_OF_ALL}:
            if kind in MAKERS[Kind.B]:
                table[kind, stage] = _LEFT
            elif kind in _OF_WEIGHTS or not layout.has_backward[stage]:
                table[kind, stage] = NOTHING
    return table


def in_use(columns: Columns, layout: Layout) -> Columns:
    """The ops of a program, without those that frozen stages do not have."""
    kind = runs_as(layout)[columns.kind, columns.stage]
    there = np.flatnonzero(kind != NOTHING)
    return _alone(evolve(columns, kind=kind.astype(columns.kind.dtype)).taken(there))


def is_idle(layout: Layout) -> Flags:
    """Of each kind of action and number, whether it is a backward that does nothing, or a transfer
    of gradients to where none is needed.
    """
    table = np.zeros((ROWS, len(layout.all_numbers)), bool)
    for stage, has_backward in enumerate(layout.has_backward):
        table[_LEFT, stage] = not has_backward
    for kind in (SENDS[Kind.B], RECEIVES[Kind.B]):
        for number in layout.all_numbers:
            table[kind, number] = not layout.needs_gradients(kind, number)
    return table


def without_idle(columns: Columns, layout: Layout) -> Columns:
    """Actions without those that do nothing."""
    return _alone(
        columns.taken(np.flatnonzero(~is_idle(layout)[columns.kind, columns.stage]))
    )


def _alone(left: Columns) -> Columns:
    """What was to be issued together with what is left out is issued alone."""
    return evolve(left, group=np.where(left.sizes > 1, left.group, 0))
