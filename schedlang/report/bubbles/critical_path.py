"""The chain of ops and waits that makes an execution as long as it is."""

from attrs import frozen

from schedlang.report.bubbles.op_waits import NOTHING, ROUNDING, Step, Waits
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


@frozen
class Segment:
    """A part of the critical path: an `op` or a `copy` that runs; or the time from the end of one
    to the next, `step`.

    That is a `transfer` on its way from rank `sender`, or the `transport`, which holds back what
    would be there; or a `collective`, the sum or the gather that it waits for.
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
    number = waits.last
    last = waits.steps[number]
    # From the end back to the start: behind the last op there may be a sum of gradients.
    segments = _that_last(
        [Segment("collective", last.end, waits.makespan, last, last.rank)], waits
    )
    while number != NOTHING:
        step = waits.steps[number]
        segments.append(
            Segment(
                "copy" if step.is_copy else "op", step.start, step.end, step, step.rank
            )
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
    # What kept the rank busy longest counts, where that is later than what it waited for.
    if before != NOTHING and (maker == NOTHING or waits.ends[before] >= arrival):
        maker = before
        arrival = float(waits.ends[before])
    made = 0.0
    sender = step.rank
    if maker != NOTHING:
        made = waits.steps[maker].end
        sender = waits.steps[maker].rank
    # What is summed or gathered for the step goes on until it is over, if that is later.
    begun = min(max(float(waits.held_from[number]), arrival), step.start)
    over = min(max(float(waits.held_to[number]), begun), step.start)
    # Between the two steps, in time; some of these take none:
    #
    #     made ─ transfer ─► arrival ─ transport ─► begun ─ collective ─► over ─ transport ─► start
    waited = [
        Segment("transport", over, step.start, step, sender),
        Segment("collective", begun, over, step, sender),
        Segment("transport", arrival, begun, step, sender),
        Segment("transfer", made, arrival, step, sender),
    ]
    return _that_last(waited, waits), maker


def _that_last(segments: list[Segment], waits: Waits) -> list[Segment]:
    """Those that take any time."""
    return [
        segment for segment in segments if segment.length > ROUNDING * waits.makespan
    ]
