"""Gathers and sums where the runtime would make them by itself, as actions of the schedule: so that
they have times and memory.
"""

from collections.abc import Mapping

from attrs import evolve

from schedlang.ranks.shards import Step, shards
from schedlang.schedule.actions import NO_MICROBATCH, Actions
from schedlang.schedule.schedule import Schedule


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
            _add(changed, source, steps.before, batch)
            for row in map(actions.row, batch):
                changed.add(*row)
            _add(changed, source, steps.after, batch)
        ranks.append(changed)
    return evolve(schedule, ranks=tuple(ranks), slots=None)


def _add(
    actions: Actions, source: int, steps: Mapping[int, list[Step]], batch: range
) -> None:
    """Append what is done with stages before, or after, the actions of a batch."""
    for index in batch:
        for kind, stage in steps.get(index, ()):
            actions.add(kind, stage, NO_MICROBATCH, source)
