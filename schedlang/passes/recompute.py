"""Drop a stage's activations after the forward, and recompute them right before the backward."""

from collections.abc import Iterable

from attrs import evolve

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import MAKERS, Kind
from schedlang.schedule.schedule import Schedule


def recompute(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """The schedule with an `R` before each backward of these stages that has none; slots are
    dropped.
    """
    needed = {stage for stage in stages if schedule.layout.has_backward[stage]}
    ranks = []
    for actions in schedule.ranks:
        changed = Actions()
        for batch in actions.batches():
            for kind, stage, microbatch, place, _ in map(actions.row, batch):
                backward = kind in MAKERS[Kind.B] and stage in needed
                if backward and (stage, microbatch) not in schedule.recomputed:
                    changed.add(Kind.R, stage, microbatch, place)
            for row in map(actions.row, batch):
                changed.add(*row)
        ranks.append(changed)
    return evolve(schedule, ranks=tuple(ranks), slots=None)
