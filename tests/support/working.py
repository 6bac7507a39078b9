"""Work for processes of the language server."""

import os
import time
from collections.abc import Iterator


def endless() -> Iterator[int]:
    """The number of its process, and then nothing for as long as anybody waits."""
    yield os.getpid()
    time.sleep(600)


def numbers(count: int) -> Iterator[int]:
    """Numbers, one by one."""
    yield from range(count)


def product(first: int, second: int) -> int:
    """One result."""
    return first * second


def broken() -> Iterator[int]:
    """A result, and then a mistake of ours."""
    yield 1
    raise RuntimeError("as it is meant to")
