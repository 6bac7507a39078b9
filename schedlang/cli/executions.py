"""The executions that a command line asks for, simulated or recorded, and their pictures."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from schedlang.proof.execution import Execution
    from schedlang.report.views import Picture


class Executed(NamedTuple):
    """A plan that was executed, how many seconds a unit of its time has, if that is known, and what
    there is to note of a run.
    """

    plan: Plan
    execution: Execution
    seconds: float | None
    notes: tuple[str, ...] = ()


def pictures_of(options: argparse.Namespace, files: Sequence[str]) -> list[Picture]:
    """The pictures of executions, each recorded by a run, or simulated: beside a run, with the
    costs that the run shows, so that they are on one axis of time.
    """
    from schedlang.report.model_share import STAGE, at_shares
    from schedlang.report.views import lay_out

    runs = read_runs(options, files)
    found = [executed(options, file, runs) for file in files]
    executions = [each.execution for each in found]
    # Beside a run, the costs say what each stage takes.
    unit = STAGE if runs else options.unit
    costs = read_cost_options(options)
    pictures = []
    for each, (execution, share) in zip(
        found, at_shares(executions, costs, unit, options.ideal), strict=True
    ):
        with progress(f"laying out {each.plan.name}"):
            picture = lay_out(each.plan, execution, each.seconds, share)
            pictures.append(evolve(picture, notes=each.notes))
    return pictures


def read_runs(options: argparse.Namespace, files: Iterable[str]) -> dict[str, Any]:
    """The runs in those of some files that are traces."""
    from schedlang.files.file_kinds import is_trace
    from schedlang.files.reading import read_source

    runs: dict[str, Any] = {}
    others = []
    for file in files:
        if not is_trace(read_source(file).text):
            others.append(file)
            continue
        with progress(f"reading {file}"):
            runs[file] = extra("measured").read_run(file)
    if not others:
        _check_without_options(options, next(iter(runs)))
    return runs


def executed(
    options: argparse.Namespace, file: str, runs: Mapping[str, Any]
) -> Executed:
    """The execution of what is in a file, which may be one of the `runs`. Without any, a program or
    a plan has the costs in the options; beside runs, those that the first of them shows.
    """
    from schedlang.proof.prove import simulate
    from schedlang.report.views.units import SECONDS

    if file in runs:
        run = runs[file]
        notes = tuple(extra("measured").notes_of(run))
        return Executed(run.plan, run.execution(), SECONDS["us"], notes)
    if not runs:
        plan, costs = load_to_execute(options, file)
        seconds = (
            SECONDS[options.time_unit] if options.time_unit else _seconds_of(options)
        )
        with progress(f"simulating {plan.name}"):
            return Executed(plan, simulate(plan, costs, options.ideal), seconds)
    run = next(iter(runs.values()))
    plan = _plan_beside(options, file, run)
    with progress(f"simulating {plan.name}"), wrong_as_usage(options):
        execution = extra("measured").predict(plan, run, read_cost_options(options))
    # What ops take and what they hold are in units of their own: a run says nothing of memory.
    execution = evolve(execution, costs=execution.costs.over(plan.costs))
    return Executed(plan, execution, SECONDS["us"])


def _check_without_options(options: argparse.Namespace, file: str) -> None:
    """UsageError for options that mean nothing where nothing is simulated."""
    from schedlang.schedule.costs import Costs

    if options.params or read_cost_options(options) != Costs():
        raise UsageError(
            f"`{file}` is a recorded run: it is drawn as it was, without parameters and costs"
        )


def _seconds_of(options: argparse.Namespace) -> float | None:
    """How many seconds a unit of time has, if the costs say it: those of a trace do."""
    from schedlang.files.file_kinds import is_trace
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
