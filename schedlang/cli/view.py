"""The command `schedc view`: pictures of executions, in the terminal, in a file, or served."""

import argparse
import json
import sys

from schedlang.cli.diagnosed import has_colour
from schedlang.cli.pictures import pictures_of
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, USAGE, UsageError


def view(options: argparse.Namespace) -> int:
    """Draw executions: one in the terminal or in a file, any number of them on a page."""
    from schedlang.report.views import check_path, write_pictures
    from schedlang.report.views.terminal import view as draw
    from schedlang.report.views.trace import trace

    if options.serve:
        from schedlang.cli.serve import serve

        return serve(options)
    files = [options.file, *options.others]
    if len(files) > 1 and not options.output:
        raise UsageError("several schedules stand side by side on a page: -o NAME.html")
    try:
        # Before the schedules are compiled, which may take a while.
        if options.output:
            check_path(options.output, len(files))
    except ValueError as error:
        raise UsageError(str(error)) from None
    pictures = pictures_of(options, files)
    is_json = options.format == "json"
    if not options.output:
        # For programs, the picture is a trace.
        colour = has_colour(options, sys.stdout)
        print(trace(pictures[0]) if is_json else draw(pictures[0], colour=colour))
        return FINE
    try:
        with progress(f"drawing {options.output}"):
            write_pictures(pictures, options.output)
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print(json.dumps({"output": options.output}) if is_json else f"wrote {options.output}")
    return FINE
