"""Processes that tests start from a command line, as a user does: the environment, limits, and
whose children they are.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.paths import ROOT

#: Seconds that a run, or what is waited for, may take.
LIMIT = 100
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def python(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and some variables of the environment besides."""
    line = [sys.executable, *map(str, command)]
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=ENVIRONMENT | environment,
    )


def torchrun(ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a script, or a module after `-m`, on so many ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return python(*launch, *command)


def until(condition: Callable[[], object]) -> None:
    """Wait for something, with a limit."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [
        int(each)
        for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def worker_of(torchrun: int, rank: int) -> int:
    """The process of a rank."""
    # torchrun starts a process for each rank, and tells it which one it is by a variable.
    environments = {
        each: Path(f"/proc/{each}/environ").read_bytes().split(b"\0")
        for each in children(torchrun)
    }
    return next(
        each
        for each, environment in environments.items()
        if f"RANK={rank}".encode() in environment
    )
