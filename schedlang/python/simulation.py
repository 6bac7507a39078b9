"""The execution of whatever a script has: a plan, its file, or a program."""

from collections.abc import Mapping
from pathlib import Path

from attrs import evolve

from schedlang.compiler import NO_PARAMS
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_flag, check_params
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate as execute
from schedlang.python.plans import plan_of
from schedlang.schedule.costs import UNIT, Costs, check_costs
from schedlang.schedule.schedule import Schedule


def simulate(
    schedule: Schedule | Source | str | Path,
    costs: Costs = UNIT,
    ideal: bool = False,
    *,
    params: Mapping[str, int] = NO_PARAMS,
    transport: str | None = None,
) -> Execution:
    """The execution of a schedule with durations: an op starts when its rank is free and what it
    needs is there.

    `schedule` is a plan, or what `compile` and `read_plan` take: a program, for some `params`, by
    its path or text, which is compiled for these costs; or the path of a plan's file.

    Times are in the unit of `costs`; what these leave open is as the program gave it, or else a
    unit cost: a forward is 1, a whole backward 2. Transfers go by the rules of the schedule's
    transport, or of another one if `transport` names it, those of a portable plan by gloo's
    (docs/transports.md, "How long transfers take"). In the `ideal` execution no transfer waits for
    another, nor a rank for its sends: only the time of the transfers counts.

    CompileError for a schedule that does not run there; TypeError or ValueError names a wrong
    argument, such as costs of another number of stages.
    """
    return execute(compiled(schedule, costs, ideal, params, transport), costs, ideal)


def compiled(
    schedule: Schedule | Source | str | Path,
    costs: Costs,
    ideal: bool,
    params: Mapping[str, int],
    transport: str | None,
) -> Schedule:
    """What is to be simulated, with its transport; errors for wrong arguments."""
    check_params("params", params)
    check_costs(costs)
    check_flag("ideal", ideal)
    if not isinstance(schedule, Schedule):
        schedule = plan_of(schedule, params, costs, name="schedule")
    elif params:
        raise ValueError(
            "`params` are those of a program, `schedule` is one that was compiled"
        )
    if transport is not None:
        schedule = evolve(schedule, transport=transport)
    return schedule
