"""Plans that ranks of tests train with, compiled by one of them."""

import fcntl
import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from tests.support.forks import write

#: Where ranks leave what they have compiled, in `rank_server.py` and what is forked from there.
_folder: Path | None = None


def keep_plans(folder: Path) -> None:
    """Keep in a folder what this process and those that it forks compile."""
    global _folder
    _folder = folder


def compiled(source: Source, params: Mapping[str, int]) -> Plan:
    """The plan of a program. The first rank that asks for it compiles it, while others wait, which
    takes a part of the time that it takes all of them.
    """
    if _folder is None:
        return compile(source, params)
    key = repr((source.path, source.text, source.imports, sorted(params.items())))
    path = _folder / hashlib.sha256(key.encode()).hexdigest()
    if not path.exists():
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                write(path, pickle.dumps(compile(source, params)))
    return pickle.loads(path.read_bytes())
