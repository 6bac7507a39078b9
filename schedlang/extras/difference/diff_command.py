"""`schedc compare --diff`: what differs between two schedules."""

import argparse
import sys
from functools import partial
from typing import Any

from schedlang.cli.printing import text_or_json
from schedlang.cli.usage import FINE, USAGE, WRONG, UsageError


def diff(options: argparse.Namespace) -> int:
    """Print what differs between two schedules; the exit code is that of diff(1)."""
    from schedlang.cli.diagnosed import has_colour, print_diagnostics
    from schedlang.cli.progress import progress
    from schedlang.diagnostics.diagnostic import CompileError
    from schedlang.diagnostics.style import Style
    from schedlang.extras.difference.difference import differ
    from schedlang.extras.difference.difference_text import difference_text
    from schedlang.extras.difference.document import difference_json

    if len(options.files) != 2:
        raise UsageError("--diff compares two schedules: schedc compare A B --diff")
    if options.write_costs:
        raise UsageError(
            "--write-costs writes what a recorded run shows, --diff reads none"
        )
    try:
        sides = [_side(options, *each) for each in _chosen(options)]
    except CompileError as error:
        # An exit code of 1 says that there are two schedules, and that they differ.
        print_diagnostics(error.diagnostics, options)
        return USAGE
    with progress("comparing"):
        found = differ(sides[0], sides[1], options.compute)
        style = Style(has_colour(options, sys.stdout))
        as_text = partial(difference_text, style=style)
        text = text_or_json(options, found, as_text, difference_json)
    print(text)
    return FINE if found.is_equal else WRONG


def _chosen(options: argparse.Namespace) -> list[tuple[str, dict[str, int]]]:
    """The two files, each with the parameters that are meant for it."""
    from schedlang.files.reading import read_source
    from schedlang.report.compare import params_of_each

    files: list[str] = options.files
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


def _side(options: argparse.Namespace, file: str, params: dict[str, int]) -> Any:
    """One of the two schedules, simulated."""
    from schedlang.cli.inputs import load_to_execute
    from schedlang.cli.progress import progress
    from schedlang.extras.difference.difference import side_of
    from schedlang.files.programs import called

    plan, costs = load_to_execute(options, file, params=params, takes_tables=True)
    with progress(f"simulating {plan.name}"):
        return side_of(called(file), plan, costs)
