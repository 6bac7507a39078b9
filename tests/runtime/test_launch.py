"""The launcher of `schedc run`: what it says when ranks or signals end a training, and that it leaves
no process behind.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes import ENVIRONMENT, LIMIT, children, until

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)

pytestmark = pytest.mark.processes


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A training of two ranks that would take minutes."""
    command = ["-m", "schedlang", "run", str(PROGRAMS / "1f1b.sched"), "-p", "ranks=2"]
    with subprocess.Popen(
        [sys.executable, *command, "--steps", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def launcher_of(training: subprocess.Popen[str]) -> int:
    """The process of the launcher, as soon as it is there."""
    until(lambda: children(training.pid))
    (launcher,) = children(training.pid)
    return launcher


def test_it_names_a_rank_that_was_killed_and_ends_the_others(
    training: subprocess.Popen[str],
) -> None:
    launcher = launcher_of(training)
    assert training.stdout is not None
    while not training.stdout.readline().startswith("step   2"):
        assert training.poll() is None
    ranks = children(launcher)
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = training.communicate(timeout=LIMIT)
    assert training.returncode == 1
    assert "the process of rank 1 was ended by SIGKILL\n" in errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{each}").exists() for each in [launcher, *ranks])


def test_a_signal_ends_it_while_it_loads_torch(
    training: subprocess.Popen[str],
) -> None:
    launcher = launcher_of(training)
    until(lambda: "libtorch" in Path(f"/proc/{launcher}/maps").read_text())
    training.send_signal(signal.SIGTERM)
    out, errors = training.communicate(timeout=LIMIT)
    assert training.returncode == 128 + signal.SIGTERM
    assert out == ""
    assert errors == "\nstopped by SIGTERM\n"
    assert not Path(f"/proc/{launcher}").exists()
