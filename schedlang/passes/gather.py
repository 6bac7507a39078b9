"""Gathers and sums where the runtime would make them by itself, as actions of the schedule: so that
they have times and memory.
"""

from collections.abc import Iterable

from attrs import evolve

from schedlang.ranks.shards import Does, Step, shards
from schedlang.schedule.actions import NO_MICROBATCH, Actions
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

_KINDS = {
    Does.UNSHARD: Kind.UNSHARD,
    Does.RESHARD: Kind.RESHARD,
    Does.REDUCE_GRAD: Kind.REDUCE_GRAD,
}


def gather(schedule: Schedule, places: int | None = None) -> Schedule:
    """The schedule with the gathers and sums of `schedlang.ranks.shards` for all stages for which
    it has none; at most so many stages of a rank are gathered at once, by default all. Slots are
    forgotten. ValueError for no place at all.
    """
    if places is not None and places < 1:
        raise ValueError(
            f"there is room for {places} gathered stages, it must be 1 or more"
        )
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        stages = schedule.stages_of(rank)
        steps = shards(actions, stages, places or max(len(stages), 1))
        changed = Actions()
        for batch in actions.batches():
            # What overlaps is one: its gathers come before all of it, and its ends behind.
            source = actions.source[batch.start]
            _add(
                changed,
                source,
                (step for index in batch for step in steps.before.get(index, ())),
            )
            for row in map(actions.row, batch):
                changed.add(*row)
            _add(
                changed,
                source,
                (step for index in batch for step in steps.after.get(index, ())),
            )
        ranks.append(changed)
    return evolve(schedule, ranks=tuple(ranks), slots=None)


def _add(actions: Actions, source: int, steps: Iterable[Step]) -> None:
    """Append what is done with stages."""
    for does, stage in steps:
        actions.add(_KINDS[does], stage, NO_MICROBATCH, source)
