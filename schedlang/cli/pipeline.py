"""`schedc pipeline`, in the place of a public visualizer of pipeline schedules."""

import argparse
import sys
from typing import Any

from attrs import evolve

from schedlang.cli.given import UsageError

#: The options that are keys of the settings as well.
_KEYS = {
    "num_stages": "num_stages",
    "num_batches": "num_batches",
    "forward_times": "forward_times",
    "backward_times": "backward_times",
    "p2p_time": "p2p_time",
    "output": "output_file",
}


def pipeline(options: argparse.Namespace) -> int:
    """Print a strategy's timeline and its bubble rate."""
    from schedlang import simulate
    from schedlang.report.pipeline_tool import quirky_bubble_rate, quirky_timeline
    from schedlang.report.views.table import table

    settings = _settings(options)
    plan = settings.plan()
    costs = settings.costs
    execution = simulate(plan, costs)
    rate = execution.timeline.bubble_over_ideal
    if options.compat:
        execution = evolve(
            execution, timeline=quirky_timeline(plan, costs, gaps=options.compat == "sync")
        )
        rate = quirky_bubble_rate(plan, execution.timeline, costs)
    size = (
        f"num_stages={settings.stages} num_devices={settings.devices} "
        f"num_batches={settings.microbatches}"
    )
    print(f"Running with parameters: strategy={settings.strategy} {size}")
    if options.table:
        print(table(plan, execution.timeline))
    if not options.no_visualization:
        _draw(plan, execution, settings.output or "pipeline_1f1b.png")
    print(f"Bubble rate: {rate:.4f}")
    return 0


def _draw(plan: Any, execution: Any, path: str) -> None:
    """Write the picture, or say what is missing for it."""
    from schedlang.report.views import write_view

    try:
        write_view(plan, execution, path)
        print(f"wrote {path}")
    except ValueError as error:
        raise UsageError(str(error)) from None
    except ImportError as error:
        print(f"warning: {error}", file=sys.stderr)


def _settings(options: argparse.Namespace) -> Any:
    """What the file says, overridden by the arguments, overridden by the options that are given."""
    from schedlang.files.documents import read_document, read_value
    from schedlang.report.pipeline_tool import settings_of

    try:
        file = read_document(options.config) if options.config else {}
        if not isinstance(file, dict):
            raise ValueError('it must be an object, such as {"num_stages": 4}')
        arguments = {
            key: read_value(value)
            for key, _, value in (each.partition("=") for each in options.settings)
        }
        explicit = {
            key: getattr(options, name)
            for name, key in _KEYS.items()
            if getattr(options, name) is not None
        }
        settings = settings_of([file, arguments, explicit])
    except ValueError as error:
        raise UsageError(f"`{options.config}`: {error}" if options.config else str(error)) from None
    for warning in settings.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return settings
