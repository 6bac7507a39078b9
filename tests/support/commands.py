"""A command of `schedc` in the process of a test, which saves the second that a process takes."""

import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

from schedlang.cli.main import main


class Done(NamedTuple):
    """What became of a command."""

    returncode: int
    stdout: str
    stderr: str


def line_words(*line: object) -> list[str]:
    """The arguments in the texts of a command line, each of which may have several, as in a shell."""
    return [word for text in line for word in shlex.split(str(text))]


def exit_code(*line: object) -> int:
    """Run a command that prints where the test does; its exit code."""
    return main(line_words(*line))


def schedc(*line: object) -> Done:
    """Run a command, and keep what it prints."""
    stdout = StringIO()
    stderr = StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            returncode = exit_code(*line)
        except SystemExit as end:
            returncode = int(end.code or 0)
    return Done(returncode, stdout.getvalue(), stderr.getvalue())


def output(*line: object) -> str:
    """What a command prints, which must end well."""
    done = schedc(*line)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(*line: object) -> Any:
    """The JSON of a command, which must end well."""
    return json.loads(output(*line, "--json"))
