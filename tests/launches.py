"""Starts the process that forks the ranks of scenarios, `runtime_worker.py` or `fault_worker.py`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

TESTS = Path(__file__).parent
ROOT = TESTS.parent
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
        return [json.loads((self.folder / f"{name}{rank}.json").read_text()) for rank in range(len(self.codes))]


Run = Callable[[str, int], Outcome]


@contextmanager
def started(script: str) -> Iterator[subprocess.Popen]:
    """The process that forks, so that torch is imported once."""
    command = [sys.executable, str(TESTS / script)]
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
