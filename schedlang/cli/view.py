"""The command `schedc view`: pictures of executions, in the terminal, in a file, or served; or the
actions of each rank.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from schedlang.cli.action_lists import FORMS, print_actions
from schedlang.cli.diagnosed import has_colour
from schedlang.cli.executions import pictures_of
from schedlang.cli.extra import extra
from schedlang.cli.inputs import wrong_as_usage
from schedlang.cli.printing import written
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, USAGE, UsageError

if TYPE_CHECKING:
    from schedlang.report.views import Part


def view(options: argparse.Namespace) -> int:
    """Draw executions, in the terminal or in a file; or print what each rank does."""
    if any(getattr(options, form) for form in FORMS):
        return print_actions(options)
    if options.plot:
        return int(extra("plots.plot_command").plot(options))
    if options.ranges:
        raise UsageError("--for is for --plot, or for schedc check")
    from schedlang.report.views import WHOLE, check_path, write_pictures
    from schedlang.report.views.terminal import view as draw
    from schedlang.report.views.trace import trace

    if options.serve:
        from schedlang.cli.serve import serve

        return serve(options)
    files = [options.file, *options.others]
    part = _part(options)
    if options.output:
        # Before the schedules are compiled, which may take a while.
        with wrong_as_usage():
            check_path(options.output, len(files), part)
    elif part != WHOLE:
        raise UsageError(_part_without_file(options))
    pictures = pictures_of(options, files)
    if not options.output:
        # For programs, the picture is a trace.
        colour = has_colour(options, sys.stdout)
        is_json = options.format == "json"
        if is_json and len(pictures) > 1:
            raise UsageError("a trace has one schedule")
        print(trace(pictures[0]) if is_json else draw(pictures, colour=colour))
        return FINE
    try:
        with progress(f"drawing {options.output}"), wrong_as_usage():
            write_pictures(pictures, options.output, part)
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print(written(options))
    return FINE


def _part(options: argparse.Namespace) -> Part:
    """The part of a picture that the options ask for."""
    from schedlang.report.views import Part

    start, end = options.window or (None, None)
    return Part(
        options.ranks,
        start,
        end,
        options.width,
        options.memory,
        options.causes,
        not options.no_legend,
        options.font,
    )


def _part_without_file(options: argparse.Namespace) -> str:
    """What is wrong with options for a part of a picture that goes to the terminal."""
    message = "a part is drawn in a file: -o NAME.svg or NAME.png"
    if options.ranks and len(options.ranks) == 1:
        count = options.ranks[0]
        message += (
            f"; --ranks names those to draw, how many there are is -p ranks={count}"
        )
    return message
