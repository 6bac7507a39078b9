"""Diagnostics as a command prints them, and the exit code that they mean."""

import argparse
import os
import sys
from typing import TextIO

from schedlang.cli.usage import USAGE, WRONG
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.rendering import render

#: What is wrong with a file that the command line names, rather than with a program or a plan.
_OF_FILES = frozenset({"unreadable", "unwritable", "costs"})


def exit_code_of(diagnostics: list[Diagnostic]) -> int:
    """The exit code for errors."""
    is_usage = all(diagnostic.code in _OF_FILES for diagnostic in diagnostics)
    return USAGE if is_usage else WRONG


def print_diagnostics(
    diagnostics: list[Diagnostic], options: argparse.Namespace
) -> None:
    """Print errors or warnings to stderr, in the form that the options ask for."""
    text = render(diagnostics, options.format, has_colour(options, sys.stderr))
    print(text, file=sys.stderr)


def has_colour(options: argparse.Namespace, stream: TextIO) -> bool:
    """Whether what goes to a stream is coloured."""
    if options.color != "auto":
        return bool(options.color == "always")
    # https://no-color.org; a stream that was closed before Python began is None.
    return (
        bool(stream)
        and stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
