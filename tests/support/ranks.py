"""Runs a function of a test module on real processes, the ranks of a process group over gloo.

A test and what its ranks do stand in one file:

    def total() -> float:
        given = torch.ones(1)
        dist.all_reduce(given)
        return float(given)

    def test_all_ranks_have_the_total(run_ranks: Run) -> None:
        assert run_ranks(total, 4).results() == [4.0] * 4

The processes are forked from one that has imported torch and the test module already, see
`rank_server.py`: it is started once for all tests, and each run has new processes.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from attrs import frozen

from tests.support.paths import ROOT
from tests.support.processes import ENVIRONMENT

#: Seconds that ranks have at most, and so a rank that is to stall stalls so long.
LIMIT = 120.0


@frozen
class Outcome:
    """What became of the ranks of a run."""

    seconds: float
    #: How each rank ended: None where it did not, within the limit.
    codes: list[int | None]
    #: What each rank printed.
    logs: list[str]
    folder: Path

    def has_started(self) -> bool:
        """Whether all ranks have found each other."""
        return all(
            (self.folder / f"{rank}.started").exists()
            for rank in range(len(self.codes))
        )

    def results(self) -> list[Any]:
        """What each rank returned; all must have.

        Exit codes do not count: a thread of gloo may abort a process that has done its work.
        """
        files = [self.folder / f"{rank}.result" for rank in range(len(self.codes))]
        assert all(each.exists() for each in files), self.logs
        # An exception of Python ends a process with 1; what gloo does to one that is done is a
        # signal.
        assert 1 not in self.codes, self.logs
        return [pickle.loads(each.read_bytes()) for each in files]


Run = Callable[..., Outcome]


class RankServer:
    """The process that forks ranks, and the connection by which it is asked to."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        command = [
            sys.executable,
            "-m",
            "tests.support.rank_server",
            str(theirs.fileno()),
        ]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=ENVIRONMENT, cwd=ROOT
        )
        theirs.close()

    def run(
        self,
        folder: Path,
        function: Callable[..., object],
        ranks: int,
        *arguments: object,
        joins: bool = True,
        seconds: float | None = None,
    ) -> Outcome:
        """Call a function with these arguments on so many ranks.

        They join a process group, or not; they have the seconds from when all have started.
        """
        call = partial(function, *arguments)
        self.connection.send_bytes(
            pickle.dumps((call, ranks, joins, folder, LIMIT, seconds))
        )
        took, codes = self.connection.recv()
        logs = [(folder / f"{rank}.log").read_text() for rank in range(ranks)]
        return Outcome(took, codes, logs, folder)

    def stop(self) -> None:
        """It ends when nobody can ask it any more."""
        self.connection.close()
        self.process.wait()


def runner(server: RankServer, folder: Path) -> Run:
    """What runs functions for one test; each run has a folder of its own."""
    numbers = count()

    def run(
        function: Callable[..., object], ranks: int, *given: object, **how: Any
    ) -> Outcome:
        own = folder / f"run{next(numbers)}"
        own.mkdir()
        return server.run(own, function, ranks, *given, **how)

    return run
