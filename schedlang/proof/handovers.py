"""Pipelines that run ahead of others: they run forwards alone."""

import numpy as np

from schedlang.schedule.arrays import is_any
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import FORWARD, GATHERS, STEPS, SUMS
from schedlang.schedule.schedule import Schedule

#: What a stage does that runs ahead: nothing is kept for other ops of a microbatch.
_DOES = (*FORWARD, *GATHERS, *SUMS, *STEPS)


def wrong_structure(schedule: Schedule) -> list[Finding]:
    """Ops of microbatches, other than forwards, on stages that run ahead."""
    layout = schedule.layout
    columns = schedule.columns
    ahead = filter(layout.runs_ahead, range(len(layout.placement)))
    is_ahead = is_any(columns.stage, *ahead) & ~columns.is_transfer
    rows = np.flatnonzero(is_ahead & ~is_any(columns.kind, *_DOES))
    return [_of_no_use(schedule, row) for row in rows.tolist()]


def _of_no_use(schedule: Schedule, row: int) -> Finding:
    """An op on a stage that runs ahead."""
    columns = schedule.columns
    rank, index = columns.place(row)
    pipeline = schedule.layout.pipeline_of[int(columns.stage[row])]
    follower = schedule.layout.follower(pipeline)
    assert follower is not None
    return Finding(
        "edge",
        f"`{schedule.name_of(rank, index)}` on rank {rank}: `{pipeline.name}` runs ahead, and "
        "keeps nothing of its forwards",
        rank,
        int(columns.source[row]),
        help=f"`{follower.name}`, which takes its microbatches over, runs that",
    )
