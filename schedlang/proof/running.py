"""Whether a schedule runs on a transport, by a walk over its event graph there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.on_demand import on_demand
from schedlang.proof.events import Events
from schedlang.proof.message_edges import transport_events
from schedlang.proof.order import check_order
from schedlang.proof.structure import check_structure
from schedlang.schedule.costs import Costs
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport

if TYPE_CHECKING:
    from schedlang.proof.first_use import check_first_use
    from schedlang.proof.standstill import Standstill
    from schedlang.ranks.weight_versions import follow_weights
else:
    check_first_use = on_demand("schedlang.proof.first_use.check_first_use")
    # They explain why a schedule does not run.
    Standstill = on_demand("schedlang.proof.standstill.Standstill")
    follow_weights = on_demand("schedlang.ranks.weight_versions.follow_weights")


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
    too_early = list(check_order(schedule))
    nowhere = channels.nowhere()
    repeated = list(channels.repeated())
    mismatched = list(channels.mismatched())
    comes_to_its_end = events.graph.is_whole and not len(channels.alone)
    if comes_to_its_end and not (too_early or nowhere or repeated or mismatched):
        return []
    standstill = Standstill(schedule, events, transport)
    # Of what stands behind a standstill, nothing is known yet.
    findings = [
        *standstill.reached(too_early),
        *nowhere,
        *standstill.reached(repeated),
        *standstill.met(mismatched),
    ]
    if not comes_to_its_end:
        # Of a schedule that nobody has proved, what is missing says more.
        check_structure(schedule)
        findings = findings or _late_sums(schedule)
        findings += standstill.explain(bool(findings))
    return findings


def _late_sums(schedule: Schedule) -> list[Finding]:
    """Gradients that are added behind the sum of a later update. The sums of a stage go update by
    update, so such a sum never comes.
    """
    findings = follow_weights(schedule).findings
    return [each for each in findings if each.code == "update"]
