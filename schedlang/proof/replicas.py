"""Replicas of a stage make one gradient: do they take it at one version of the weights?"""

import numpy as np

from schedlang.ranks.weights import Versions
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


def mixed_versions(schedule: Schedule, versions: Versions) -> list[Finding]:
    """Forwards that read another version of the weights than those of a replica for the same
    update, the first of each update.
    """
    layout = schedule.layout
    if len(layout.pipelines) == 1:
        return []
    #: By the first replica of a stage, and the update: a stage that reads a version, and that one.
    first: dict[tuple[int, int], tuple[int, int]] = {}
    mixed: dict[tuple[int, int], tuple[int, int, int]] = {}
    for (stage, microbatch), version in sorted(versions.read.items()):
        update = layout.replicas(stage)[0], layout.update_of(stage, microbatch)
        known = first.setdefault(update, (stage, version))
        if known[1] != version:
            mixed.setdefault(update, (stage, microbatch, version))
    return [_mixed(schedule, *mixed[update], *first[update]) for update in sorted(mixed)]


def _mixed(
    schedule: Schedule, stage: int, microbatch: int, version: int, other: int, of_other: int
) -> Finding:
    columns = schedule.columns
    is_it = (columns.stage == stage) & (columns.microbatch == microbatch)
    row = int(np.flatnonzero(is_it & (columns.kind == Kind.F))[0])
    rank, index = columns.place(row)
    message = (
        f"`{schedule.name_of(rank, index)}` reads version {version} of the weights, stage "
        f"{schedule.names.stage(other)} version {of_other} for the same update: they are replicas"
    )
    help = "let all replicas read the same version: one rule of `weights` for all of them"
    place = int(columns.source[row])
    return Finding("weight-version", message, rank, place, help=help, numbers=(stage, other))
