"""Hops: a stage's weights, or its gradients, move from each replica to the next one, in a ring.
This module finds the home of each stage, and the ops that are the first to use weights that
arrived.

    lane(0) ──▶ lane(1) ──▶ lane(2) ──▶ lane(3)
       ▲                                   │
       ╰───────────────────────────────────╯

The home is the replica that never receives the weights: it always has them, and has the summed
gradients at the end of a step. Another replica has the weights from a receive to a `reshard`, as it
has gathered weights.
"""

from collections.abc import Collection, Iterator

import numpy as np

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import OF_HOPS, USES_WEIGHTS, kinds_of
from schedlang.schedule.schedule import Schedule

#: The kinds of ops that receive weights from the previous replica.
_ARRIVALS = kinds_of(lambda op: op.is_hop and op.weights == "bring")


def homes(schedule: Schedule) -> dict[int, list[int]]:
    """For each stage that hops, the replicas that never receive its weights. In a proved plan there
    is exactly one, the home.
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
    """The stages among these that hop, each with the replica that is its home."""
    # Most plans have no hops; then the actions of other ranks need not be read.
    ranks = {schedule.placement[stage] for stage in stages}
    if not any(OF_HOPS & {*schedule.ranks[rank].kind} for rank in ranks):
        return {}
    found = homes(schedule).items()
    return {stage: home for stage, (home,) in found if stage in stages}


def first_users(actions: Actions) -> Iterator[tuple[int, int]]:
    """The index and the stage of each op that is the first to use weights which have arrived."""
    coming = set[int]()
    for index, (kind, stage) in enumerate(
        zip(actions.kind, actions.stage, strict=True)
    ):
        if kind in _ARRIVALS:
            coming.add(stage)
        elif kind in USES_WEIGHTS and stage in coming:
            coming.remove(stage)
            yield index, stage
