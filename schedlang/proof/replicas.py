"""Replicas of a stage make one gradient: do they take it at one version of the weights?"""

import numpy as np

from schedlang.ranks.weight_versions import Versions
from schedlang.schedule.arrays import repeats
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


def mixed_versions(schedule: Schedule, versions: Versions) -> list[Finding]:
    """Forwards that read another version of the weights than those of a replica for the same
    update, the first of each update.
    """
    layout = schedule.layout
    if len(layout.pipelines) == 1 or layout.models:
        return []
    # Stage by stage, and by microbatch within each, whatever order the ranks ran them in.
    order = np.lexsort(versions.forwards[1::-1])
    stages = range(len(layout.placement))
    # Where each op reads what is there, forwards of one update may read different versions.
    is_free = np.array([schedule.weights_of(each).keeps_none for each in stages])
    order = order[~is_free[versions.forwards[0][order]]]
    stage, microbatch, version = (column[order] for column in versions.forwards)
    units = np.array([layout.units_of_update(each) for each in stages])
    starts = np.array([pipeline.start for pipeline in layout.pipeline_of])
    # Stages with one place within their pipelines are replicas of each other. So the key of an
    # update is that place and its number. With 2 pipelines of 3 stages each, 4 microbatches a stage
    # and update:
    #
    #    stage 1, microbatch 5    place 1, update 1    ┐ the same key: both must have read
    #    stage 4, microbatch 6    place 1, update 1    ┘ the same version
    update = (stage - starts[stage]) * layout.updates + microbatch // units[stage]
    later, first = repeats(update)
    is_mixed = version[later] != version[first]
    mixed = later[is_mixed]
    others = first[is_mixed]
    # One finding an update: where one forward is wrong, all behind it mostly are as well.
    _, firsts = np.unique(update[mixed], return_index=True)
    columns = (
        stage[mixed],
        microbatch[mixed],
        version[mixed],
        stage[others],
        version[others],
    )
    rows = zip(*(column[firsts].tolist() for column in columns), strict=True)
    return [_mixed(schedule, *row) for row in rows]


def _mixed(
    schedule: Schedule,
    stage: int,
    microbatch: int,
    version: int,
    other: int,
    of_other: int,
) -> Finding:
    columns = schedule.columns
    is_it = (columns.stage == stage) & (columns.microbatch == microbatch)
    row = int(np.flatnonzero(is_it & (columns.kind == Kind.F))[0])
    rank, index = columns.place(row)
    message = (
        f"`{schedule.name_of(rank, index)}` reads version {version} of the weights, stage "
        f"{schedule.names.stage(other)} version {of_other} for the same update: they are replicas"
    )
    help = (
        "let all replicas read the same version: one rule of `weights` for all of them"
    )
    place = int(columns.source[row])
    return Finding("weight-version", message, rank, place, help=help)
