"""The commands that compare schedules, and say why they take as long as they do."""

from __future__ import annotations

import argparse

from schedlang.cli.extra import extra
from schedlang.cli.inputs import (
    load_beside,
    load_to_execute,
    read_cost_options,
    wrong_as_usage,
)
from schedlang.cli.printing import text_or_json
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, UsageError

#: Options of `schedc compare` that mean something with `--diff` alone, and where their values are.
_OF_DIFFERENCES = {"-a": "params_a", "-b": "params_b", "--compute": "compute"}


def explain_bubble(options: argparse.Namespace) -> int:
    """Print the causes of idle time, the critical path, and what a faster op would give."""
    from schedlang.report.bubbles.explanation import (
        explain_bubble,
        explanation_json,
        explanation_text,
    )

    plan, costs = load_to_execute(options)
    with progress(f"explaining the idle time of {plan.name}"):
        explanation = explain_bubble(plan, costs)
    print(text_or_json(options, explanation, explanation_text, explanation_json))
    return FINE


def compare(options: argparse.Namespace) -> int:
    """Print the figures of several schedules in one table; or what differs between two; or the
    figures of one schedule, predicted and measured.
    """
    from schedlang.files.file_kinds import is_trace
    from schedlang.files.reading import read_source
    from schedlang.report.compare import compare, comparison_json, comparison_text

    if options.diff:
        return int(extra("difference.diff_command").diff(options))
    for name, value in _OF_DIFFERENCES.items():
        if getattr(options, value):
            raise UsageError(f"{name} is for --diff, of two schedules")
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
        entries = compare(
            options.files,
            options.params,
            costs,
            options.transport,
            options.updates,
            options.unit,
        )
    options.wrong += [wrong for entry in entries for wrong in entry.wrong]
    if options.sort == "makespan":
        entries.sort(key=lambda entry: entry.makespan)
    print(text_or_json(options, entries, comparison_text, comparison_json))
    return FINE


def _compare_with_run(options: argparse.Namespace, traces: list[str]) -> int:
    """Print what was predicted beside what was measured; write the costs that the run shows."""
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
    measured = extra("measured")
    run = measured.read_run(options.files[1])
    plan = load_beside(options, options.files[0], run)
    with wrong_as_usage(options):
        comparison = measured.compare(plan, run, read_cost_options(options))
    # Only now is it known that the run is one of this plan.
    if options.write_costs:
        write_document(run.costs.to_json(), options.write_costs)
    as_text, as_json = measured.comparison_text, measured.comparison_json
    print(text_or_json(options, comparison, as_text, as_json))
    return FINE
