"""A schedule on a transport: does it run, is it right, and how long does it take?"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.wrong_arguments import check_type
from schedlang.on_demand import on_demand
from schedlang.proof.edges import ideal_events, own_ideal_events
from schedlang.proof.events import Events
from schedlang.proof.execution import Execution
from schedlang.proof.features import check
from schedlang.proof.graph import Graph
from schedlang.proof.moments import follows_moments
from schedlang.proof.structure import check_actions, check_structure
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import timed, transports

if TYPE_CHECKING:
    from schedlang.proof.first_use import check_first_use
    from schedlang.proof.message_edges import transport_events
    from schedlang.proof.running import run_on
    from schedlang.proof.transfer_batches import check_sizes
else:
    # For batches, for transports whose communicators wait at their first use, and for schedules
    # whose actions are not in the order of their moments.
    check_sizes = on_demand("schedlang.proof.transfer_batches.check_sizes")
    check_first_use = on_demand("schedlang.proof.first_use.check_first_use")
    transport_events = on_demand("schedlang.proof.message_edges.transport_events")
    run_on = on_demand("schedlang.proof.running.run_on")


def prove(schedule: Schedule, walked: Iterable[Graph] = ()) -> Execution:
    """Check a schedule with communication in every way; CompileError with all that is wrong with
    it.

    The execution is the ideal one, see `simulate`. Its graph may be one of those that were `walked`
    before, as the lowering does: then it is not walked again. TypeError for what is no schedule.
    """
    check_type("schedule", schedule, Schedule, "a Schedule or a Plan")
    return Proof(schedule, walked).on(schedule.transport)


class Proof:
    """The proof of a schedule, as far as it is the same on every transport; CompileError for what
    is wrong on all. `walked` are graphs as of `prove`.
    """

    def __init__(self, schedule: Schedule, walked: Iterable[Graph] = ()) -> None:
        check_structure(schedule)
        check("wrong_plan", schedule)
        self.schedule = schedule
        self.ideal = own_ideal_events(schedule).among(walked)
        #: Whether its actions are in the order of their moments.
        self.runs = follows_moments(schedule, self.ideal, walked)

    def on(self, name: str) -> Execution:
        """The ideal execution, if the schedule is right on a transport."""
        # Two proofs, the quick one first. It says yes for all transports at once; where it does not
        # say yes, each transport is asked by itself:
        #
        #     in the order of their moments? ── yes ──► right
        #                  └── no ──► the event graph of the transport, walked ──► right, or why not
        schedule = self.schedule
        rules = transports(name, schedule.columns.has_batches)
        if schedule.columns.has_batches:
            check_sizes(schedule, min(transport.most for transport in rules))
        if self.runs:
            # It runs on every transport, but for what there is besides transfers.
            if any(transport.first_use for transport in rules):
                check_first_use(schedule)
        else:
            for transport in rules:
                run_on(schedule, schedule.costs, transport)
        return self._right_weights

    @cached_property
    def _right_weights(self) -> Execution:
        """The ideal execution, if every op of it reads the weights that it should."""
        check("wrong_reads", self.schedule)
        return _execution(self.schedule, self.schedule.costs, "ideal", self.ideal)


def can_run(schedule: Schedule) -> bool:
    """Whether `prove` accepts a schedule of ops once it has its communication, co-issued: that is
    right on every transport where the ops themselves are.
    """
    try:
        check_structure(schedule)
        check("wrong_reads", schedule)
    except CompileError:
        return False
    return own_ideal_events(schedule).graph.is_whole


def ideal_execution(schedule: Schedule) -> Execution | None:
    """The execution that `prove` gives, also of a schedule without communication, since transfers
    do not change it; None where ops wait for each other. Nothing else is checked.
    """
    ideal = own_ideal_events(schedule)
    if not ideal.graph.is_whole:
        return None
    return _execution(schedule, schedule.costs, "ideal", ideal)


def makespans(
    schedule: Schedule, costs: Costs, walked: Iterable[Graph]
) -> tuple[float, float]:
    """The makespans of a schedule on its transport and ideally, as of `simulate`; `walked` are
    graphs as of `prove`.
    """
    costs = costs.over(schedule.costs)
    on_transport = simulate(schedule, costs).timeline.makespan
    ideal = ideal_events(schedule, costs).among(walked)
    return on_transport, ideal.timeline().makespan


def simulate(schedule: Schedule, costs: Costs = UNIT, ideal: bool = False) -> Execution:
    """The execution with durations: an op starts when its rank is free and what it needs is there.

    Transfers go by the rules of the schedule's transport, those of a portable plan by gloo's
    (docs/transports.md, "How long transfers take"). In the `ideal` execution no transfer waits for
    another, nor a rank for its sends: only the time of `costs.transfers` counts. What `costs` leave
    open is as the program gave it. ValueError for a wrong number of costs; CompileError for a
    schedule that does not run there.
    """
    costs = costs.over(schedule.costs)
    costs.check(schedule.layout)
    check_actions(schedule)
    transport = timed(schedule.transport)
    events = run_on(schedule, costs, transport)
    if ideal:
        return _execution(schedule, costs, "ideal", ideal_events(schedule, costs))
    return _execution(schedule, costs, transport.name, events)


def makespan_at(schedule: Schedule, costs: Costs) -> float:
    """The makespan that `simulate` would give of a schedule at other costs, which was simulated at
    some before: whether it runs does not depend on them.
    """
    costs = costs.over(schedule.costs)
    return (
        transport_events(schedule, costs, timed(schedule.transport)).timeline().makespan
    )


def _execution(
    schedule: Schedule, costs: Costs, name: str, events: Events
) -> Execution:
    return Execution(name, schedule, costs, events.timeline())
