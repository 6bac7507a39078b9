"""Reading files of users as text; `-` is standard input."""

import sys
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_type

#: The path that means standard input, and what messages call it.
STANDARD_INPUT = "-"
_SHOWN = "<stdin>"


def read_bytes(path: str | Path) -> bytes:
    """The content of a file, or of standard input; OSError when it cannot be read."""
    return _standard_input() if str(path) == STANDARD_INPUT else Path(path).read_bytes()


@cache
def _standard_input() -> bytes:
    """Standard input, which can be read once; a command looks at its file more than once."""
    if sys.stdin is None:
        raise OSError("it is closed")
    if sys.stdin.isatty():
        print("reading standard input, until Ctrl-D", file=sys.stderr)
    return sys.stdin.buffer.read()


def read_source(path: str | Path) -> Source:
    """The program in a file, or on standard input; CompileError when it cannot be read as text,
    TypeError for what is no path.
    """
    check_is_path(path)
    try:
        text = read_bytes(path).decode("utf-8")
    except OSError as error:
        raise unreadable(shown(path), error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text"
        raise unreadable(shown(path), reason, _encoding_help(error.object)) from None
    if "\0" in text:
        reason = f"byte {text.encode().index(0)} is 0, as in no text"
        raise unreadable(shown(path), reason, _encoding_help(text.encode()))
    # A byte order mark and line ends of Windows are no part of the text.
    return Source(shown(path), text.removeprefix("\ufeff").replace("\r\n", "\n"))


def shown(path: str | Path) -> str:
    """What messages call a file."""
    return _SHOWN if str(path) == STANDARD_INPUT else str(path)


def check_is_path(path: Any, name: str = "path") -> None:
    """TypeError unless an argument is the path of a file."""
    check_type(name, path, (str, PathLike), "the path of a file")


#: How files begin that are no text in UTF-8, and what they are.
_BEGINNINGS = {
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
    b"PK\x03\x04": "a zip archive, or a checkpoint of torch",
    b"\x1f\x8b": "packed by gzip: unpack it",
    b"\x89PNG": "a picture",
    b"\x80": "a pickle of Python",
    b"%PDF": "a PDF document",
}


def _encoding_help(content: bytes) -> str:
    """What a file is that is no text, or how it can become one."""
    for beginning, kind in _BEGINNINGS.items():
        if content.startswith(beginning):
            return f"it is {kind}"
    return "it is a binary file, or a text in another encoding: save that as UTF-8"


def unreadable(path: str | Path, reason: str, help: str | None = None) -> CompileError:
    """The error for a file that cannot be read as text."""
    if Path(path).is_dir():
        help = f"it is a folder: name a file in it, such as `{_file_in(Path(path))}`"
    message = f"cannot read `{path}`: {reason}"
    return CompileError([Diagnostic("unreadable", message, help=help, file=str(path))])


def _file_in(folder: Path) -> Path:
    """A file in a folder, preferably a program."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    programs = [path for path in files if path.suffix == ".sched"]
    return next(iter([*programs, *files]), folder / "NAME.sched")
