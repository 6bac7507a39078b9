"""The chain of ops and waits that makes an execution as long as it is."""

from attrs import frozen

from schedlang.report.bubbles.waits import NOTHING, ROUNDING, Step, Waits
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


@frozen
class Segment:
    """A part of the critical path: an `op` or a `copy` that runs; or the time from the end of one
    to the next, `step`.

    That is a `transfer` on its way from rank `sender`, or the `transport`, which holds back what
    would be there.
    """

    kind: str
    start: float
    end: float
    step: Step
    sender: int

    @property
    def length(self) -> float:
        """How long it takes."""
        return self.end - self.start


def critical_path(waits: Waits) -> list[Segment]:
    """From the first start to the last end without a gap: before each step, the one that it waited
    for longest.
    """
    segments: list[Segment] = []
    number = waits.last
    while number != NOTHING:
        step = waits.steps[number]
        segments.append(
            Segment("copy" if step.is_copy else "op", step.start, step.end, step, step.rank)
        )
        parts, number = _before(waits, number)
        segments += parts
    return segments[::-1]


def path_by_ops(schedule: Schedule, path: list[Segment]) -> dict[str, float]:
    """The time that a critical path spends in each kind of op, in ops that overlap, and in
    waits.
    """
    times: dict[str, float] = {}
    for segment in path:
        actions = schedule.ranks[segment.step.rank]
        rows = segment.step.rows
        name = segment.kind
        if name in ("op", "copy"):
            name = "overlap" if len(rows) > 1 else Kind(actions.kind[rows.start]).name
        times[name] = times.get(name, 0.0) + segment.length
    return times


def _before(waits: Waits, number: int) -> tuple[list[Segment], int]:
    """The step before one on the path, and what lies between them, the latest first."""
    step = waits.steps[number]
    maker = int(waits.maker[number])
    arrival = float(waits.arrival[number])
    before = int(waits.before[number])
    if before != NOTHING and (maker == NOTHING or waits.ends[before] >= arrival):
        maker = before
        arrival = float(waits.ends[before])
    made = 0.0
    sender = step.rank
    if maker != NOTHING:
        made = waits.steps[maker].end
        sender = waits.steps[maker].rank
    waited = [(arrival, step.start, "transport"), (made, arrival, "transfer")]
    return [
        Segment(kind, start, end, step, sender)
        for start, end, kind in waited
        if end - start > ROUNDING * waits.makespan
    ], maker
