"""Drop activations after the forward, and make them again right before the backward."""

from collections.abc import Container

from attrs import evolve

from schedlang.actions import Actions
from schedlang.kinds import Kind
from schedlang.schedule import Schedule


def recompute(schedule: Schedule, stages: Container[int]) -> Schedule:
    """The schedule with an `R` before each backward of some stages that has none yet; slots are forgotten."""
    ranks = []
    for actions in schedule.ranks:
        changed = Actions()
        for index in range(len(actions)):
            kind, stage, microbatch, place, group = actions.row(index)
            backward = kind in (Kind.B, Kind.I) and stage in stages
            if backward and (stage, microbatch) not in schedule.recomputed:
                changed.add(Kind.R, stage, microbatch, place)
            changed.add(kind, stage, microbatch, place, group)
        ranks.append(changed)
    return evolve(schedule, ranks=tuple(ranks), slots=None)
