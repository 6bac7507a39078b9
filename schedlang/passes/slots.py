"""When each op of a schedule runs, in whole slots: as it was drawn, or as early as it can."""

from schedlang.costs import Costs
from schedlang.lowering import lower
from schedlang.machine import simulate
from schedlang.schedule import Kind, Schedule

#: How many slots an op takes: the unit costs.
WIDTH = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.R: 1, Kind.U: 0}


def slots_of(schedule: Schedule) -> list[list[int]]:
    """The first slot of every op of every rank; CompileError for a schedule that does not run."""
    if schedule.slots is not None:
        return [list(slots) for slots in schedule.slots]
    timeline = simulate(lower(schedule), Costs()).timeline
    return [[int(bar.start) for bar in bars] for bars in timeline.ranks]
