"""A schedule on a transport: does it run, is it right, and how long does it take?"""

from collections.abc import Iterable
from functools import cached_property

from schedlang.diagnostics.arguments import check_type
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.proof.edges import ideal_events, own_ideal_events, transport_events
from schedlang.proof.events import Events
from schedlang.proof.execution import Execution
from schedlang.proof.first_use import check_first_use
from schedlang.proof.graph import Graph
from schedlang.proof.moments import follows_moments
from schedlang.proof.order import check_order
from schedlang.proof.replicas import mixed_versions
from schedlang.proof.standstill import Standstill
from schedlang.proof.structure import check_actions, check_frozen, check_structure
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.columns import Columns
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport, timed, transports


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
        check_frozen(schedule)
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
        rules = transports(name, has_batches(schedule.columns))
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
        check_versions(self.schedule)
        return _execution(self.schedule, self.schedule.costs, "ideal", self.ideal)


def can_run(schedule: Schedule) -> bool:
    """Whether `prove` accepts a schedule of ops once it has its communication, co-issued: that is
    right on every transport where the ops themselves are.
    """
    try:
        check_structure(schedule)
        check_versions(schedule)
    except CompileError:
        return False
    return own_ideal_events(schedule).graph.is_whole


def check_versions(schedule: Schedule) -> None:
    """CompileError when an op reads other weights than it should."""
    versions = follow_weights(schedule)
    findings = versions.findings or mixed_versions(schedule, versions)
    if findings:
        raise CompileError(diagnose(schedule, findings))


def ideal_execution(schedule: Schedule) -> Execution | None:
    """The execution that `prove` gives, also of a schedule without communication, since transfers
    do not change it; None where ops wait for each other. Nothing else is checked.
    """
    ideal = own_ideal_events(schedule)
    if not ideal.graph.is_whole:
        return None
    return _execution(schedule, schedule.costs, "ideal", ideal)


def has_batches(columns: Columns) -> bool:
    """Whether some transfers are issued as one."""
    return bool(columns.group[columns.is_transfer].any())


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


def run_on(schedule: Schedule, costs: Costs, transport: Transport) -> Events:
    """The events of a schedule on a transport; CompileError if it does not run there."""
    events = transport_events(schedule, costs, transport)
    findings = _findings(schedule, events, transport)
    if findings:
        raise CompileError(diagnose(schedule, findings))
    if transport.first_use:
        check_first_use(schedule)
    return events


def _findings(
    schedule: Schedule, events: Events, transport: Transport
) -> list[Finding]:
    """All that keeps a schedule from running on a transport as it should."""
    channels = events.channels
    assert channels is not None
    standstill = Standstill(schedule, events, transport)
    # Of what stands behind a standstill, nothing is known yet.
    findings = [
        *standstill.reached(check_order(schedule)),
        *channels.nowhere(),
        *standstill.reached(channels.repeated()),
        *standstill.met(channels.mismatched()),
    ]
    if not events.graph.is_whole or len(channels.alone):
        # Of a schedule that nobody has proved, what is missing says more.
        check_structure(schedule)
        # The sums of a stage go update by update: one behind that of a later update never comes.
        late = [
            each for each in follow_weights(schedule).findings if each.code == "update"
        ]
        findings = findings or late
        findings += standstill.explain(bool(findings))
    return findings


def _execution(
    schedule: Schedule, costs: Costs, name: str, events: Events
) -> Execution:
    return Execution(name, schedule, costs, events.timeline())
