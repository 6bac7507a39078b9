"""Writing files that appear whole or not at all."""

import os
from pathlib import Path

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic


def write_text(text: str, path: str | Path) -> None:
    """Write a text file, whole or not at all; CompileError when it cannot be written."""
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: str | Path) -> None:
    """Write a file, whole or not at all; CompileError when it cannot be written."""
    # It loads what packs and unpacks archives.
    import tempfile

    path = Path(path)
    temporary = None
    try:
        # In the same folder, since only within a file system a file is replaced in one step.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            temporary = file.name
            file.write(content)
        # A temporary file is for its owner alone.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        message = f"`{path}`: cannot be written: {error.strerror}"
        raise CompileError([Diagnostic("unwritable", message, file=str(path))]) from None
