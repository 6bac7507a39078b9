"""`schedc pipeline`: the options and files of a public visualizer of pipeline schedules."""

import argparse
import sys
from typing import Any

from attrs import evolve

from schedlang.cli.inputs import UsageError

#: The options that are settings too, and their keys in files.
_KEYS = {
    "num_stages": "num_stages",
    "num_batches": "num_batches",
    "forward_times": "forward_times",
    "backward_times": "backward_times",
    "p2p_time": "p2p_time",
    "output": "output_file",
}


def pipeline(options: argparse.Namespace) -> int:
    """Draw a strategy's timeline, and print its bubble rate."""
    from schedlang import simulate
    from schedlang.report.pipeline_tool import quirky_bubble_rate, quirky_timeline
    from schedlang.report.views.table import table

    settings = _settings(options)
    plan = settings.plan()
    costs = settings.costs
    execution = simulate(plan, costs)
    rate = execution.timeline.bubble_over_ideal
    if options.compat:
        # As the tool counts time, which is not always how it passes.
        timeline = quirky_timeline(plan, costs, gaps=options.compat == "sync")
        execution = evolve(execution, timeline=timeline)
        rate = quirky_bubble_rate(plan, execution.timeline, costs)
    print(
        f"Running with parameters: strategy={settings.strategy} num_stages={settings.stages} "
        f"num_devices={settings.devices} num_batches={settings.microbatches}"
    )
    if options.table:
        print(table(plan, execution.timeline))
    # The tool draws unless it is told not to.
    if not options.no_visualization:
        _draw(plan, execution, settings.output or "pipeline_1f1b.png")
    print(f"Bubble rate: {rate:.4f}")
    return 0


def _draw(plan: Any, execution: Any, path: str) -> None:
    """Write the picture, or say which package is missing for it."""
    from schedlang.report.views import write_view

    try:
        write_view(plan, execution, path)
        print(f"wrote {path}")
    except ValueError as error:
        raise UsageError(str(error)) from None
    except ImportError as error:
        # The figure is worth printing without the picture.
        print(f"warning: {error}", file=sys.stderr)


def _settings(options: argparse.Namespace) -> Any:
    """The settings in the file; arguments override them, and options override both."""
    from schedlang.files.documents import read_document, read_value
    from schedlang.report.pipeline_tool import settings_of

    try:
        file = read_document(options.config) if options.config else {}
        if not isinstance(file, dict):
            raise ValueError('it must be an object, such as {"num_stages": 4}')
        arguments = {}
        for setting in options.settings:
            key, _, value = setting.partition("=")
            arguments[key] = read_value(value)
        from_options = {}
        for name, key in _KEYS.items():
            if getattr(options, name) is not None:
                from_options[key] = getattr(options, name)
        settings = settings_of([file, arguments, from_options])
    except ValueError as error:
        message = f"`{options.config}`: {error}" if options.config else str(error)
        raise UsageError(message) from None
    for warning in settings.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return settings
