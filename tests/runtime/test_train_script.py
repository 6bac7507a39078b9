"""The training script of the documentation, as a user runs it: killed, and started again under
another plan, it trains as one process does.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytest.importorskip("transformers")

from schedlang import compile, write_plan
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import ENVIRONMENT, LIMIT, torchrun, until, worker_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = ROOT / "examples" / "train.py"
#: Another order of the same float32 additions.
TOLERANCE = 1e-5


def plan(folder: Path, name: str, ranks: int) -> Path:
    path = folder / f"{name}.json"
    write_plan(
        compile(PROGRAMS / f"{name}.sched", {"ranks": ranks, "microbatches": 4}), path
    )
    return path


def options(folder: Path, steps: int) -> list[object]:
    return [
        "--folder",
        folder,
        "--steps",
        steps,
        "--save-every",
        2,
        "--evaluate-every",
        4,
        "--length",
        16,
    ]


def logged(folder: Path, name: str) -> dict[int, float]:
    """A figure by step; of a step that was made twice, as the second time."""
    path = folder / "log.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["step"]: line[name] for line in lines if name in line}


def test_the_script_is_killed_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    first = plan(tmp_path, "zb_v", 4)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    line = [sys.executable, *launch, SCRIPT, first, *options(run, 100)]
    with subprocess.Popen(
        [*map(str, line)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until(lambda: (run / "step-2").exists() and 3 in logged(run, "loss"))
        os.kill(worker_of(process.pid, 2), signal.SIGKILL)
        _, printed = process.communicate(timeout=LIMIT)
    assert process.returncode
    assert "rank 2" in printed
    reached = max(logged(run, "loss"))
    for path, ranks, name in ((run, 2, "1f1b"), (alone, 1, "gpipe")):
        done = torchrun(
            ranks, SCRIPT, plan(tmp_path, name, ranks), *options(path, reached + 2)
        )
        assert not done.returncode, done.stderr
    ours, other = logged(run, "loss"), logged(alone, "loss")
    assert ours.keys() == other.keys() == set(range(1, reached + 3))
    for step, loss in other.items():
        assert ours[step] == pytest.approx(loss, rel=TOLERANCE)
    assert logged(run, "held_out")[reached + 2] == pytest.approx(
        logged(alone, "held_out")[reached + 2], rel=TOLERANCE
    )
    assert (run / f"step-{reached + 2}" / "config.json").exists()
