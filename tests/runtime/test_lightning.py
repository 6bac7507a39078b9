"""The Trainer of Lightning over a pipeline, beside the same Trainer in one process: losses, rates and
evaluations are the same, also after a start from a checkpoint under another plan.
"""

import csv
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytest.importorskip(
    "lightning", reason="examples/lightning_strategy.py needs lightning"
)

from schedlang import compile, write_plan
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import python, torchrun

# To import Lightning takes most of the time.
pytestmark = [pytest.mark.processes, pytest.mark.large]

SCRIPT = ROOT / "tests" / "support" / "lightning_script.py"
STEPS = 6


def figures(folder: Path) -> dict[tuple[int, str], float]:
    """What the Trainer has logged, by step and name."""
    with (folder / "metrics.csv").open() as file:
        return {
            (int(line["step"]), name): float(value)
            for line in csv.DictReader(file)
            for name, value in line.items()
            if name in ("loss", "rate", "validation") and value
        }


def test_lightning_trains_with_a_plan_as_in_one_process(tmp_path: Path) -> None:
    """Twice: from the beginning, and from the checkpoint of the first epoch."""
    kept: dict[str, list[Path]] = {"alone": [], "plan": []}
    for name, ranks in (("zb_v", 2), ("1f1b", 3)):
        alone = tmp_path / f"alone-{name}"
        done = python(SCRIPT, "-", alone, STEPS, *kept["alone"])
        assert not done.returncode, done.stderr
        plan = tmp_path / f"{name}.json"
        params = {"ranks": ranks, "microbatches": 4}
        write_plan(compile(PROGRAMS / f"{name}.sched", params), plan)
        folder = tmp_path / name
        done = torchrun(ranks, SCRIPT, plan, folder, STEPS, *kept["plan"])
        assert not done.returncode, done.stderr
        expected = figures(alone)
        assert {each for _, each in expected} == {"loss", "rate", "validation"}
        found = figures(folder)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4), (name, key)
        # The other plan goes on from here.
        kept["alone"] = [alone / "kept" / "epoch=0.ckpt"]
        kept["plan"] = [folder / "kept" / "epoch=0.ckpt"]
