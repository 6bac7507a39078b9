"""Pipelines that run ahead of others: they run forwards alone."""

import numpy as np

from schedlang.schedule.arrays import is_any
from schedlang.schedule.findings import Finding, amiss, here
from schedlang.schedule.kinds import BETWEEN, FORWARD, GATHERS, STEPS, SUMS
from schedlang.schedule.schedule import Schedule

#: What a stage does that runs ahead: nothing is kept for other ops of a microbatch.
_DOES = (*FORWARD, *GATHERS, *STEPS)
#: What all replicas of a stage would do together.
_TOGETHER = (*SUMS, *BETWEEN)


def wrong_structure(schedule: Schedule) -> list[Finding]:
    """Sums and exchanges of stages that have a replica which runs ahead; or if there are none, ops
    of microbatches, other than forwards, on stages that run ahead.
    """
    layout = schedule.layout
    columns = schedule.columns
    ahead = [*filter(layout.runs_ahead, range(len(layout.placement)))]
    replicas = [other for stage in ahead for other in layout.replicas(stage)]
    is_shared = is_any(columns.stage, *replicas) & ~columns.is_transfer
    rows = np.flatnonzero(is_shared & is_any(columns.kind, *_TOGETHER))
    if len(rows):
        return [_of_one_replica(schedule, row) for row in rows.tolist()]
    is_ahead = is_any(columns.stage, *ahead) & ~columns.is_transfer
    rows = np.flatnonzero(is_ahead & ~is_any(columns.kind, *_DOES))
    return [_of_no_use(schedule, row) for row in rows.tolist()]


def _of_one_replica(schedule: Schedule, row: int) -> Finding:
    """A sum or an exchange in which a replica that runs ahead cannot take part."""
    layout = schedule.layout
    columns = schedule.columns
    replicas = layout.replicas(int(columns.stage[row]))
    ahead = next(filter(layout.runs_ahead, replicas))
    message = (
        f"{here(schedule, row)} is of all replicas of its stage, and "
        f"`{layout.pipeline_of[ahead].name}`, which runs ahead, cannot take part"
    )
    help = (
        "leave exchanges out: they do not go together with pipelines that run ahead yet"
    )
    if columns.kind[row] in SUMS:
        help = "leave it out: the runtime sums gradients"
    return amiss(schedule, "edge", row, message, help)


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
