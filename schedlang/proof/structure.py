"""Is all that must be made there, and made once? Every stage runs each microbatch's F, then its B,
or its two halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.on_demand import on_demand
from schedlang.proof.features import check
from schedlang.schedule.arrays import Ints, counts_of, is_any, repeats
from schedlang.schedule.columns import Columns
from schedlang.schedule.kinds import MAKERS, OF_STAGE, Kind
from schedlang.schedule.schedule import Schedule, once

if TYPE_CHECKING:
    from schedlang.proof.wrong_structure import (
        missing_ops,
        repeated_ops,
        unknown_actions,
    )
    from schedlang.schedule.findings import diagnose
else:
    # They say what is wrong, once it is known that something is.
    diagnose = on_demand("schedlang.schedule.findings.diagnose")
    missing_ops = on_demand("schedlang.proof.wrong_structure.missing_ops")
    repeated_ops = on_demand("schedlang.proof.wrong_structure.repeated_ops")
    unknown_actions = on_demand("schedlang.proof.wrong_structure.unknown_actions")


@once
def check_structure(schedule: Schedule) -> None:
    """CompileError when an action is unknown, on the wrong rank, missing, or there twice; or when
    what else the schedule has is incomplete (`schedlang.proof.features`).
    """
    check_actions(schedule)
    _check_repeated(schedule)
    _check_missing(schedule)
    check("wrong_structure", schedule)


def check_actions(schedule: Schedule) -> None:
    """CompileError when an action is unknown, or on the wrong rank."""
    columns = schedule.columns
    layout = schedule.layout
    # What a transfer is of may also be a skip. With 4 stages and 2 skips:
    #
    #     numbers    0 1 2 3    4 5
    #                stages     skips: their stages are those at their two ends
    stages = len(schedule.placement)
    numbers = stages + len(layout.far_edges) * columns.is_transfer
    is_stage = (columns.stage >= 0) & (columns.stage < numbers)
    # A number that is no stage counts as stage 0 here: it is refused for the number.
    stage = _stages(schedule, np.where(is_stage, columns.stage, 0))
    units = np.array([layout.units(each) for each in range(stages)])[stage]
    is_unit = (columns.microbatch >= 0) & (columns.microbatch < units)
    # In the order in which they are told: an action that belongs to no stage is on no right rank.
    is_right = {
        "stage": is_stage,
        "rank": np.array(schedule.placement)[stage] == columns.rank,
        "update": ~columns.is_update | (columns.microbatch < layout.updates),
        "microbatch": is_unit | is_any(columns.kind, *OF_STAGE),
        "group": ~columns.is_beside | (columns.group == 0),
    }
    if not all(each.all() for each in is_right.values()):
        raise CompileError(
            diagnose(schedule, unknown_actions(schedule, stage, is_right))
        )


def _stages(schedule: Schedule, numbers: Ints) -> Ints:
    """The stage of every action: of a transfer by a skip, the one at its own end."""
    if not schedule.layout.far_edges:
        return numbers
    stages = numbers.copy()
    for row in np.flatnonzero(numbers >= len(schedule.placement)).tolist():
        kind = int(schedule.columns.kind[row])
        stages[row] = schedule.layout.stage_of(kind, int(numbers[row]))
    return stages


def unit_slots(columns: Columns, rows: Ints) -> Ints:
    """A number for the stage and microbatch of each op, or update; the only update needs none."""
    units = int(columns.microbatch.max(initial=0)) + 1
    return columns.stage[rows] * np.int64(units) + np.maximum(
        columns.microbatch[rows], 0
    )


def _check_repeated(schedule: Schedule) -> None:
    """CompileError for ops that make what an earlier one made."""
    columns = schedule.columns
    first_rows: dict[int, int] = {}
    for makers in MAKERS.values():
        rows = columns.where(*makers)
        later, first = repeats(unit_slots(columns, rows))
        for row, before in zip(rows[later].tolist(), rows[first].tolist(), strict=True):
            first_rows.setdefault(row, before)
    if first_rows:
        raise CompileError(diagnose(schedule, repeated_ops(schedule, first_rows)))


def _check_missing(schedule: Schedule) -> None:
    """CompileError for microbatches that lack their forward, their backward, or the gradient of
    the weights.
    """
    # By now nothing is there twice, and every microbatch is one that there is. So counts say
    # whether any is missing, and which one is looked for only where they do.
    columns = schedule.columns
    stages = len(schedule.placement)
    wanted = (Kind.F,) if schedule.is_forward_only else (Kind.F, Kind.B, Kind.W)
    units = [schedule.layout.units(stage) for stage in range(stages)]
    for made in wanted:
        rows = columns.where(*MAKERS[made])
        lacking = units - counts_of(columns.stage[rows], minlength=stages)
        missing = {
            stage: int(lacking[stage])
            for stage in np.flatnonzero(lacking).tolist()
            if schedule.layout.makes(made, stage)
        }
        if missing:
            raise CompileError(diagnose(schedule, missing_ops(schedule, made, missing)))
