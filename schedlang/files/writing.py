"""Writing files that appear whole or not at all."""

import os
from pathlib import Path

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic

#: How paths begin of what a process has open: they are links, to what may have no path of its own.
_OPEN = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


def write_text(text: str, path: str | Path) -> None:
    """Write a text file, whole or not at all; CompileError when it cannot be written."""
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: str | Path) -> None:
    """Write a file, whole or not at all; CompileError when it cannot be written, BrokenPipeError
    where it is a pipe that nobody reads any more.

    A link stays a link: what it leads to is written. A device or a pipe takes what it gets, and so
    does what this process has open, such as /dev/stdout, also where that is a file.
    """
    try:
        if _is_open(path) or (os.path.exists(path) and not os.path.isfile(path)):
            with open(path, "ab") as stream:
                stream.write(content)
        else:
            # Through all links, since one that is replaced would be lost.
            _replace(Path(os.path.realpath(path)), content)
    # Whoever reads a pipe may have had enough, which is no mistake.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from None


def _is_open(path: str | Path) -> bool:
    """Whether a path is that of a file that this process has open."""
    return str(path).startswith(_OPEN)


def _replace(path: Path, content: bytes) -> None:
    """Put a new file in the place of one that may be there, in one step."""
    # It loads what packs and unpacks archives.
    import tempfile

    temporary = None
    try:
        # In the same folder, since only within a file system a file is replaced in one step.
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=path.name, delete=False
        ) as file:
            temporary = file.name
            file.write(content)
        # A temporary file is for its owner alone.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    # Ctrl-C leaves nothing behind either.
    except BaseException:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise


def unwritable(path: str | Path, reason: str) -> CompileError:
    """The error for a file that cannot be written."""
    message = f"`{path}`: cannot be written: {reason}"
    return CompileError([Diagnostic("unwritable", message, file=str(path))])
