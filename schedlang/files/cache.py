"""Results that took long to make, kept in the user's own cache directory."""

import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import TypeVar

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.files.package import GRAMMAR, PACKAGE
from schedlang.files.writing import write_bytes

T = TypeVar("T")
#: A result is kept if it took so many seconds of processor time.
WORTH = 1.0
#: How many results are kept; the ones that were not asked for the longest go first.
MOST = 16


def folder() -> Path | None:
    """The cache directory of this package, or None if there is nowhere to write.

    It is the user's own, because what is in it is unpickled: what somebody else has written there
    could do anything.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "schedlang"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


def cached(key: object, make: Callable[[], T]) -> T:
    """The result of `make`, or the one that was made for the same key before.

    The `repr` of the key has to say all that the result depends on, besides the version of this
    package. Several processes may ask at once: a file appears whole, so none reads half of one.
    """
    directory = folder()
    if directory is None:
        return make()
    path = directory / f"plan-{_hash((_version(), key))}"
    # A file that is not there, or damaged, is as good as none.
    with suppress(Exception):
        known: T = pickle.loads(path.read_bytes())
        # The time of the file says when it was last asked for.
        path.touch()
        return known
    start = process_time()
    result = make()
    if process_time() - start >= WORTH:
        # The result is right, also where it cannot be kept.
        with suppress(CompileError, OSError):
            write_bytes(pickle.dumps(result), path)
            _remove_old_files(directory)
    return result


def _remove_old_files(directory: Path) -> None:
    """Keep the newest `MOST` results."""
    paths = sorted(directory.glob("plan-*"), key=lambda path: path.stat().st_mtime)
    for path in paths[:-MOST]:
        path.unlink()


def _hash(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _version() -> list[tuple[str, int]]:
    """The files that decide what a program means, and when each was written.

    While somebody works on this package, its version number does not change.
    """
    paths = sorted([*PACKAGE.rglob("*.py"), GRAMMAR])
    return [(str(path), path.stat().st_mtime_ns) for path in paths]
