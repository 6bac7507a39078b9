"""Put weight gradients into free slots: they are what a rank can do while it waits."""

from attrs import evolve

from schedlang.passes.slots import WIDTH, slots_of
from schedlang.schedule import Actions, Kind, Schedule


def fill_weights(schedule: Schedule) -> Schedule:
    """The schedule with a `W` for every input gradient, the oldest one first, in each rank's free slots.

    A `W` that the schedule has already gives up its place. What finds no free slot comes at the end.
    """
    filled = [_fill(actions, slots) for actions, slots in zip(schedule.ranks, slots_of(schedule), strict=True)]
    return evolve(
        schedule,
        ranks=tuple(actions for actions, _ in filled),
        slots=None if schedule.slots is None else tuple(slots for _, slots in filled),
    )


def _fill(actions: Actions, slots: list[int]) -> tuple[Actions, tuple[int, ...]]:
    """One rank's actions and slots with its weight gradients in them."""
    changed, times = Actions(), []
    owed: list[tuple[int, int, int]] = []
    now = 0
    for index in sorted(range(len(actions)), key=lambda each: (slots[each], each)):
        kind, stage, microbatch, place, group = actions.row(index)
        if kind == Kind.W:
            continue
        while owed and now < slots[index]:
            changed.add(Kind.W, *owed.pop(0))
            times.append(now)
            now += 1
        changed.add(kind, stage, microbatch, place, group)
        times.append(slots[index])
        now = max(now, slots[index] + WIDTH[Kind(kind)])
        if kind == Kind.I:
            owed.append((stage, microbatch, place))
    for each in owed:
        changed.add(Kind.W, *each)
        times.append(now)
        now += 1
    return changed, tuple(times)
