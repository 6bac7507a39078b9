"""Starts the process that forks the ranks of scenarios, as `runtime_worker.py`; and finds those of
torchrun.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.support.paths import ROOT, TESTS

#: Seconds that a run, or what is waited for, may take.
LIMIT = 100
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@frozen
class Outcome:
    """What became of the ranks of a scenario."""

    seconds: float
    codes: list[int]
    logs: list[str]
    folder: Path

    def found(self, name: str = "found") -> list:
        """What each rank reported."""
        assert self.codes == [0] * len(self.codes), self.logs
        return [
            json.loads((self.folder / f"{name}{rank}.json").read_text())
            for rank in range(len(self.codes))
        ]


def until(condition: Callable[[], object]) -> None:
    """Wait for something, with a limit."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_of(torchrun: int, rank: int) -> int:
    """The process of a rank."""
    environments = {
        each: Path(f"/proc/{each}/environ").read_bytes().split(b"\0") for each in children(torchrun)
    }
    return next(
        each for each, environment in environments.items() if f"RANK={rank}".encode() in environment
    )


Run = Callable[[str, int], Outcome]


@contextmanager
def started(script: str) -> Iterator[subprocess.Popen]:
    """The process that forks, so that torch is imported once."""
    command = [sys.executable, str(TESTS / "support" / script)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        yield process
        process.stdin.close()


def fixtures(script: str) -> tuple[Any, Any]:
    """The fixtures `worker`, the process of a module's tests, and `run`."""

    @pytest.fixture(scope="module")
    def worker() -> Iterator[subprocess.Popen]:
        with started(script) as process:
            yield process

    @pytest.fixture
    def run(worker: subprocess.Popen, tmp_path: Path) -> Run:
        return runner(worker, tmp_path)

    return worker, run


def runner(worker: subprocess.Popen, folder: Path) -> Run:
    """Runs a scenario on some ranks."""

    def run(name: str, ranks: int) -> Outcome:
        worker.stdin.write(json.dumps([name, ranks, str(folder)]) + "\n")
        worker.stdin.flush()
        seconds, codes = json.loads(worker.stdout.readline())
        logs = [(folder / f"{rank}.log").read_text() for rank in range(ranks)]
        return Outcome(seconds, codes, logs, folder)

    return run
