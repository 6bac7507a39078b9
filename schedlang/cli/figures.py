"""The commands that compare schedules, and say why they take as long as they do."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from schedlang.cli.diagnosed import has_colour, print_diagnostics
from schedlang.cli.inputs import (
    load_beside,
    load_to_execute,
    read_cost_options,
    wrong_as_usage,
)
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, USAGE, WRONG, UsageError
from schedlang.diagnostics.diagnostic import CompileError

if TYPE_CHECKING:
    from schedlang.extras.difference.difference import Side


def explain_bubble(options: argparse.Namespace) -> int:
    """Print the causes of idle time, the critical path, and what a faster op would give."""
    from schedlang.report.bubbles.report import (
        explain_bubble,
        explanation_json,
        explanation_text,
    )

    plan, costs = load_to_execute(options)
    with progress(f"explaining the idle time of {plan.name}"):
        explanation = explain_bubble(plan, costs)
    if options.format == "json":
        print(json.dumps(explanation_json(explanation)))
    else:
        print(explanation_text(explanation))
    return FINE


def compare(options: argparse.Namespace) -> int:
    """Print the figures of several schedules in one table; or those of one schedule, predicted and
    measured.
    """
    from schedlang import read_source
    from schedlang.extras.measured import is_trace
    from schedlang.report.compare import compare, comparison_json, comparison_text

    # With a trace among the files, a schedule is compared with a run of it.
    traces = [file for file in options.files if is_trace(read_source(file).text)]
    if traces:
        return _compare_with_run(options, traces)
    if options.write_costs:
        raise UsageError(
            "--write-costs writes what a recorded run shows: schedc compare PLAN RUN.json"
        )
    costs = read_cost_options(options)
    with progress("comparing"), wrong_as_usage(options):
        entries = compare(options.files, options.params, costs, options.transport)
    if options.sort == "makespan":
        entries.sort(key=lambda entry: entry.makespan)
    if options.format == "json":
        print(json.dumps(comparison_json(entries)))
    else:
        print(comparison_text(entries))
    return FINE


def diff(options: argparse.Namespace) -> int:
    """Print what differs between two schedules; the exit code is that of diff(1)."""
    from schedlang.diagnostics.style import Style
    from schedlang.extras.difference.difference import differ
    from schedlang.extras.difference.document import difference_json
    from schedlang.extras.difference.text import difference_text

    try:
        sides = [_side(options, *each) for each in _chosen(options)]
    except CompileError as error:
        # An exit code of 1 says that there are two schedules, and that they differ.
        print_diagnostics(error.diagnostics, options)
        return USAGE
    with progress("comparing"):
        found = differ(sides[0], sides[1], options.compute)
        if options.format == "json":
            text = json.dumps(difference_json(found))
        else:
            text = difference_text(found, Style(has_colour(options, sys.stdout)))
    print(text)
    return FINE if found.is_equal else WRONG


def _chosen(options: argparse.Namespace) -> list[tuple[str, dict[str, int]]]:
    """The two files of `diff`, each with the parameters that are meant for it."""
    from schedlang import read_source
    from schedlang.report.compare import params_of_each

    files = [options.file, options.other]
    try:
        shared = params_of_each(list(map(read_source, files)), options.params)
    except ValueError as error:
        raise UsageError(str(error)) from None
    own = {"-a": options.params_a, "-b": options.params_b}
    chosen = []
    for file, params, (option, own_params) in zip(
        files, shared, own.items(), strict=True
    ):
        if in_both := own_params.keys() & options.params.keys():
            raise UsageError(
                f"`{min(in_both)}` has a -p and a {option}: give one of them"
            )
        chosen.append((file, params | own_params))
    return chosen


def _side(options: argparse.Namespace, file: str, params: dict[str, int]) -> Side:
    """One of the two schedules of `diff`, simulated."""
    from schedlang.extras.difference.difference import side_of

    plan, costs = load_to_execute(options, file, params=params, takes_tables=True)
    with progress(f"simulating {plan.name}"):
        return side_of(file, plan, costs)


def _compare_with_run(options: argparse.Namespace, traces: list[str]) -> int:
    """Print what was predicted beside what was measured; write the costs that the run shows."""
    from schedlang.extras.measured import (
        compare,
        comparison_json,
        comparison_text,
        read_run,
    )
    from schedlang.files.documents import write_document

    # One program or plan, and behind it one trace.
    if len(options.files) != 2 or options.files[1:] != traces:
        raise UsageError(
            "a recorded run is compared with its program or plan: schedc compare PLAN RUN.json"
        )
    if options.transport:
        raise UsageError(
            "--transport is for what is simulated, a run is compared as it was"
        )
    run = read_run(options.files[1])
    plan = load_beside(options, options.files[0], run)
    with wrong_as_usage(options):
        comparison = compare(plan, run, read_cost_options(options))
    # Only now is it known that the run is one of this plan.
    if options.write_costs:
        write_document(run.costs.to_json(), options.write_costs)
    if options.format == "json":
        print(json.dumps(comparison_json(comparison)))
    else:
        print(comparison_text(comparison))
    return FINE
