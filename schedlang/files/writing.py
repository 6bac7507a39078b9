"""Writing files that appear whole or not at all."""

import os
from pathlib import Path

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic

#: Paths of what a process has open: these, and the numbers in some folders.
_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTORS = ("/dev/fd", "/proc/self/fd")


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
        open_already = descriptor(path)
        if open_already is not None:
            # Opened anew, a file would be written from another place on than its other writers do.
            with open(os.dup(open_already), "wb") as stream:
                stream.write(content)
        elif os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(content)
        else:
            # Through all links, since one that is replaced would be lost.
            _replace(Path(os.path.realpath(path)), content)
    # Whoever reads a pipe may have had enough, which is no mistake.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from None


def descriptor(path: str | Path) -> int | None:
    """The file descriptor that a path stands for, which this process may have open: 1 for
    /dev/stdout; None for any other path.
    """
    folder, _, number = str(path).rpartition("/")
    if folder in _DESCRIPTORS and number.isdecimal():
        return int(number)
    return _STREAMS.get(str(path))


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
