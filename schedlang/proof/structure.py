"""Is all that must be made there, and made once? Every stage runs each microbatch's F, then its B,
or its two halves.
"""

import numpy as np

from schedlang.diagnostics.diagnostic import CompileError, counted
from schedlang.proof.collectives import check_collectives
from schedlang.schedule.actions import is_transfer, is_update
from schedlang.schedule.columns import Columns, Ints, counts_of, is_any, repeats
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.frozen import is_idle, runs_as
from schedlang.schedule.kinds import (
    AWAY,
    BACK,
    MAKERS,
    OF_STAGE,
    OPS,
    REPEATS,
    STEPS,
    Kind,
)
from schedlang.schedule.schedule import Schedule, WeightRule


def check_structure(schedule: Schedule) -> None:
    """CompileError when an action is unknown, on the wrong rank, missing, or there twice."""
    check_actions(schedule)
    for check in (
        _repeated,
        _missing,
        _missing_updates,
        _beside_updates,
        _offloads,
        check_collectives,
    ):
        findings = check(schedule)
        if findings:
            raise CompileError(diagnose(schedule, findings))


def check_actions(schedule: Schedule) -> None:
    """CompileError when an action is unknown, or on the wrong rank."""
    findings = _unknown(schedule)
    if findings:
        raise CompileError(diagnose(schedule, findings))


def _unknown(schedule: Schedule) -> list[Finding]:
    """Actions of stages and microbatches that do not exist or belong to another rank."""
    columns = schedule.columns
    layout = schedule.layout
    names = schedule.names
    # What a transfer is of may also be a skip. With 4 stages and 2 skips:
    #
    #     numbers    0 1 2 3    4 5
    #                stages     skips: their stages are those at their two ends
    stages = len(schedule.placement)
    numbers = stages + len(layout.far_edges) * columns.is_transfer
    is_stage = (columns.stage >= 0) & (columns.stage < numbers)
    # What stands for stage 0 here has a finding already.
    stage = _stages(schedule, np.where(is_stage, columns.stage, 0))
    rank = np.array(schedule.placement)[stage]
    units = np.array([layout.units(s) for s in range(stages)])[stage]
    is_update = columns.is_update
    is_unit = (columns.microbatch >= 0) & (columns.microbatch < units)
    is_unit |= is_any(columns.kind, *OF_STAGE)

    def place(row: int) -> tuple[int, int]:
        return int(columns.rank[row]), int(columns.source[row])

    def number(row: int) -> tuple[int]:
        return (int(columns.stage[row]),)

    def here(row: int) -> str:
        at, index = columns.place(row)
        return f"`{schedule.name_of(at, index)}` on rank {at}"

    def no_such_stage(row: int) -> Finding:
        message = f"{here(row)}: there are stages 0 to {stages - 1}"
        return Finding("no-such-stage", message, *place(row), numbers=number(row))

    def not_on_this_rank(row: int) -> Finding:
        message = (
            f"{here(row)}: stage {names.stage(int(stage[row]))} is on rank {rank[row]}"
        )
        return Finding("not-on-this-rank", message, *place(row), numbers=number(row))

    def no_such_update(row: int) -> Finding:
        message = f"{here(row)}: there are updates 0 to {layout.updates - 1}"
        return Finding("update", message, *place(row))

    def no_such_microbatch(row: int) -> Finding:
        message = f"{here(row)}: there are {names.microbatches(int(units[row]))}"
        return Finding("no-such-microbatch", message, *place(row), numbers=number(row))

    def beside_in_a_group(row: int) -> Finding:
        what = "it goes on beside what follows by itself, so it stands alone"
        return Finding("overlap", f"{here(row)}: {what}", *place(row))

    # An action has one finding, the first of these: of a stage that there is not, nobody can say
    # whether it is on this rank, or which microbatches it has.
    is_such_update = ~is_update | (columns.microbatch < layout.updates)
    findings: dict[int, Finding] = {}
    for is_right, finding in (
        (is_stage, no_such_stage),
        (rank == columns.rank, not_on_this_rank),
        (is_such_update, no_such_update),
        (is_unit, no_such_microbatch),
        (~columns.is_beside | (columns.group == 0), beside_in_a_group),
    ):
        for row in np.flatnonzero(~is_right).tolist():
            findings.setdefault(row, finding(row))
    return [findings[row] for row in sorted(findings)]


def check_frozen(schedule: Schedule) -> None:
    """CompileError where a frozen stage does what it has no use for; in a program this is left
    out.
    """
    layout = schedule.layout
    if not layout.frozen:
        return
    columns = schedule.columns
    kind = columns.kind
    number = columns.stage
    wrong = (runs_as(layout)[kind, number] != kind) | is_idle(layout)[kind, number]
    findings = [_of_no_use(schedule, row) for row in np.flatnonzero(wrong).tolist()]
    if findings:
        raise CompileError(diagnose(schedule, findings))


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


def _stages(schedule: Schedule, numbers: Ints) -> Ints:
    """The stage of every action: of a transfer by a skip, the one at its own end."""
    if not schedule.layout.far_edges:
        return numbers
    stages = numbers.copy()
    for row in np.flatnonzero(numbers >= len(schedule.placement)).tolist():
        kind = int(schedule.columns.kind[row])
        stages[row] = schedule.layout.stage_of(kind, int(numbers[row]))
    return stages


def _slots(columns: Columns, rows: Ints) -> Ints:
    """A number for the stage and microbatch of each op, or update; the only update needs none."""
    units = int(columns.microbatch.max(initial=0)) + 1
    return columns.stage[rows] * np.int64(units) + np.maximum(
        columns.microbatch[rows], 0
    )


def _repeated(schedule: Schedule) -> list[Finding]:
    """Ops that make what an earlier one made, in the order of the actions."""
    columns = schedule.columns
    first_rows: dict[int, int] = {}
    for makers in MAKERS.values():
        rows = columns.where(*makers)
        later, first = repeats(_slots(columns, rows))
        for row, before in zip(rows[later].tolist(), rows[first].tolist(), strict=True):
            first_rows.setdefault(row, before)
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


def _missing(schedule: Schedule) -> list[Finding]:
    """The first microbatch that lacks its forward, its backward or the gradient of its weights, on
    each stage: there may be millions.
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
        findings = [
            _missing_op(schedule, made, stage, int(lacking[stage]))
            for stage in np.flatnonzero(lacking).tolist()
            if schedule.layout.makes(made, stage)
        ]
        if findings:
            return findings
    return []


def _missing_op(schedule: Schedule, made: Kind, stage: int, lacking: int) -> Finding:
    columns = schedule.columns
    rows = columns.where(*MAKERS[made])
    there = np.sort(columns.microbatch[rows[columns.stage[rows] == stage]])
    microbatch = _first_gap(there)
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
    place, label = _place_near(schedule, stage, made)
    return Finding(
        "missing-op", message, schedule.placement[stage], place, label, help=help
    )


def _place_near(schedule: Schedule, stage: int, *made: Kind) -> tuple[int, str]:
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


def _missing_updates(schedule: Schedule) -> list[Finding]:
    """The first update that a stage does not make, where others do: a plan may have millions. Or
    updates that none makes, where there are versions of the weights.
    """
    columns = schedule.columns
    rows = columns.where(*STEPS)
    if not len(rows):
        return _without_updates(schedule)
    updates = schedule.layout.updates
    findings: list[tuple[int, Finding]] = []
    counts = counts_of(columns.stage[rows], minlength=len(schedule.placement))
    for stage in np.flatnonzero(counts < updates).tolist():
        if not schedule.layout.trains(stage):
            continue
        made = np.sort(
            np.maximum(columns.microbatch[rows[columns.stage[rows] == stage]], 0)
        )
        update = _first_gap(made)
        name = schedule.names.stage(stage)
        message = f"stage {name} never makes update {update}, others do"
        rank = schedule.placement[stage]
        place = int(columns.source[rows[0]])
        times = updates - len(made)
        finding = Finding(
            "missing-op", message, rank, place, "others run here", times=times
        )
        findings.append((update, finding))
    return [finding for _, finding in sorted(findings, key=lambda each: each[0])]


def _first_gap(numbers: Ints) -> int:
    """The first number from 0 that sorted ones lack."""
    gaps = np.flatnonzero(numbers != np.arange(len(numbers)))
    return int(gaps[0]) if len(gaps) else len(numbers)


def _without_updates(schedule: Schedule) -> list[Finding]:
    """Stages whose weights have versions, which updates alone make: the gradient of an older one
    comes to the weights by `U`.
    """
    if schedule.layout.updates > 1 and not schedule.is_forward_only:
        # What adds to a gradient that is not its own says more.
        return []
    latest = WeightRule().name
    rules = map(schedule.weights_of, range(len(schedule.placement)))
    stages = [stage for stage, rule in enumerate(rules) if rule.name != latest]
    help = (
        "write `U` behind the last backward of an update; without any, all weights are `latest`, "
        "and an optimizer steps after the schedule"
    )
    findings = []
    for stage in stages:
        place, label = _place_near(schedule, stage, *STEPS)
        rule = schedule.weights_of(stage)
        name = schedule.names.stage(stage)
        message = f"stage {name} never makes update 0, and has `weights {rule}`"
        rank = schedule.placement[stage]
        findings.append(Finding("missing-op", message, rank, place, label, help=help))
    return findings


def _beside_updates(schedule: Schedule) -> list[Finding]:
    """Ops that overlap with an update of their own stage, or of a replica, which may be the same
    module: it changes weights that they read.
    """
    columns = schedule.columns
    updates = columns.where(*STEPS)
    updates = updates[columns.sizes[updates] > 1]
    findings = []
    for update in updates.tolist():
        rank, index = columns.place(update)
        actions = schedule.ranks[rank]
        for beside in actions.batch(
            int(columns.batch[update]) - int(columns.first[rank])
        ):
            is_op = not is_update(actions.kind[beside])
            if is_op and actions.stage[beside] in schedule.layout.replicas(
                actions.stage[index]
            ):
                update_name = schedule.name_of(rank, index)
                message = (
                    f"`{schedule.name_of(rank, beside)}` overlaps with `{update_name}`, which "
                    "changes the weights that it reads"
                )
                help = "write one behind the other"
                place = actions.source[beside]
                findings.append(Finding("overlap", message, rank, place, help=help))
    return findings


def _offloads(schedule: Schedule) -> list[Finding]:
    """The first activations that are offloaded but not there, or never brought back; or that their
    own rank would keep.
    """
    columns = schedule.columns
    away = columns.where(*AWAY)
    back = columns.where(*BACK)
    if not len(away) and not len(back):
        return []
    # What may become of the activations of a microbatch on a stage:
    #
    #     F ──── OFFLOAD ──── RELOAD ──── B        right
    #     F ──── OFFLOAD ──────────────── B        never back
    #     F ───────────────── RELOAD ──── B        never away
    #     F ──── OFFLOAD ── … ──── R ──── B        dropped: there was nothing to offload
    away_slots = _slots(columns, away)
    back_slots = _slots(columns, back)
    again_slots = _slots(columns, columns.where(*REPEATS))
    dropped = away[np.isin(away_slots, again_slots)]
    never_back = away[~np.isin(away_slots, back_slots)]
    own = [
        rank for rank, keeper in enumerate(schedule.layout.keepers) if keeper == rank
    ]
    to_itself = away[np.isin(columns.rank[away], own)]
    never_away = back[~np.isin(back_slots, away_slots)]
    wrong = (
        (dropped, "offloaded, but dropped after the forward: `R` makes them again"),
        (never_back, "offloaded, and never reloaded"),
        (never_away, "reloaded, and never offloaded"),
        (
            to_itself,
            "offloaded, and the rank keeps its own: `keep` must name another one",
        ),
    )
    # The first is that of the stage and microbatch whose ops begin first.
    ops = np.flatnonzero(~columns.is_transfer & ~is_any(columns.kind, *OF_STAGE))
    slots, first = np.unique(_slots(columns, ops), return_index=True)
    candidates = []
    for rows, what in wrong:
        begins = ops[first[np.searchsorted(slots, _slots(columns, rows))]]
        for begin, row in zip(begins.tolist(), rows.tolist(), strict=True):
            candidates.append((begin, row, what))
    if not candidates:
        return []
    _, row, what = min(candidates, key=lambda candidate: candidate[0])
    microbatch = int(columns.microbatch[row])
    stage = int(columns.stage[row])
    names = schedule.names
    which = f"{names.noun} {names.microbatch(microbatch)}"
    message = f"the activations of {which} on stage {names.stage(stage)} are {what}"
    return [
        Finding("offload", message, int(columns.rank[row]), int(columns.source[row]))
    ]
