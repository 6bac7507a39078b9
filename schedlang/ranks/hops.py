"""Stages whose weights hop from replica to replica: where they are at home, and which ops of a rank
use weights that came first.
"""

from collections.abc import Container, Iterable, Iterator

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import OF_HOPS, USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule


def homes_among(replicas: Iterable[int], receivers: Container[int]) -> list[int]:
    """The replicas of a stage that never receive its weights: one where a plan is proved, their
    home.
    """
    return [replica for replica in replicas if replica not in receivers]


def homes_of(schedule: Schedule, stages: Iterable[int]) -> dict[int, int]:
    """Those of some stages whose weights hop, each with the replica of it that is their home."""
    found = {}
    for stage in stages:
        if not OF_HOPS & _kinds(schedule, stage):
            continue
        replicas = schedule.layout.replicas(stage)
        receivers = [
            each for each in replicas if Kind.RECV_WEIGHTS in _kinds(schedule, each)
        ]
        (found[stage],) = homes_among(replicas, receivers)
    return found


def _kinds(schedule: Schedule, stage: int) -> set[int]:
    """The kinds of action of a stage."""
    actions = schedule.ranks[schedule.placement[stage]]
    pairs = zip(actions.kind, actions.stage, strict=True)
    return {kind for kind, number in pairs if number == stage}


def first_users(actions: Actions) -> Iterator[tuple[int, int]]:
    """The ops of a rank that are the first to use weights which it has received, by their indices;
    each with the stage.
    """
    coming = set[int]()
    for index, (kind, stage) in enumerate(
        zip(actions.kind, actions.stage, strict=True)
    ):
        if kind == Kind.RECV_WEIGHTS:
            coming.add(stage)
        elif kind in USES_WEIGHTS and stage in coming:
            coming.remove(stage)
            yield index, stage
