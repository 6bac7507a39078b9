"""`schedc pipeline`: the options and files of a public visualizer of pipeline schedules.

What takes time to import is imported by the functions: `schedc --help` loads this file.
"""

import argparse
import sys
from typing import Any

from schedlang.cli.option_values import number, setting
from schedlang.cli.options import Command, Either, given, more, output
from schedlang.cli.printing import json_text
from schedlang.cli.usage import FINE, UsageError

#: The options that are settings too, and their keys in files.
_KEYS = {
    "num_stages": "num_stages",
    "num_batches": "num_batches",
    "forward_times": "forward_times",
    "backward_times": "backward_times",
    "p2p_time": "p2p_time",
    "output": "output_file",
}

COMMAND = Command(
    "A strategy, with the options of PP-Schedule-Visualization: see docs/commands.md.",
    "extras.pipeline_tool.pipeline_command.pipeline",
    "--num-stages 4 --num-batches 8 --p2p-time 0.1",
    {
        "settings KEY=VALUE*": given("a setting, by its key in files", setting),
        "-c --config FILE": "a JSON or YAML file with settings",
        "-s --num-stages N": "stages of the pipeline, by default 4",
        "-b --num-batches N": "microbatches, by default 10",
        "-f --forward-times T": "forward times by stage: 1,1.5,1",
        "-bw --backward-times T": "backward times by stage: 1,1.5,1",
        "--p2p-time T": given("time of a transfer, by default 0", number),
        **output("FILE", "the picture to write"),
        "--no-visualization": "no picture, only the bubble rate",
        "--table": "the timeline as a table, time by stage",
        **more(
            {
                "time": Either(
                    {
                        "--compat": given(
                            "count time as the tool's later version",
                            action="store_const",
                            const="sync",
                        ),
                        "--compat-async": given(
                            "the same before its commit 56a94ad: no gaps after transfers",
                            dest="compat",
                            action="store_const",
                            const="async",
                        ),
                    }
                )
            }
        ),
    },
)


def pipeline(options: argparse.Namespace) -> int:
    """Draw a strategy's timeline, and print its bubble rate."""
    from attrs import evolve

    from schedlang.cli.outputs import check_output
    from schedlang.cli.progress import progress
    from schedlang.extras.pipeline_tool.quirks import (
        quirky_bubble_rate,
        quirky_timeline,
    )
    from schedlang.proof.prove import simulate
    from schedlang.report.views.table import table

    settings = _settings(options)
    # The tool draws unless it is told not to.
    picture = (
        None if options.no_visualization else settings.output or "pipeline_1f1b.png"
    )
    if picture:
        # It may be named in the file of settings.
        check_output(picture, [options.config] if options.config else [], options.force)
    costs = settings.costs
    with progress("simulating the strategy"):
        plan = settings.plan()
        execution = simulate(plan, costs)
    rate = execution.timeline.bubble_over_ideal
    if options.compat:
        # As the tool counts time, which is not always how it passes.
        timeline = quirky_timeline(plan, costs, gaps=options.compat == "sync")
        execution = evolve(execution, timeline=timeline)
        rate = quirky_bubble_rate(plan, execution.timeline, costs)
    if options.format == "json":
        _print_json(settings, rate, _draw(plan, execution, picture))
        return FINE
    print(
        f"Running with parameters: strategy={settings.strategy} num_stages={settings.stages} "
        f"num_devices={settings.devices} num_batches={settings.microbatches}"
    )
    if options.table:
        print(table(plan, execution.timeline))
    written = _draw(plan, execution, picture)
    if written:
        print(f"wrote {written}")
    print(f"Bubble rate: {rate:.4f}")
    return FINE


def _print_json(settings: Any, rate: float, picture: str | None) -> None:
    """The figures for programs."""
    document = {
        "strategy": settings.strategy,
        "num_stages": settings.stages,
        "num_devices": settings.devices,
        "num_batches": settings.microbatches,
        "bubble_rate": rate,
        "output": picture,
        "warnings": settings.warnings,
    }
    print(json_text(document))


def _draw(plan: Any, execution: Any, path: str | None) -> str | None:
    """Write the picture, if there is to be one, or say which package is missing for it; the path of
    what was written.
    """
    from schedlang.cli.progress import progress
    from schedlang.report.views import write_view

    if not path:
        return None
    try:
        with progress(f"drawing {path}"):
            write_view(plan, execution, path)
        return path
    except ValueError as error:
        raise UsageError(str(error)) from None
    except ImportError as error:
        # The figure is worth printing without the picture.
        print(f"warning: {error}", file=sys.stderr)
        return None


def _settings(options: argparse.Namespace) -> Any:
    """The settings in the file; arguments override them, and options override both."""
    from schedlang.extras.pipeline_tool.settings import settings_of
    from schedlang.files.documents import read_document, read_value

    try:
        file = read_document(options.config) if options.config else {}
        if not isinstance(file, dict):
            raise ValueError('it must be an object, such as {"num_stages": 4}')
        arguments = {}
        for setting in options.settings:
            key, _, value = setting.partition("=")
            if key in arguments:
                raise UsageError(f"`{key}` is given twice")
            arguments[key] = read_value(value)
        from_options = {}
        for name, key in _KEYS.items():
            if getattr(options, name) is not None:
                from_options[key] = getattr(options, name)
        settings = settings_of([file, arguments, from_options])
    except ValueError as error:
        message = f"`{options.config}`: {error}" if options.config else str(error)
        raise UsageError(message) from None
    if options.format != "json":
        for warning in settings.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return settings
