"""Hops: the weights of a stage, or its gradients, go from each of its replicas to the next one, and
from the last to the first. Which replica is their home, and which ops use weights that came first?

    lane(0) ──▶ lane(1) ──▶ lane(2) ──▶ lane(3)
       ▲                                   │
       ╰───────────────────────────────────╯

The home is the replica that never receives the weights: it always has them, and at the end of a
step all gradients. Others have weights from a receive to the `reshard`, as gathered ones.
"""

from collections.abc import Collection, Iterator

import numpy as np

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import OF_HOPS, USES_WEIGHTS, kinds_of
from schedlang.schedule.schedule import Schedule

#: The ops by which weights arrive from the replica before.
_ARRIVALS = kinds_of(lambda op: op.is_hop and op.weights == "bring")


def homes(schedule: Schedule) -> dict[int, list[int]]:
    """For each stage that hops, the replicas that never receive its weights: in a proved plan one,
    their home.
    """
    columns = schedule.columns

    def stages_with(*kinds: int) -> list[int]:
        stages: list[int] = np.unique(columns.stage[columns.where(*kinds)]).tolist()
        return stages

    receivers = {*stages_with(*_ARRIVALS)}
    return {
        stage: [
            each for each in schedule.layout.replicas(stage) if each not in receivers
        ]
        for stage in stages_with(*OF_HOPS)
    }


def homes_of(schedule: Schedule, stages: Collection[int]) -> dict[int, int]:
    """Those of some stages that hop, each with the replica of it that is their home."""
    # Most plans have none: then the actions of no other rank have to be read.
    ranks = {schedule.placement[stage] for stage in stages}
    if not any(OF_HOPS & {*schedule.ranks[rank].kind} for rank in ranks):
        return {}
    found = homes(schedule).items()
    return {stage: home for stage, (home,) in found if stage in stages}


def first_users(actions: Actions) -> Iterator[tuple[int, int]]:
    """The ops of a rank that are the first to use weights which it has received, by their indices;
    each with the stage.
    """
    coming = set[int]()
    for index, (kind, stage) in enumerate(
        zip(actions.kind, actions.stage, strict=True)
    ):
        if kind in _ARRIVALS:
            coming.add(stage)
        elif kind in USES_WEIGHTS and stage in coming:
            coming.remove(stage)
            yield index, stage
