"""Optimizer steps in a schedule: does each stage make all of them, what runs beside them, which
weights do ops read, and which gradients do the steps wait for?
"""

import numpy as np

from schedlang.proof.graph import NOTHING
from schedlang.proof.replicas import mixed_versions
from schedlang.proof.threads import Threads
from schedlang.proof.wrong_structure import first_gap, place_near
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.actions import is_update
from schedlang.schedule.arrays import counts_of
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import STEPS
from schedlang.schedule.needed_gradients import sums_of
from schedlang.schedule.schedule import Schedule, WeightRule


def wrong_structure(schedule: Schedule) -> list[Finding]:
    """Optimizer steps that are missing, or ops that overlap with one of their own stage."""
    return _missing_updates(schedule) or _beside_updates(schedule)


def wrong_reads(schedule: Schedule) -> list[Finding]:
    """The ops that read other weights than they should."""
    versions = follow_weights(schedule)
    return versions.findings or mixed_versions(schedule, versions)


def place(threads: Threads) -> None:
    """Optimizer steps wait for the last gradient of each rank with replicas of the stage."""
    sums = sums_of(threads.schedule)
    there = np.flatnonzero(sums.is_far & (sums.last >= 0))
    if not len(there):
        return
    # One edge for each step and other rank: where its last gradient is, the others are.
    makers = sums.last[there]
    ranks = len(threads.schedule.ranks)
    pairs, which = np.unique(
        sums.step[there] * np.int64(ranks) + threads.columns.rank[makers],
        return_inverse=True,
    )
    last = np.full(len(pairs), NOTHING, np.int64)
    np.maximum.at(last, which, makers)
    users = pairs // ranks
    threads.wait(threads.item[users], threads.item[last], users)


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
        update = first_gap(made)
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
        place, label = place_near(schedule, stage, *STEPS)
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
