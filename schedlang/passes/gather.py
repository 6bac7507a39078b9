"""Write the all-gathers and reduce-scatters of sharded stages into a schedule, at the places where
the runtime would make them anyway: then they take time and memory in its proof.
"""

from collections.abc import Mapping

from attrs import evolve

from schedlang.ranks.gather_order import Step, shards
from schedlang.schedule.actions import NO_MICROBATCH, Actions
from schedlang.schedule.schedule import Schedule


def gather(schedule: Schedule, places: int | None = None) -> Schedule:
    """The schedule with the gathers and sums of `schedlang.ranks.gather_order`, for every stage
    that has none. A rank holds the gathered weights of at most `places` stages at once, by default
    of all. Slots are dropped. ValueError if `places` is less than 1.
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
            # Overlapped ops are one batch: its gathers come before all of them, its sums after.
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
    """Append the steps that stand before, or after, the actions of a batch."""
    for index in batch:
        for kind, stage in steps.get(index, ()):
            actions.add(kind, stage, NO_MICROBATCH, source)
