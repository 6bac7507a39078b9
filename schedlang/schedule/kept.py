"""Whether the memory that ops add stays after them.

The memory of a forward does not stay if no backward needs it, or if the forward is recomputed.
"""

import numpy as np

from schedlang.schedule.arrays import Flags, Ints
from schedlang.schedule.kinds import REPEATS, Kind
from schedlang.schedule.schedule import Schedule, once


def keeps(schedule: Schedule, kind: int, stage: int, microbatch: int) -> bool:
    """Whether the memory that an op adds stays after it."""
    if kind != Kind.F:
        return True
    is_used = not schedule.is_forward_only and schedule.layout.has_backward[stage]
    return is_used and (stage, microbatch) not in schedule.recomputed


def keeps_all(
    schedule: Schedule, kinds: Ints, stages: Ints, microbatches: Ints
) -> Flags:
    """`keeps` of many ops."""
    kept = np.ones(len(kinds), bool)
    # All but forwards keep what they add. Of forwards, those lose it whose backward never comes
    # (inference, frozen stages, pipelines that run ahead), or makes it again.
    forwards = np.flatnonzero(kinds == Kind.F)
    layout = schedule.layout
    if schedule.is_forward_only:
        kept[forwards] = False
    elif schedule.recomputed:
        of_forwards = stages[forwards], microbatches[forwards]
        kept[forwards] = ~_recomputed(schedule)[of_forwards]
    if layout.frozen or layout.handovers:
        kept[forwards] &= np.array(layout.has_backward)[stages[forwards]]
    return kept


@once
def _recomputed(schedule: Schedule) -> Flags:
    """The recomputed ops as a table, by stage and microbatch."""
    columns = schedule.columns
    stages = range(len(schedule.placement))
    table = np.zeros((len(stages), max(map(schedule.layout.units, stages))), bool)
    rows = columns.where(*REPEATS)
    table[columns.stage[rows], columns.microbatch[rows]] = True
    return table
