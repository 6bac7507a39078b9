"""Processes that are forked, and files by which they tell each other something."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(main: Callable[[], None]) -> int:
    """A process that ends with this function, and not with what would come after the fork."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_to(path: Path, *descriptors: int) -> None:
    """What this process and those that it forks print goes to the end of a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)


def write(path: Path, content: bytes) -> None:
    """At once: the file is there with all of its content, or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.rename(path)


def read(path: Path) -> bytes:
    """What another process writes, as soon as it is there."""
    while not path.exists():
        time.sleep(0.005)
    return path.read_bytes()
