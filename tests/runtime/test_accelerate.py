"""A loop with accelerate over a pipeline, beside accelerate's in one process: its optimizer,
accumulation, loader and trackers; losses, norms, rates and an evaluation are the same, also after a
start from a checkpoint under another plan.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytest.importorskip("accelerate")

from schedlang import compile, write_plan
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import python, torchrun

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = ROOT / "tests" / "support" / "accelerate_script.py"
STEPS = 6
#: The step of the checkpoint from which another plan goes on.
KEPT = 3


def figures(folder: Path) -> dict[tuple[int, str], float]:
    """What the trackers of accelerate have logged, by step and name."""
    lines = json.loads((folder / "log.json").read_text())
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name != "step"
    }


def test_accelerate_beside_a_pipeline(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    done = python(SCRIPT, "-", alone, STEPS)
    assert not done.returncode, done.stderr
    expected = figures(alone)
    assert len(expected) == 3 * STEPS + 1
    checkpoint: list[object] = []
    for name, ranks in (("zb_v", 2), ("1f1b", 4)):
        plan = tmp_path / f"{name}.json"
        params = {"ranks": ranks, "microbatches": 4}
        write_plan(compile(PROGRAMS / f"{name}.sched", params), plan)
        folder = tmp_path / name
        done = torchrun(ranks, SCRIPT, plan, folder, STEPS, *checkpoint)
        assert not done.returncode, done.stderr
        found = figures(folder)
        begin = KEPT if checkpoint else 0
        wanted = {key: value for key, value in expected.items() if key[0] > begin}
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=1e-4), (name, key)
        # The other plan goes on from here.
        checkpoint = [folder / f"step-{KEPT}"]
