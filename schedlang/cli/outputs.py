"""Where a command writes: known to be possible before it works, and never onto what it reads."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout

from schedlang.cli.usage import UsageError
from schedlang.files.writing import descriptor, unwritable

#: The options that name files to read, and those that name files to write.
INPUTS = ("file", "other", "others", "files", "costs", "config", "model")
OUTPUTS = ("output", "write_costs", "trace")
#: The file descriptor of standard output.
_STANDARD_OUTPUT = 1


@contextmanager
def apart_from_words(options: argparse.Namespace) -> Iterator[None]:
    """Within it a command says what it has to say on standard error, if it is standard output that
    it writes a file to: whoever reads that wants the file alone.
    """
    if _STANDARD_OUTPUT in map(descriptor, _named(options, OUTPUTS)):
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield


def check_outputs(options: argparse.Namespace, imported: Iterable[str] = ()) -> None:
    """CompileError if a file that the options name cannot be written, UsageError if it is one of
    those that are read, which it would replace; `imported` are read as well.
    """
    read = [*_named(options, INPUTS), *imported]
    if read.count("-") > 1:
        raise UsageError(
            "`-` stands twice, and standard input can be read once: name a file"
        )
    for output in _named(options, OUTPUTS):
        check_output(output, read, options.force)


def check_output(output: str, read: Iterable[str], force: bool) -> None:
    """CompileError if a file cannot be written, UsageError if it would replace one that was read,
    or a program.
    """
    if output == "-":
        raise UsageError("`-` is standard input; standard output is /dev/stdout")
    folder = os.path.dirname(output) or "."
    if not os.path.isdir(folder):
        raise unwritable(output, f"there is no folder `{folder}`")
    if os.path.isdir(output):
        raise unwritable(output, "it is a folder")
    # What is no regular file, such as /dev/null, is not replaced by what is written to it.
    if force or not os.path.isfile(output):
        return
    way_out = "name another file, or give --force"
    for path in read:
        # Whatever it is called there: by another path, or through a link.
        if os.path.exists(path) and os.path.samefile(path, output):
            raise UsageError(f"`{output}` is read, and would be replaced; {way_out}")
    if output.endswith(".sched"):
        raise UsageError(f"`{output}` is a program, and would be replaced; {way_out}")


def _named(options: argparse.Namespace, names: Iterable[str]) -> Iterator[str]:
    """The files that some options name."""
    for name in names:
        value = getattr(options, name, None)
        if isinstance(value, list):
            yield from value
        elif value is not None:
            yield value
