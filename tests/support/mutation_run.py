"""mutmut with tests that are collected once: `python -P tests/support/mutation_run.py run`.

By itself mutmut starts pytest for each mutant, and to collect our tests takes longer than what most
mutants need to be killed. Here they are collected once, and each mutant is a fork of that process:

    mutmut ── fork server: collects the tests ──┬─ mutant 1: tests in the order of `in_turn`
                                                ├─ mutant 2
                                                └─ ...

Mutants, types, timeouts and results are mutmut's own, and its other commands (`results`, `show`) work
as always. With the environment variable EACH a mutant that stands meets its quickest tests only, for
so many seconds of processor time, and is "suspicious" then, as mutmut calls it.

This file is run by its path, with `-P`: as a module of `tests` it would bring the tests of the tree
along, and those of the copy that mutmut changes are to be run.
"""

import gc
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from math import ceil, inf, isfinite
from pathlib import Path
from time import process_time
from typing import TextIO

import mutmut.__main__
import pytest
from _pytest.config import _prepareconfig
from mutmut.configuration import config as mutmut_config
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.utils.file_utils import change_cwd
from mutmut.workers.isolation import ForkServerRunner

#: A mutant may ask for memory without end; this is several times what any test needs.
MEMORY = 7 << 30
#: For how many seconds a mutant meets tests, if not for as many as they take.
EACH = float(os.environ.get("EACH") or inf)
#: What mutmut takes for "suspicious".
SUSPICIOUS = 35
#: Which test killed which mutant, a line each.
KILLERS = Path("killers.txt")


class Collected(PytestRunner):
    """Runs the tests of a mutant in a session that has collected all tests before."""

    session: pytest.Session
    items: dict[str, pytest.Item]
    output: TextIO

    def warm_up(self) -> None:
        """Collect all tests, once, in the process that the mutants are forks of."""
        with change_cwd("mutants"):
            config = _prepareconfig(
                [
                    "--rootdir=.",
                    "-q",
                    *self._pytest_add_cli_args_test_selection,
                    *self._pytest_add_cli_args,
                ]
            )
            config._do_configure()
            self.session = pytest.Session.from_config(config)
            config.hook.pytest_sessionstart(session=self.session)
            config.hook.pytest_collection(session=self.session)
        self.items = {item.nodeid: item for item in self.session.items}
        # What is there already is not looked through for garbage, and stays shared by the forks.
        gc.collect()
        gc.freeze()

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        """0; 1 once a test fails; SUSPICIOUS once some, but not all, took their time."""
        if not hasattr(self, "session"):
            # Before there are mutants: the tests as they are, and one that has to fail.
            return super().run_tests(mutant_name=mutant_name, tests=tests)
        assert mutant_name is not None
        # pytest replaces this file by its own. If nobody held it, it would be closed as garbage, a
        # warning for which the first test would fail, whatever the mutant.
        self.output = sys.stdout
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        stop = process_time() + EACH
        if isfinite(EACH):
            # Nor is a test that never ends waited for as long as all would take.
            longest = max(state().duration_by_test[test] for test in tests)
            limit = ceil(stop + EACH + longest)
            _, most = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (min(limit, most), most))
        with change_cwd("mutants"):
            order = [self.items[test] for test in in_turn(mutant_name, tests)]
            for item, after in zip(order, [*order[1:], None], strict=True):
                if process_time() > stop:
                    return SUSPICIOUS
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self.session.testsfailed:
                    with KILLERS.open("a") as killers:
                        killers.write(f"{mutant_name} {item.nodeid}\n")
                    return 1
        return 0


def in_turn(mutant: str, tests: Iterable[str]) -> Sequence[str]:
    """The tests of a mutant: those that killed others of its function; those that killed others of
    its module; the rest. Each the quickest first.
    """
    function = mutant.rpartition("__mutmut_")[0]
    module = function.rpartition(".")[0]
    nearness = dict.fromkeys(tests, 2)
    killers = KILLERS.read_text().splitlines() if KILLERS.exists() else []
    for killed, _, test in (line.partition(" ") for line in killers):
        if test in nearness and killed.startswith(f"{function}__"):
            nearness[test] = 0
        elif test in nearness and killed.startswith(f"{module}."):
            nearness[test] = min(nearness[test], 1)
    times = state().duration_by_test
    return sorted(nearness, key=lambda test: (nearness[test], times[test]))


def runner(workers: int) -> ForkServerRunner:
    """What mutmut asks for: it runs so many mutants at once."""
    return ForkServerRunner(workers, Collected, {}, debug=mutmut_config().debug)


if __name__ == "__main__":
    mutmut.__main__.get_mutant_runner = runner
    mutmut.__main__.cli()
