"""Keep the forwards: the inference plan that stands in a training program."""

from typing import TypeVar

from attrs import evolve

from schedlang.schedule.kinds import FORWARD
from schedlang.schedule.schedule import Schedule

S = TypeVar("S", bound=Schedule)


def forward_only(schedule: S) -> S:
    """The schedule's forwards and their transfers, in each rank's order; slots are forgotten.

    They need nothing but each other, so they run to the end wherever the whole schedule does. All
    read the newest weights: no rule says which of its versions a training reads.
    """
    return evolve(
        schedule,
        ranks=tuple(actions.select(FORWARD.__contains__) for actions in schedule.ranks),
        slots=None,
        weights=(),
    )
