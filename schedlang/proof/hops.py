"""Hops: the weights of a stage, or its gradients, go from each of its replicas to the next one, and
from the last to the first. Which replica is their home?

    lane(0) ──▶ lane(1) ──▶ lane(2) ──▶ lane(3)
       ▲                                   │
       ╰───────────────────────────────────╯

The home is the replica that never receives the weights: it always has them, and at the end of a
step all gradients. Others have weights from a receive to the `reshard`, as gathered ones.

Every gradient comes home once: it is made once, a send takes all that there is away, and a receive
brings all of that to one other replica. So it is enough that none is left elsewhere at the end,
which each rank shows by itself (`schedlang.proof.collectives`).
"""

import numpy as np

from schedlang.proof.graph import once
from schedlang.ranks.hops import homes_among
from schedlang.schedule.columns import counts_of, is_any
from schedlang.schedule.findings import Finding, ranks_text
from schedlang.schedule.kinds import OF_HOPS, Kind
from schedlang.schedule.schedule import Schedule


@once
def homes(schedule: Schedule) -> dict[int, list[int]]:
    """For each stage with hops, by its first replica, the replicas that never receive its
    weights.
    """
    columns = schedule.columns
    layout = schedule.layout

    def stages_with(*kinds: int) -> list[int]:
        of_kinds = columns.stage[columns.where(*kinds)]
        stages: list[int] = np.flatnonzero(counts_of(of_kinds)).tolist()
        return stages

    receives = {*stages_with(Kind.RECV_WEIGHTS)}
    firsts = dict.fromkeys(
        min(layout.replicas(stage)) for stage in stages_with(*OF_HOPS)
    )
    return {first: homes_among(layout.replicas(first), receives) for first in firsts}


def check_hops(schedule: Schedule) -> list[Finding]:
    """Stages that hop, and have no home, or several; or whose weights are gathered, or gradients
    summed, besides.
    """
    columns = schedule.columns
    layout = schedule.layout
    beside = columns.where(Kind.UNSHARD, Kind.REDUCE_GRAD)
    findings = []
    for first, found in homes(schedule).items():
        replicas = layout.replicas(first)
        which = schedule.names.stages(replicas)
        rows = columns.where(*OF_HOPS)
        help = "the home of a stage is the one replica that never receives its weights"
        if len(replicas) == 1:
            message = f"{which} has no replica to pass anything on to"
            help = "hops go round the replicas of a stage, which are those of several pipelines"
        elif is_any(columns.stage[beside], *replicas).any():
            rows = beside
            message = (
                f"{which}: weights and gradients hop, "
                "so they are not gathered and summed as well"
            )
            help = "leave out `unshard` and `reduce` of the stage"
        elif not found:
            message = (
                f"{which}: all replicas receive the weights, so none is their home"
            )
        elif len(found) > 1:
            ranks = ranks_text(sorted(layout.placement[stage] for stage in found))
            message = f"{which}: {ranks} never receive the weights, so they have several homes"
        else:
            continue
        row = int(rows[is_any(columns.stage[rows], *replicas)][0])
        rank = int(columns.rank[row])
        place = int(columns.source[row])
        findings.append(Finding("hop", message, rank, place, help=help))
    return findings
