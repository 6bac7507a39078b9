"""Reading files of users as text."""

from pathlib import Path

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source


def read_source(path: str | Path) -> Source:
    """The program in a file; CompileError when it cannot be read as text."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise unreadable(path, f"byte {error.start} is not UTF-8 text") from None
    # A byte order mark and line ends of Windows are no part of the text.
    return Source(str(path), text.removeprefix("\ufeff").replace("\r\n", "\n"))


def unreadable(path: str | Path, reason: str) -> CompileError:
    """The error for a file that cannot be read as text."""
    message = f"cannot read `{path}`: {reason}"
    return CompileError([Diagnostic("unreadable", message, file=str(path))])
