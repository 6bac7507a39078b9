"""What took long to make and can be made again, kept in the user's own cache directory."""

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
#: What took less processor time, in seconds, is not kept; nor are more than so many files.
WORTH = 1.0
MOST = 16


def folder() -> Path | None:
    """The directory, or None if there is nowhere to write.

    It is the user's own, because what is in it is unpickled: in a shared one it might be someone
    else's.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        (home / "schedlang").mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return home / "schedlang" if os.access(home / "schedlang", os.W_OK) else None


def kept(key: object, make: Callable[[], T]) -> T:
    """What `make` makes, or made for the same key before, with the same version of this package.

    The key is what decides about it, by its `repr`. Several processes may ask at once: a file
    appears whole.
    """
    place = folder()
    if place is None:
        return make()
    path = place / f"plan-{hashlib.sha256(repr((_version(), key)).encode()).hexdigest()}"
    # A file that is not there, or damaged, is as good as none.
    with suppress(Exception):
        found: T = pickle.loads(path.read_bytes())
        path.touch()
        return found
    start = process_time()
    found = make()
    if process_time() - start >= WORTH:
        with suppress(CompileError, OSError):
            write_bytes(pickle.dumps(found), path)
            for old in sorted(place.glob("plan-*"), key=lambda each: each.stat().st_mtime)[:-MOST]:
                old.unlink()
    return found


def _version() -> list[tuple[str, int]]:
    """The modules of this package and its grammar, and when they were written."""
    files = *PACKAGE.rglob("*.py"), GRAMMAR
    return [(str(each), each.stat().st_mtime_ns) for each in sorted(files)]
