"""The part of the model that a stage is, so that schedules with different numbers of stages stand
on one axis of time.

A cost without a list is that of an op on any stage. But a stage of eight is half of one of four,
and its ops take half as long: beside each other, the schedules are executed with costs that say so.
"""

from collections.abc import Sequence
from fractions import Fraction

from attrs import frozen

from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.report.changed_costs import resized
from schedlang.schedule.costs import Costs
from schedlang.schedule.schedule import Schedule

#: What one unit of time is, where costs say no more: a part of the model, or any stage.
MODEL = "model"
STAGE = "stage"


@frozen
class Share:
    """A stage is one of `stages` of the model. On the axis, the costs are those of a stage that is
    one of `unit`.
    """

    stages: int
    unit: int

    @property
    def factor(self) -> Fraction:
        """How long an op takes on the axis, in times that the costs give."""
        return Fraction(self.unit, self.stages)

    @property
    def text(self) -> str:
        """What a stage is and takes, for beside a makespan."""
        part = f"a stage is 1/{self.stages} of the model"
        if self.factor == 1:
            return part
        return f"{part} and takes {self.factor} of the time of 1/{self.unit}"

    @property
    def axis(self) -> str:
        """What the axis counts, in a few letters."""
        return f"of 1/{self.unit} model"

    def costs(self, plan: Schedule, costs: Costs) -> Costs:
        """Costs with the durations that the plan's ops have on the axis."""
        every = costs.over(plan.costs)
        return every if self.factor == 1 else resized(every, self.factor, plan.layout)


def shares_of(
    plans: Sequence[Schedule], costs: Costs, unit: str = MODEL
) -> list[Share | None]:
    """For each plan the part of the model that its stages are; None where the plans compare as they
    are, for a plan whose costs say for each stage what that takes, and where a stage is the `unit`.
    """
    if unit == STAGE:
        return [None] * len(plans)
    pieces = [
        plan.layout.pieces if costs.over(plan.costs).are_of_any_stage else None
        for plan in plans
    ]
    of_any = {each for each in pieces if each is not None}
    if len(of_any) < 2:
        return [None] * len(plans)
    return [None if each is None else Share(each, min(of_any)) for each in pieces]


def at_shares(
    executions: Sequence[Execution],
    costs: Costs,
    unit: str = MODEL,
    ideal: bool = False,
) -> list[tuple[Execution, Share | None]]:
    """Executions of plans at some costs as they are on one axis, and what stages are there."""
    plans = [execution.schedule for execution in executions]
    found: list[tuple[Execution, Share | None]] = []
    for execution, plan, share in zip(
        executions, plans, shares_of(plans, costs, unit), strict=True
    ):
        if share is not None and share.factor != 1:
            execution = simulate(plan, share.costs(plan, costs), ideal)
        found.append((execution, share))
    return found
