"""Is every piece of work there, once? See `schedlang.proof.structure`."""

import numpy as np
from numpy.typing import NDArray

from schedlang.proof.columnwise.columns import Columns, columns_of
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

#: The kinds that do each work of a stage and microbatch: a whole backward does both halves.
_FORWARD = (Kind.F,)
_INPUT = (Kind.B, Kind.I)
_WEIGHT = (Kind.B, Kind.W)


def is_complete(schedule: Schedule) -> bool:
    """Whether it is known that a schedule is as `check_structure` asks; it is not for one with
    copies to the host.
    """
    columns = columns_of(schedule)
    return columns is not None and has_all_work(columns)


def has_all_work(columns: Columns) -> bool:
    """Whether all work is there, once, as far as is known."""
    if len(columns.where(Kind.OFFLOAD, Kind.RELOAD)):
        return False
    work = (_FORWARD,) if columns.schedule.is_forward_only else (_FORWARD, _INPUT, _WEIGHT)
    units = [
        columns.schedule.layout.units(stage) for stage in range(len(columns.schedule.placement))
    ]
    wanted = (np.arange(columns.stride) < np.array(units)[:, None]).ravel()
    return (
        all(np.array_equal(_counts(columns, kinds), wanted) for kinds in work)
        and bool((_counts(columns, (Kind.R,)) <= 1).all())
        and _has_all_updates(columns)
    )


def _counts(columns: Columns, kinds: tuple[Kind, ...]) -> NDArray[np.intp]:
    """How often each slot has an op of some kinds."""
    return np.bincount(columns.slot[columns.where(*kinds)], minlength=columns.slots)


def _has_all_updates(columns: Columns) -> bool:
    """Whether all stages make all updates, or none; the only one needs no number."""
    made = columns.where(Kind.U)
    updates = columns.schedule.layout.updates
    number = columns.stage[made] * updates + np.maximum(columns.microbatch[made], 0)
    counts = np.bincount(number, minlength=len(columns.schedule.placement) * updates)
    return not len(made) or bool((counts == 1).all())
