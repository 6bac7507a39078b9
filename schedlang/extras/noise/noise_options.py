"""The options of `schedc simulate` that make its runs vary."""

import argparse

from schedlang.cli.usage import UsageError
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.noise.noise import SEED, Noise
from schedlang.extras.noise.runs import RUNS, Runs, simulate_runs
from schedlang.extras.noise.runs_text import runs_json as runs_json
from schedlang.extras.noise.runs_text import runs_text as runs_text
from schedlang.plan.plan import Plan
from schedlang.schedule.costs import Costs


def noise_of(options: argparse.Namespace) -> Noise | None:
    """The noise in the options; None without any."""
    if not options.jitter and (options.runs is not None or options.seed is not None):
        name = "--seed" if options.runs is None else "--runs"
        raise UsageError(f"{name} is for --jitter: without it, all runs are the same")
    if not options.jitter and not options.slow:
        return None
    slow = list(options.slow.values())
    slow_ranks = {ends[0]: factor for ends, factor in slow if len(ends) == 1}
    slow_links = {ends: factor for ends, factor in slow if len(ends) == 2}
    seed = SEED if options.seed is None else options.seed
    try:
        return Noise(options.jitter or 0.0, slow_ranks, slow_links, seed)
    except ValueError as error:
        raise UsageError(str(error)) from None


def runs_of(
    plan: Plan, costs: Costs, noise: Noise, options: argparse.Namespace
) -> Runs:
    """The simulated runs of a plan with noise."""
    # Without a jitter, all runs are the same.
    count = (options.runs or RUNS) if noise.jitter else 1
    try:
        return simulate_runs(plan, noise, costs, count, options.ideal)
    except CompileError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None
