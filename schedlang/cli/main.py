"""The `schedc` command: data on stdout, diagnostics on stderr, and an exit code that says how it
went (`schedlang.cli.usage`).

What takes time to import is imported within `main`, where Ctrl-C is already in good hands.
"""

from __future__ import annotations

import atexit
import codecs
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence

# As type checkers know it; `typing` itself is loaded where Ctrl-C is in good hands.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

#: How many objects a command makes before Python looks for garbage among them for the first time.
_FEW_OBJECTS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process; the exit code.

    SystemExit where the command line is wrong, or asks for help only, as argparse has it.
    """
    if argv is not None:
        return _run(argv)
    owner = os.getpid()
    signals = []

    def interrupt(number: int, _: object) -> None:
        signals.append(number)
        # A process that was forked to help ends without a word: this one has it.
        if os.getpid() != owner:
            os._exit(1)
        raise KeyboardInterrupt

    def end_if_interrupted(unraisable: Any) -> None:
        # Of a Ctrl-C that came where nothing can be raised, Python would tell, and go on.
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            os._exit(_interrupted())
        sys.__unraisablehook__(unraisable)

    # A shell that starts this in the background may have it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = end_if_interrupted
    _prepare_process()
    try:
        exit_code = _run(sys.argv[1:])
    except Exception:
        # A module whose import was interrupted may make another error of it.
        if not signals:
            raise
        exit_code = _interrupted()
    if signal.getsignal(signal.SIGINT) is interrupt:
        # What Python does at its end may be ended at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return exit_code


def _run(argv: Sequence[str]) -> int:
    """Run one command, and see to it that its output arrives; the exit code."""
    from schedlang.cli.usage import CLOSED_PIPE, USAGE

    try:
        try:
            return _run_command(argv)
        finally:
            if sys.stdout:
                # Or the last of it would be written where nobody looks for errors any more.
                sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:
        # Errors of files are told by those who read and write them.
        is_output = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        what = "the output cannot be written" if is_output else "the system refuses"
        _drop_output()
        _say(f"error: {what}: {error.strerror or error}")
        return USAGE


def _run_command(argv: Sequence[str]) -> int:
    from schedlang.cli.command_table import parse
    from schedlang.cli.usage import WRONG, UsageError

    try:
        options = parse(argv)
    except UsageError as error:
        _wrong_usage(error, argv)
    # Behind this line, so that `--help` does not pay for it.
    from importlib import import_module

    from schedlang.cli.diagnosed import exit_code_of, print_diagnostics
    from schedlang.cli.outputs import apart_from_words, check_outputs
    from schedlang.diagnostics.diagnostic import CompileError

    # Each command names its function, as `cli.commands.simulate`.
    module, _, function = options.run.rpartition(".")
    try:
        check_outputs(options)
        command = getattr(import_module(f"schedlang.{module}"), function)
        with apart_from_words(options):
            exit_code: int = command(options)
        if options.wrong:
            print_diagnostics(options.wrong, options)
        return exit_code or (WRONG if options.wrong else exit_code)
    except CompileError as error:
        print_diagnostics(error.diagnostics, options)
        return exit_code_of(error.diagnostics)
    except UsageError as error:
        _wrong_usage(error, argv)


def _wrong_usage(error: Exception, argv: Sequence[str]) -> NoReturn:
    """Say what is wrong with a command line, and end."""
    from schedlang.cli.command_table import COMMANDS, renamed
    from schedlang.cli.usage import USAGE

    word, *_ = renamed(argv) or [""]
    command = f"schedc {word}" if word in COMMANDS else "schedc"
    _say(f"error: {error}\nsee: {command} --help")
    raise SystemExit(USAGE)


def _interrupted() -> int:
    """Say that Ctrl-C has ended this, and give the exit code."""
    from schedlang.cli.usage import INTERRUPTED

    _say("interrupted")
    return INTERRUPTED


def _say(text: str) -> None:
    # Where nobody can be told, the exit code still says it.
    from contextlib import suppress

    with suppress(OSError):
        print(text, file=sys.stderr)


def _drop_output() -> None:
    """Let the rest of the output go nowhere: Python would complain again when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


#: What stands for a character that a terminal or a pipe cannot show, as under the locale C.
_STAND_INS = {
    "│": "|", "─": "-", "├": "|", "└": "`", "┌": ".", "·": ".", "…": "...", "µ": "u", "▀": "=",
}  # fmt: skip


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """What is written for characters that cannot be encoded: others that look like them, or `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(each, "?") for each in characters), error.end


def replace_unknown_characters() -> None:
    """A terminal or a pipe that cannot show a character gets a similar one from now on."""
    codecs.register_error("stand-in", _stand_in)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="stand-in")


def _prepare_process() -> None:
    """Make this process one that runs a command and ends.

    Most of its objects are the modules that it loads, which are no garbage. Looking through them
    again and again, and twice more at the end, would be a quarter of the time of a small command.
    Nor does any command do linear algebra, for which numpy would start a thread on each core.
    """
    replace_unknown_characters()
    gc.set_threshold(_FEW_OBJECTS)
    atexit.register(gc.freeze)
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1")
    )
