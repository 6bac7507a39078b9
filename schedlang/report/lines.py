"""What the lines of a program cost: their shares of the critical path, of idle time and of the peak
memory.
"""

from __future__ import annotations

import numpy as np
from attrs import define, frozen

from schedlang.diagnostics.source import Span
from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.proof.memory import levels
from schedlang.report.bubbles.account import Account
from schedlang.report.bubbles.critical_path import Segment
from schedlang.report.bubbles.op_waits import Waits
from schedlang.schedule.kinds import Kind, op_of


@define
class Cost:
    """What ops of a program cost, in the unit of the costs: how long they run on the critical path,
    and how long it waits for them to begin; how long their ranks are idle before them; and how much
    of the peak memory they hold, on the rank that holds most.
    """

    runs: float = 0.0
    waits: float = 0.0
    idle: float = 0.0
    held: float = 0.0

    def add(self, other: Cost) -> None:
        """Add what other ops cost."""
        self.runs += other.runs
        self.waits += other.waits
        self.idle += other.idle
        self.held += other.held


@frozen
class LineCosts:
    """What the ops at each place of a program cost, of so much in all.

    `idle` is the idle time of all ranks, of which a part comes behind the last op of a rank and is
    of no place. `peak` is what `peak_rank` holds at most.
    """

    places: dict[Span, Cost]
    makespan: float
    idle: float
    peak: float
    peak_rank: int

    def within(self, span: Span) -> Cost:
        """What all ops in a piece of the program cost."""
        cost = Cost()
        for place, of_place in self.places.items():
            if span.start <= place.start and place.end <= span.end:
                cost.add(of_place)
        return cost


def line_costs(plan: Plan, execution: Execution) -> LineCosts:
    """What the places of a plan's program cost in an execution of it."""
    account = Account(execution)
    all_waits = account.waits
    source = plan.columns.source.tolist()
    places = {plan.spans[number]: Cost() for number in sorted(set(source))}
    by_source = {number: places[plan.spans[number]] for number in set(source)}
    of_step = [by_source[source[head]] for head in all_waits.head.tolist()]
    _add_path(account.path, plan, by_source)
    idle = _add_idle(all_waits, of_step)
    peak_rank, peak = _add_memory(plan, execution, by_source)
    return LineCosts(places, execution.timeline.makespan, idle, peak, peak_rank)


def _add_path(path: list[Segment], plan: Plan, by_source: dict[int, Cost]) -> None:
    """Add the critical path; ops that overlap are of the place of the first of them."""
    for segment in path:
        step = segment.step
        cost = by_source[plan.ranks[step.rank].source[step.rows.start]]
        if segment.kind in ("op", "copy"):
            cost.runs += segment.length
        else:
            cost.waits += segment.length


def _add_idle(all_waits: Waits, of_step: list[Cost]) -> float:
    """Add the idle time before each step; all idle time."""
    idle = 0.0
    for rank in range(len(all_waits.first) - 1):
        steps = int(all_waits.first[rank + 1] - all_waits.first[rank])
        index, begin, end = all_waits.gaps(rank)
        for number, length in zip(index.tolist(), (end - begin).tolist(), strict=True):
            idle += length
            if number < steps:
                of_step[int(all_waits.first[rank]) + number].idle += length
    return idle


def _add_memory(
    plan: Plan, execution: Execution, by_source: dict[int, Cost]
) -> tuple[int, float]:
    """Add what is held when the rank with the highest peak comes to it: each microbatch of a stage
    is of the place of its forward, and gathered weights of that of the last gather of the stage;
    that rank, and what it holds.
    """
    amounts = execution.costs.memory(plan.layout)
    all_levels = levels(plan, execution.timeline, amounts)
    rank = max(range(len(all_levels)), key=lambda rank: all_levels[rank].peak)
    level = all_levels[rank]
    if not len(level.amounts):
        return rank, level.peak
    made: dict[tuple[int, int], int] = {}
    # What it keeps for others was made by them.
    for actions in (plan.ranks[each] for each in (rank, *plan.layout.kept_by(rank))):
        columns = (actions.kind, actions.stage, actions.microbatch, actions.source)
        made |= {
            (stage, microbatch): source
            for kind, stage, microbatch, source in zip(*columns, strict=True)
            if kind == Kind.F or op_of(kind).weights == "bring"
        }
    # Changes of what is held, up to the moment at which it is most.
    until = int(np.argmax(level.amounts)) + 1
    changes = np.diff(level.amounts[:until], prepend=level.first).tolist()
    ops = zip(
        level.stages[:until].tolist(), level.microbatches[:until].tolist(), strict=True
    )
    for op, change in zip(ops, changes, strict=True):
        if op in made:
            by_source[made[op]].held += change
    return rank, level.peak
