"""Writing files that appear whole or not at all."""

import os
from pathlib import Path

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic


def write_text(text: str, path: str | Path) -> None:
    """Write a text file, whole or not at all; CompileError when it cannot be written."""
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: str | Path) -> None:
    """Write a file, whole or not at all; CompileError when it cannot be written.

    A link stays a link: what it leads to is written. A device or a pipe, such as /dev/stdout, takes
    what it gets.
    """
    # Through all links, since one that is replaced would be lost.
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            _replace(target, content)
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from None


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
