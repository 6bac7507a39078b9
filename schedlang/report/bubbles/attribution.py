"""Why ranks are idle: every moment of idle time has one cause; docs/bubbles.md says what each
means.
"""

from statistics import fmean

from attrs import define, field, frozen

from schedlang.report.bubbles.alternatives import Alternatives
from schedlang.report.bubbles.reasons import Reason, reasons
from schedlang.report.bubbles.waits import ROUNDING, Step, Waits
from schedlang.schedule.costs import Costs, Durations

#: The causes, in the order in which they are shown, and what each means.
CAUSES = {
    "fill": "nothing to run yet, before the rank's first backward",
    "drain": "nothing to run any more, after the rank's last forward",
    "dependency": "nothing to run in between: waits for an op of that stage",
    "imbalance": "waits for an op of that stage, beyond its average over the stages",
    "memory": "a later op could run here, but the rank would hold more than its peak",
    "order": "a later op could run here, and the rank would hold no more than its peak",
    "transfer": "what it waits for is on its way between those ranks",
    "transport": "what it waits for could be there: the transport holds it, or the rank, back",
    "copy": "what it waits for comes from the host",
}


@frozen
class Idle:
    """A part of a rank's idle time and its cause; `subject` has the stage or the ranks that the
    cause is about.

    `behind` is the step at the end of the chain of waits: it runs, or its result is on its way.
    """

    rank: int
    start: float
    end: float
    cause: str
    behind: Step
    subject: tuple[int, ...] = ()

    @property
    def length(self) -> float:
        """How long it is."""
        return self.end - self.start


def bubbles(waits: Waits, costs: Costs) -> list[Idle]:
    """The idle time of every rank from the first start to the last end, in pieces of one cause
    each.

    `costs` are those that the execution was simulated with.
    """
    costs = costs.over(waits.schedule.costs)
    even = _even(costs.durations(len(waits.schedule.placement)))
    found: list[Idle] = []
    for rank in range(len(waits.ranks)):
        causes = _Causes(waits, rank, even, Alternatives(waits, rank, costs))
        for gap in waits.gaps(rank):
            causes.gap(*gap)
        found += sorted(causes.found, key=lambda idle: idle.start)
    return found


def _even(durations: Durations) -> Durations:
    """Durations as they would be if all stages were alike."""
    overlap = durations.overlap and [fmean(durations.overlap)] * len(durations.overlap)
    return Durations(
        {kind: [fmean(each)] * len(each) for kind, each in durations.by_kind.items()}, overlap
    )


@define
class _Causes:
    """The causes of a rank's idle time found so far."""

    waits: Waits
    rank: int
    even: Durations
    alternatives: Alternatives
    found: list[Idle] = field(factory=list)

    def gap(self, index: int, start: float, end: float) -> None:
        """Find the causes of a rank's wait with one of its steps, or with the end of all."""
        could_run = self.alternatives.between(index, start, end)
        for reason in reasons(self.waits, self.rank, index, start, end):
            match reason.kind:
                case "op":
                    self.waits_for_op(index, reason, could_run)
                case "copy":
                    self.add(
                        reason,
                        reason.start,
                        reason.end,
                        "copy",
                        (reason.step.rank, reason.receiver),
                    )
                case cause:
                    self.add(
                        reason, reason.start, reason.end, cause, (reason.step.rank, reason.receiver)
                    )

    def waits_for_op(self, index: int, reason: Reason, could_run: dict[str, float]) -> None:
        """Find the causes while an op runs that is behind the wait; `could_run` is from when
        another op could.
        """
        step = reason.step
        actions = self.waits.schedule.ranks[reason.step.rank]
        ops = [actions.row(row) for row in step.rows]
        beyond = min(max(step.start + self.even.ends(ops)[-1], reason.start), reason.end)
        if step.end - step.start <= self.even.ends(ops)[-1] * (1 + ROUNDING):
            beyond = reason.end
        stage = (ops[0][1],)
        self.add(reason, beyond, reason.end, "imbalance", stage)
        end = beyond
        for cause in ("order", "memory"):
            start = max(could_run.get(cause, end), reason.start)
            self.add(reason, start, end, cause)
            end = min(end, start)
        phase = self.phase(index)
        self.add(reason, reason.start, end, phase, stage if phase == "dependency" else ())

    def phase(self, index: int) -> str:
        """What keeps a rank from having anything to run before one of its steps."""
        if index > self.alternatives.last_forward:
            return "drain"
        return "fill" if index <= self.alternatives.first_backward else "dependency"

    def add(
        self, reason: Reason, start: float, end: float, cause: str, subject: tuple[int, ...] = ()
    ) -> None:
        """Note a cause, if it lasts at all."""
        if start < end:
            self.found.append(Idle(self.rank, start, end, cause, reason.step, subject))
