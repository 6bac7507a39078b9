"""Many runs of whatever a script has: a plan, its file, or a program."""

from collections.abc import Mapping
from pathlib import Path

from schedlang.compiler import NO_PARAMS
from schedlang.diagnostics.source import Source
from schedlang.extras.noise.noise import Noise
from schedlang.extras.noise.runs import RUNS, Runs, check_runs
from schedlang.extras.noise.runs import simulate_runs as execute_runs
from schedlang.python.simulation import compiled
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.schedule import Schedule


def simulate_runs(
    schedule: Schedule | Source | str | Path,
    noise: Noise,
    costs: Costs = UNIT,
    runs: int = RUNS,
    ideal: bool = False,
    *,
    params: Mapping[str, int] = NO_PARAMS,
    transport: str | None = None,
) -> Runs:
    """The makespans of a schedule in many runs with noise, in which ops and transfers take longer
    or shorter than the costs say, and some ranks and links are slow (docs/costs.md).

    All arguments but `noise` and `runs` are those of `simulate`; the same call gives the same runs.
    The order of ops, and what waits for what, are those of the plan in every run. All runs are
    walked at once, which is far faster than as many simulations.

    CompileError and errors of wrong arguments are as of `simulate`; ValueError as well for noise of
    a rank or a link that the schedule does not have, or of a link whose transfers take no time.
    """
    check_runs(noise, runs)
    plan = compiled(schedule, costs, ideal, params, transport)
    return execute_runs(plan, noise, costs, runs, ideal)
