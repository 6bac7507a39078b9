"""`schedc view --plot`: a plot of many executions, in a file, or as its rows."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from schedlang.cli.executions import executed, read_runs
from schedlang.cli.inputs import read_cost_options, wrong_as_usage
from schedlang.cli.options import EXECUTION, IDEAL
from schedlang.cli.printing import json_text, written
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, USAGE, UsageError
from schedlang.extras.plots.plot_files import cell_text, check_plot_path, write_plot
from schedlang.extras.plots.plot_rows import Chart, Shown
from schedlang.extras.plots.plot_sizes import Params, fixed_of, plotted, sizes_of
from schedlang.files.programs import called
from schedlang.files.reading import read_source
from schedlang.report.compare import parameters_of, params_of_each
from schedlang.report.text_table import aligned

#: The options of `schedc view` that mean nothing for a plot.
_OF_PICTURES = ("serve", "actions", "memory", "causes", "ranks", "window")


def plot(options: argparse.Namespace) -> int:
    """Execute the schedules, and draw the plot or print its rows."""
    for name in _OF_PICTURES:
        if getattr(options, name):
            raise UsageError(f"--{name} is for one schedule, not for a plot")
    with wrong_as_usage(options):
        if options.output:
            check_plot_path(options.output)
        chart = _plot_of(options)
    if not options.output:
        as_json = options.format == "json"
        print(json_text(chart.rows) if as_json else _text(chart))
        return FINE
    try:
        with progress(f"drawing {options.output}"):
            write_plot(
                chart,
                options.output,
                options.width,
                not options.no_legend,
                options.font,
            )
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print(written(options))
    return FINE


def _plot_of(options: argparse.Namespace) -> Chart:
    """The plot that the options ask for; ValueError for what is wrong with them."""
    ranges = {}
    for name, values in options.ranges.items():
        if values is None:
            raise UsageError(f"--for {name}=any is for proofs: a plot has numbers")
        ranges[name] = values
    files = {_name(file): file for file in [options.file, *options.others]}
    runs = read_runs(options, files.values())
    sources = {
        name: read_source(file) for name, file in files.items() if file not in runs
    }
    # ValueError for a parameter that none of them has.
    params_of_each(sources.values(), {**options.params, **dict.fromkeys(ranges, 1)})
    programs = {
        name: parameters_of(sources[name]) if name in sources else set()
        for name in files
    }
    kind = options.plot
    sizes = sizes_of(kind, options.params, ranges)
    params = fixed_of(kind, options.params, ranges)

    def execute(program: str, name: str, own: Params) -> Shown:
        file = files[program]
        chosen = argparse.Namespace(**{**vars(options), "params": own})
        found = executed(chosen, file, runs)
        command = _command(options, _asking(file, runs, files.values()), own)
        return Shown(name, found.execution, command, found.seconds)

    costs = read_cost_options(options)
    return plotted(kind, programs, params, sizes, execute, costs, options.unit)


def _name(file: str) -> str:
    """What a program is called in a plot."""
    return file if file == "-" else Path(called(file)).stem


def _asking(file: str, runs: Mapping[str, object], files: Iterable[str]) -> list[str]:
    """The command that prints the figures of a file: beside the first of some runs, if there is
    one, a comparison with that.
    """
    first = next(iter(runs), None)
    if first is None:
        return ["simulate", called(file)]
    predictions = [each for each in files if each not in runs]
    if not predictions:
        return ["view", file]
    return ["compare", called(predictions[0]), first]


def _command(options: argparse.Namespace, words: list[str], params: Params) -> str:
    """A command with the same options."""
    words = ["schedc", *words]
    for name, value in params.items():
        values = value if isinstance(value, tuple) else (value,)
        words += ["-p", f"{name}={','.join(map(str, values))}"]
    for written_as in {**EXECUTION, **IDEAL}:
        option = written_as.split()[0]
        value = getattr(options, option.removeprefix("--").replace("-", "_"))
        if value is None or value is False:
            continue
        if value is True:
            words.append(option)
        elif option == "--costs":
            words += [word for path in value for word in (option, path)]
        else:
            words += [option, _value(value)]
    return shlex.join(words)


def _value(value: Any) -> str:
    """The value of an option, as it is written."""
    numbers = value if isinstance(value, list) else [value]
    return ",".join(
        f"{each:g}" if isinstance(each, float) else str(each) for each in numbers
    )


def _text(chart: Chart) -> str:
    """The rows as a table, with the plot's title and notes."""
    columns = list(dict.fromkeys(name for row in chart.rows for name in row))
    cells = [[cell_text(row.get(name, "")) for name in columns] for row in chart.rows]
    return "\n".join([chart.title, "", *aligned([columns, *cells]), *chart.notes])
