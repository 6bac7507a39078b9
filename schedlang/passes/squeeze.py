"""Drop the slots at which ops were drawn: every op starts as soon as it can, in the same order."""

from attrs import evolve

from schedlang.schedule.schedule import Schedule


def squeeze(schedule: Schedule) -> Schedule:
    """The schedule without slots (Qi et al. 2024, Pipeline Parallelism with Controllable Memory,
    section 2.3).
    """
    return evolve(schedule, slots=None)
