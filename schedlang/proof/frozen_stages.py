"""Frozen stages: a plan has no op of theirs that would do nothing."""

import numpy as np

from schedlang.schedule.actions import is_transfer
from schedlang.schedule.findings import Finding
from schedlang.schedule.frozen import is_idle, runs_as
from schedlang.schedule.schedule import Schedule


def wrong_plan(schedule: Schedule) -> list[Finding]:
    """Ops that a frozen stage has no use for; lowering a program leaves them out."""
    layout = schedule.layout
    columns = schedule.columns
    kind = columns.kind
    number = columns.stage
    wrong = (runs_as(layout)[kind, number] != kind) | is_idle(layout)[kind, number]
    return [_of_no_use(schedule, row) for row in np.flatnonzero(wrong).tolist()]


def _of_no_use(schedule: Schedule, row: int) -> Finding:
    """An action that its frozen stage does not have, or that sends gradients to one."""
    layout = schedule.layout
    rank, index = schedule.columns.place(row)
    kind, number, _, source, _ = schedule.ranks[rank].row(index)
    stage = layout.earlier(kind, number) if is_transfer(kind) else number
    what = "needs no gradients: it is frozen, and nothing before it is trained"
    if layout.has_backward[stage]:
        what = "is frozen: its backwards are `I` alone, its weights have no gradients"
    name = schedule.name_of(rank, index)
    message = f"`{name}` on rank {rank}: stage {schedule.names.stage(stage)}"
    return Finding("frozen", f"{message} {what}", rank, source, numbers=(number,))
