"""What is wrong with the structure of a schedule, once a check of `structure` has found that
something is.
"""

from collections.abc import Mapping

import numpy as np

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.actions import is_update
from schedlang.schedule.arrays import Flags, Ints, is_any
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import MAKERS, OPS, Kind
from schedlang.schedule.schedule import Schedule


def unknown_actions(
    schedule: Schedule, stage: Ints, is_right: Mapping[str, Flags]
) -> list[Finding]:
    """Actions of stages, microbatches or updates that do not exist, or that belong to another rank.

    `stage` is the stage of each action, and `is_right` says for each mistake which actions do not
    make it. An action has one finding, the first mistake that it makes.
    """
    columns = schedule.columns
    layout = schedule.layout
    names = schedule.names

    def place(row: int) -> tuple[int, int]:
        return int(columns.rank[row]), int(columns.source[row])

    def number(row: int) -> tuple[int]:
        return (int(columns.stage[row]),)

    def here(row: int) -> str:
        at, index = columns.place(row)
        return f"`{schedule.name_of(at, index)}` on rank {at}"

    def no_such_stage(row: int) -> Finding:
        message = f"{here(row)}: there are stages 0 to {len(layout.placement) - 1}"
        return Finding("no-such-stage", message, *place(row), numbers=number(row))

    def not_on_this_rank(row: int) -> Finding:
        at = layout.placement[stage[row]]
        message = f"{here(row)}: stage {names.stage(int(stage[row]))} is on rank {at}"
        return Finding("not-on-this-rank", message, *place(row), numbers=number(row))

    def no_such_update(row: int) -> Finding:
        message = f"{here(row)}: there are updates 0 to {layout.updates - 1}"
        return Finding("update", message, *place(row))

    def no_such_microbatch(row: int) -> Finding:
        message = f"{here(row)}: there are {names.microbatches(layout.units(int(stage[row])))}"
        return Finding("no-such-microbatch", message, *place(row), numbers=number(row))

    def beside_in_a_group(row: int) -> Finding:
        what = "it goes on beside what follows by itself, so it stands alone"
        return Finding("overlap", f"{here(row)}: {what}", *place(row))

    explain = {
        "stage": no_such_stage,
        "rank": not_on_this_rank,
        "update": no_such_update,
        "microbatch": no_such_microbatch,
        "group": beside_in_a_group,
    }
    findings: dict[int, Finding] = {}
    for mistake, rows in is_right.items():
        for row in np.flatnonzero(~rows).tolist():
            findings.setdefault(row, explain[mistake](row))
    return [findings[row] for row in sorted(findings)]


def repeated_ops(schedule: Schedule, first_rows: Mapping[int, int]) -> list[Finding]:
    """Ops that make what an earlier one made, in the order of the actions; each row is given with
    that of the earlier op.
    """
    return [_repeated_op(schedule, row, first_rows[row]) for row in sorted(first_rows)]


def _repeated_op(schedule: Schedule, row: int, before: int) -> Finding:
    columns = schedule.columns
    kind = Kind(int(columns.kind[row]))
    stage = int(columns.stage[row])
    microbatch = max(int(columns.microbatch[row]), 0)
    names = schedule.names
    if is_update(kind):
        which = f"update {microbatch}"
    else:
        which = f"{names.noun} {names.microbatch(microbatch)}"
    help = None
    if kind == Kind.W:
        help = "a `W` completes an `I`; a whole backward needs none"
    elif schedule.layout.updates > 1 and "steady" in schedule.source.text:
        help = (
            "`steady` goes on behind the microbatches of `warmup`: after w of them, its forwards "
            "are `F(m + w)`"
        )
    name = OPS[OPS[kind].makes[0]].name
    return Finding(
        "repeated-op",
        f"the {name} of {which} on stage {names.stage(stage)} runs twice",
        int(columns.rank[row]),
        int(columns.source[row]),
        f"again, as `{names.action(kind, stage, microbatch)}`",
        ((int(columns.source[before]), "first here"),),
        help,
    )


def missing_ops(
    schedule: Schedule, made: Kind, missing: Mapping[int, int]
) -> list[Finding]:
    """For each stage the first microbatch for which no op makes something, and how many are
    `missing` in all: there may be millions.
    """
    return [
        _missing_op(schedule, made, stage, lacking)
        for stage, lacking in missing.items()
    ]


def _missing_op(schedule: Schedule, made: Kind, stage: int, lacking: int) -> Finding:
    columns = schedule.columns
    rows = columns.where(*MAKERS[made])
    there = np.sort(columns.microbatch[rows[columns.stage[rows] == stage]])
    microbatch = first_gap(there)
    names = schedule.names
    which = f"{names.noun} {names.microbatch(microbatch)}"
    message = (
        f"the {OPS[made].name} of {which} never runs on stage {names.stage(stage)}"
    )
    if lacking > 1:
        message += f", nor that of {counted(lacking - 1, f'other {names.noun}')}"
    help = None
    if made == Kind.W:
        help = (
            "every half for the inputs needs its `W`; write `BW` for a whole backward"
        )
    place, label = place_near(schedule, stage, made)
    return Finding(
        "missing-op", message, schedule.placement[stage], place, label, help=help
    )


def place_near(schedule: Schedule, stage: int, *made: Kind) -> tuple[int, str]:
    """The place of the same op for another microbatch, or of another op of the stage, and what it
    is.
    """
    columns = schedule.columns

    def of_stage(kinds: tuple[Kind, ...]) -> Ints:
        return np.flatnonzero(is_any(columns.kind, *kinds) & (columns.stage == stage))

    same = of_stage(tuple(kind for each in made for kind in MAKERS[each]))
    if len(same):
        return int(columns.source[same[-1]]), "others run here"
    others = [rows for rows in map(of_stage, MAKERS.values()) if len(rows)]
    if not others:
        return 0, ""
    latest = max(others, key=lambda rows: int(rows[0]))
    return int(
        columns.source[latest[-1]]
    ), f"stage {schedule.names.stage(stage)} runs here"


def first_gap(numbers: Ints) -> int:
    """The first number from 0 that sorted ones lack."""
    gaps = np.flatnonzero(numbers != np.arange(len(numbers)))
    return int(gaps[0]) if len(gaps) else len(numbers)
