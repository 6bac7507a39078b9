"""What every op of an execution waited for, and the chain of ops and waits that makes it as long as
it is.
"""

from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

import numpy as np
from attrs import define, field

from schedlang.proof.edges import latencies
from schedlang.schedule.actions import is_copy, is_transfer
from schedlang.schedule.costs import Costs
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Timeline

#: Times that differ by this part of the makespan are equal.
ROUNDING = 1e-9


@define(eq=False)
class Step:
    """An op, or ops that overlap, or a copy, as it ran: on `rank`, the rows `rows` of its actions.

    `index` counts the steps of a rank before it, or of a copy, those before the next one. `needs`
    are the steps whose results it needs, each with the time that these take to arrive. `before` are
    those that kept what it runs on: the step before it on its rank, or the copy before it on its
    link.
    """

    rank: int
    index: int
    rows: range
    start: float
    end: float
    is_copy: bool
    needs: list[tuple["Step", float]] = field(factory=list, repr=False)
    before: list["Step"] = field(factory=list, repr=False)

    def latest(self) -> tuple["Step", float] | None:
        """The step whose result arrived last, and when it did."""
        arrivals = ((step, step.end + latency) for step, latency in self.needs)
        return max(arrivals, key=lambda arrival: arrival[1], default=None)


@define
class Waits:
    """The steps of an execution of a schedule: those of each rank in order, without its copies.

    Where a step index of a rank is asked for, one past its last step stands for the end of the
    whole execution, for which every rank waits.
    """

    schedule: Schedule
    ranks: list[list[Step]]
    makespan: float
    starts: list[list[float]] = field(init=False)
    #: The step that ends last.
    last: Step = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.starts = [[step.start for step in steps] for steps in self.ranks]
        self.last = max((step for steps in self.ranks for step in steps), key=attrgetter("end"))

    def gaps(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """The idle time of a rank: the index of the step that it waits with, from when, until
        when.
        """
        ends = [0.0, *(step.end for step in self.ranks[rank])]
        starts = [*(step.start for step in self.ranks[rank]), self.makespan]
        for index, (start, end) in enumerate(zip(ends, starts, strict=True)):
            if end - start > ROUNDING * self.makespan:
                yield index, start, end

    def latest(self, rank: int, index: int) -> tuple[Step | None, float]:
        """The step that a step of a rank waited for last, and when its result was there; for the
        end, the last step.
        """
        if index == len(self.ranks[rank]):
            return self.last, self.makespan
        return self.ranks[rank][index].latest() or (None, 0.0)


def waits(schedule: Schedule, timeline: Timeline, costs: Costs) -> Waits:
    """What the ops of a schedule with communication waited for, in an execution that was simulated
    with some costs.
    """
    ranks, links = _steps(schedule, timeline)
    step_of: dict[int, Step] = {}
    for step in [step for steps in (*ranks, *links) for step in steps]:
        first = int(schedule.columns.first[step.rank])
        step_of.update((first + index, step) for index in step.rows)
    table = latencies(
        schedule.layout, costs.over(schedule.costs).transfers(len(schedule.placement))
    )
    needs = schedule.needs
    items = np.flatnonzero(~schedule.columns.is_transfer[needs.user])
    items = items[np.argsort(needs.user[items], kind="stable")]
    made = needs.made[items]
    number = needs.number[items]
    is_message = needs.is_message[items]
    delay = np.zeros(len(items))
    delay[is_message] = table[made[is_message], number[is_message]]
    columns = needs.user[items], needs.maker[items], delay
    for user, maker, latency in zip(*(column.tolist() for column in columns), strict=True):
        if step_of[maker] is not step_of[user]:
            step_of[user].needs.append((step_of[maker], latency))
    for steps in (*ranks, *links):
        for earlier, later in pairwise(steps):
            later.before.append(earlier)
    return Waits(schedule, ranks, timeline.makespan)


def _steps(schedule: Schedule, timeline: Timeline) -> tuple[list[list[Step]], list[list[Step]]]:
    """The steps of every rank in order, and the copies of every link to the host."""
    ranks: list[list[Step]] = []
    links: dict[int, list[Step]] = {}
    for rank, actions in enumerate(schedule.ranks):
        bars = iter(timeline.ranks[rank])
        copies = iter(timeline.copies[rank] if timeline.copies else ())
        steps: list[Step] = []
        for batch in actions.batches():
            kind = actions.kind[batch.start]
            if is_copy(kind):
                bar = next(copies)
                step = Step(rank, len(steps), batch, bar.start, bar.end, True, before=steps[-1:])
                links.setdefault(
                    schedule.layout.links[rank] if schedule.layout.links else rank, []
                ).append(step)
            elif not is_transfer(kind):
                taken = [next(bars) for _ in batch]
                steps.append(Step(rank, len(steps), batch, taken[0].start, taken[-1].end, False))
        ranks.append(steps)
    return ranks, [sorted(each, key=attrgetter("start")) for each in links.values()]
