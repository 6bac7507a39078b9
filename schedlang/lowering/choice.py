"""The lowering of a program for its transport: of those that are right there, the one that takes
the least time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.lowering import (
    CO_ISSUED,
    OWN,
    Lowering,
    alternatives,
    lower,
    writes_communication,
)
from schedlang.on_demand import on_demand
from schedlang.proof.graph import Graph
from schedlang.proof.moments import global_events
from schedlang.proof.prove import makespans, simulate
from schedlang.schedule.costs import Costs
from schedlang.schedule.schedule import Kernel, Schedule, Trial

if TYPE_CHECKING:
    from schedlang.lowering.stream import lower_stream
else:
    # For schedules without a flush.
    lower_stream = on_demand("schedlang.lowering.stream.lower_stream")

#: Makespans of which one is this much of the other, or more, are the same: sums of times are
#: rounded.
_SAME = 1 - 1e-9


@frozen
class Choice:
    """A schedule with its communication, and what of it repeats; the name of its lowering, and all
    that were tried; and the graphs that were walked to place its transfers.
    """

    schedule: Schedule
    kernels: tuple[Kernel, ...]
    name: str
    trials: tuple[Trial, ...] = ()
    walked: Sequence[Graph] = field(default=(), repr=False)


def choose_lowering(schedule: Schedule, costs: Costs) -> Choice:
    """The schedule with its communication: its own, or that of the fastest lowering for its
    transport.

    Fastest is the least makespan there, for the costs, and where they leave something open, the
    program's. Of equals it is the simplest, and once one takes no longer than the ideal, no other
    is tried. What does not run on its transport is not chosen; where the co-issued lowering does
    not, the ops cannot run at all, as its proof will say.
    """
    own = writes_communication(schedule)
    name = OWN if own else CO_ISSUED
    walked: list[Graph] = []

    def lowering(ops: Schedule) -> Schedule:
        if own:
            return lower(ops)
        events = global_events(ops)
        walked.append(events.graph)
        return lower(ops, events)

    if schedule.stream:
        first = Choice(*lower_stream(schedule, lowering), name, walked=walked)
    else:
        first = Choice(lowering(schedule), (), name, walked=walked)
    others = {} if own else alternatives(schedule.transport)
    return _fastest(schedule, first, others, costs) if others else first


def _changed(
    schedule: Schedule, changed: Schedule, change: Lowering
) -> tuple[Schedule, tuple[Kernel, ...]]:
    """A changed lowering; of a stream, for as many updates as show that one whole; CompileError if
    it does not run.
    """
    if not schedule.stream:
        return changed, ()
    # A change may need more updates until it repeats itself than the co-issued one did.
    whole, kernels = lower_stream(schedule, lambda unrolled: change(lower(unrolled)))
    simulate(whole)
    return whole, kernels


def _fastest(
    schedule: Schedule, first: Choice, others: dict[str, Lowering], costs: Costs
) -> Choice:
    """The first choice, or another one that takes less time; all are timed for as many updates as
    the first shows.
    """
    # No lowering takes less than the ideal, in which no transfer waits for another one, so nothing
    # more is tried once that is reached.
    try:
        least, ideal = makespans(first.schedule, costs, first.walked)
    except CompileError:
        return first
    best = first
    trials = [Trial(first.name, least)]
    for name, change in others.items():
        if ideal >= least * _SAME:
            break
        doing(f"{schedule.name}: trying transfers {name}", len(trials), len(others) + 1)
        try:
            changed = change(first.schedule)
            makespan = simulate(changed, costs).timeline.makespan
            if makespan < least * _SAME:
                lowered, kernels = _changed(schedule, changed, change)
                best = evolve(first, schedule=lowered, kernels=kernels, name=name)
                least = makespan
            trials.append(Trial(name, makespan))
        except CompileError as error:
            trials.append(Trial(name, wrong=error.diagnostics[0].code))
    return evolve(best, trials=tuple(trials))
