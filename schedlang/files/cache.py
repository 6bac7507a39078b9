"""Results that took long to make, kept in the user's own cache directory."""

import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import process_time
from typing import NamedTuple, TypeVar

from schedlang.files.package import GRAMMAR, PACKAGE
from schedlang.on_demand import on_demand

T = TypeVar("T")


class Kind(NamedTuple):
    """A kind of result: it is kept if it took `worth` seconds of processor time to make, and of all
    that are kept, those that were not asked for the longest go when there are more than `most`.
    """

    name: str
    worth: float
    most: int


PLAN = Kind("plan", worth=1.0, most=16)
#: What it takes to load the parser is more than this, and what it takes to parse a text is less.
TREE = Kind("tree", worth=0.01, most=64)


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


def cached(kind: Kind, key: object, make: Callable[[], T]) -> T:
    """The result of `make`, or the one that was made for the same kind and key before.

    The `repr` of the key has to say all that the result depends on, besides the version of this
    package. Several processes may ask at once: a file appears whole, so none reads half of one.
    """
    directory = folder()
    if directory is None:
        return make()
    path = directory / f"{kind.name}-{_hash((_version(), key))}"
    # A file that is not there, or damaged, is as good as none.
    with suppress(Exception):
        known: T = pickle.loads(path.read_bytes())
        # The time of the file says when it was last asked for.
        path.touch()
        return known
    start = process_time()
    result = make()
    if process_time() - start >= kind.worth:
        # The result is right, also where it cannot be kept.
        with suppress(Exception):
            on_demand("schedlang.files.writing.write_bytes")(pickle.dumps(result), path)
            _remove_old_files(directory, kind)
    return result


def _remove_old_files(directory: Path, kind: Kind) -> None:
    """Keep the newest results of a kind."""
    paths = sorted(
        directory.glob(f"{kind.name}-*"), key=lambda path: path.stat().st_mtime
    )
    for path in paths[: -kind.most]:
        path.unlink()


def _hash(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


@cache
def _version() -> str:
    """A text for the files that decide what a program means, and when each was written.

    While somebody works on this package, its version number does not change.
    """
    paths = [str(GRAMMAR)]
    for directory, _, names in os.walk(PACKAGE):
        paths += [
            os.path.join(directory, name) for name in names if name.endswith(".py")
        ]
    return _hash([(path, os.stat(path).st_mtime_ns) for path in sorted(paths)])
