"""The pictures that a command line asks for: of executions that are simulated, or were recorded."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from attrs import evolve

from schedlang.cli.extra import extra
from schedlang.cli.inputs import (
    load_beside,
    load_to_execute,
    read_cost_options,
    wrong_as_usage,
)
from schedlang.cli.progress import progress
from schedlang.cli.usage import UsageError

if TYPE_CHECKING:
    from schedlang.plan.plan import Plan
    from schedlang.report.views import Picture


def pictures_of(options: argparse.Namespace, files: list[str]) -> list[Picture]:
    """The pictures of executions, each recorded by a run, or simulated: beside a run, with the
    costs that the run shows, so that they are on one axis of time.
    """
    from schedlang.files.kinds import is_trace
    from schedlang.files.reading import read_source

    runs: dict[str, Any] = {}
    for file in files:
        if is_trace(read_source(file).text):
            with progress(f"reading {file}"):
                runs[file] = extra("measured").read_run(file)
    if len(runs) == len(files):
        _check_without_options(options, files[0])
    if not runs:
        return _simulated(options, files)
    first = next(iter(runs.values()))
    return [
        _recorded(runs[file]) if file in runs else _predicted(options, file, first)
        for file in files
    ]


def _check_without_options(options: argparse.Namespace, file: str) -> None:
    """UsageError for options that mean nothing where nothing is simulated."""
    from schedlang.schedule.costs import Costs

    if options.params or read_cost_options(options) != Costs():
        raise UsageError(
            f"`{file}` is a recorded run: it is drawn as it was, without parameters and costs"
        )


def _recorded(run: Any) -> Picture:
    from schedlang.report.views import lay_out

    notes = tuple(extra("measured").notes_of(run))
    return evolve(lay_out(run.plan, run.execution()), notes=notes)


def _simulated(options: argparse.Namespace, files: list[str]) -> list[Picture]:
    """The pictures of programs and plans with the costs in the options, on one axis of time."""
    from schedlang.proof.prove import simulate
    from schedlang.report.model_share import shares_of
    from schedlang.report.views import lay_out
    from schedlang.report.views.units import SECONDS

    seconds = SECONDS[options.time_unit] if options.time_unit else _seconds_of(options)
    loaded = [load_to_execute(options, file) for file in files]
    costs = loaded[0][1]
    plans = [plan for plan, _ in loaded]
    pictures = []
    for plan, share in zip(plans, shares_of(plans, costs, options.unit), strict=True):
        with progress(f"laying out {plan.name}"):
            own = share.costs(plan, costs) if share else costs
            execution = simulate(plan, own, options.ideal)
            pictures.append(lay_out(plan, execution, seconds, share))
    return pictures


def _predicted(options: argparse.Namespace, file: str, run: Any) -> Picture:
    """The picture of a program or a plan with the costs of a run."""
    from schedlang.report.views import lay_out
    from schedlang.report.views.units import SECONDS

    plan = _plan_beside(options, file, run)
    with progress(f"laying out {plan.name}"), wrong_as_usage(options):
        execution = extra("measured").predict(plan, run, read_cost_options(options))
        # What ops take and what they hold are in units of their own: a run says nothing of memory.
        execution = evolve(execution, costs=execution.costs.over(plan.costs))
        return lay_out(plan, execution, SECONDS["us"])


def _seconds_of(options: argparse.Namespace) -> float | None:
    """How many seconds a unit of time has, if the costs say it: those of a trace do."""
    from schedlang.files.kinds import is_trace
    from schedlang.files.reading import read_source
    from schedlang.report.views.units import SECONDS

    # Of several files, or a folder, each is a trace.
    costs = options.costs or []
    is_known = len(costs) > 1 or any(
        os.path.isdir(path) or is_trace(read_source(path).text) for path in costs
    )
    return SECONDS["us"] if is_known else None


def _plan_beside(options: argparse.Namespace, file: str, run: Any) -> Plan:
    """The plan to draw beside a run: of as many updates, and for the transport in the options."""
    plan: Plan = load_beside(options, file, run)
    updates = options.updates or run.plan.layout.updates
    if plan.kernels and updates > plan.layout.updates:
        plan = plan.for_updates(updates)
    return evolve(plan, transport=options.transport) if options.transport else plan
