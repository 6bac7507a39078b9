"""Exchanges of what a stage takes from the stage before it, or gets back from the stage after it:
do both stages stand on one rank, and do gradients go back the way that activations came?
"""

from collections.abc import Iterator

import numpy as np

from schedlang.proof.structure import unit_slots
from schedlang.schedule.findings import Finding, amiss, here
from schedlang.schedule.kinds import BETWEEN, OPS, Kind
from schedlang.schedule.schedule import Schedule


def wrong_structure(schedule: Schedule) -> list[Finding]:
    """Exchanges that do not stand between two neighbouring stages of one rank; or if there are
    none, those that lack their counterpart in the other direction.
    """
    return [*_from_elsewhere(schedule)] or [*_one_way(schedule)]


def _from_elsewhere(schedule: Schedule) -> Iterator[Finding]:
    """The first exchange of each kind and stage that is not between neighbours of one rank."""
    layout = schedule.layout
    columns = schedule.columns
    rows = columns.where(*BETWEEN)
    pairs = np.stack([columns.kind[rows], columns.stage[rows]])
    _, first = np.unique(pairs, axis=1, return_index=True)
    for row in rows[np.sort(first)].tolist():
        stage = int(columns.stage[row])
        is_before = OPS[int(columns.kind[row])].of == "before"
        makers = layout.before[stage] if is_before else layout.after[stage]
        rank = layout.placement[stage]
        neighbour = stage - 1 if is_before else stage + 1
        where = "before" if is_before else "after"
        if not makers:
            what = f"there is no stage {where} it"
        elif [*makers] != [neighbour]:
            names = schedule.names.stages(sorted(makers))
            what = f"{where} it there is not one neighbouring stage, but {names}"
        elif layout.placement[neighbour] != rank:
            other = schedule.names.stage(neighbour)
            what = f"stage {other} {where} it is on rank {layout.placement[neighbour]}"
        else:
            continue
        message = f"{here(schedule, row)}: {what}"
        help = "an exchange stands between two neighbouring stages of one rank"
        yield amiss(schedule, "exchange", row, message, help)


def _one_way(schedule: Schedule) -> Iterator[Finding]:
    """Microbatches that are exchanged before a forward, and not before the backward of the stage
    before it; or the other way round.
    """
    if schedule.is_forward_only:
        return
    columns = schedule.columns
    has_backward = np.array(schedule.layout.has_backward)
    forward = columns.where(Kind.EXCHANGE_F)
    forward = forward[has_backward[columns.stage[forward] - 1]]
    back = columns.where(Kind.EXCHANGE_B)
    units = int(columns.microbatch.max(initial=0)) + 1
    # The gradient of what stage s takes goes back to stage s - 1.
    there = unit_slots(columns, forward) - units
    again = unit_slots(columns, back)
    for rows, is_alone, other, step in (
        (forward, ~np.isin(there, again), Kind.EXCHANGE_B, -1),
        (back, ~np.isin(again, there), Kind.EXCHANGE_F, 1),
    ):
        for row in rows[is_alone].tolist():
            stage = int(columns.stage[row]) + step
            microbatch = int(columns.microbatch[row])
            lacking = schedule.names.action(other, stage, microbatch)
            message = f"{here(schedule, row)} lacks its counterpart, `{lacking}`"
            help = "gradients go back the way that activations came: exchange both"
            yield amiss(schedule, "exchange", row, message, help)
