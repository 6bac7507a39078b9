"""Choose the fastest lowering of a program, among those that run on its transport."""

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
    from schedlang.lowering.without_flush import lower_stream
else:
    # For schedules without a flush.
    lower_stream = on_demand("schedlang.lowering.without_flush.lower_stream")

#: A makespan must be below this share of another one to be shorter, since sums of times are
#: rounded.
_SAME = 1 - 1e-9


@frozen
class Choice:
    """A schedule with its communication, and the repeating part of each rank (`kernels`); the name
    of its lowering, and all trials; and the event graphs that were walked to place its transfers.
    """

    schedule: Schedule
    kernels: tuple[Kernel, ...]
    name: str
    trials: tuple[Trial, ...] = ()
    walked: Sequence[Graph] = field(default=(), repr=False)


def choose_lowering(schedule: Schedule, costs: Costs) -> Choice:
    """The schedule with the program's own communication, or with that of the lowering whose
    makespan on the transport is the shortest.

    The makespan is computed with `costs`, completed by the program's. Among equals the simplest
    lowering is chosen, and none is tried after one that reaches the ideal makespan. A lowering that
    deadlocks on the transport is not chosen; if the co-issued one does, the ops cannot run at all,
    and its proof will say why.
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
    """A changed lowering and its kernels. A stream is lowered again, for as many updates as the
    change needs to repeat itself. CompileError if it does not run.
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
    """The first choice, or a faster one; all are timed for as many updates as the first one has."""
    # No lowering is faster than the ideal, in which no transfer waits for another one.
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
