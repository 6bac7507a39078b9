"""A command of `schedc` in the process of a test, which saves the second that a process takes."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

from schedlang.cli.main import main


class Done(NamedTuple):
    """What became of a command."""

    returncode: int
    stdout: str
    stderr: str


def schedc(*arguments: str) -> Done:
    """Run a command in this process."""
    stdout = StringIO()
    stderr = StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            returncode = main(arguments)
        except SystemExit as end:
            returncode = int(end.code or 0)
    return Done(returncode, stdout.getvalue(), stderr.getvalue())
