"""The Trainer of transformers over a pipeline, beside the Trainer in one process: losses, norms,
learning rates and evaluations are the same, also after a start from a checkpoint under another plan.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaForCausalLM, TrainingArguments

from examples.trainer import PipelineTrainer
from schedlang import compile, write_plan
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import python, torchrun
from tests.support.trainer_script import CONFIG

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = ROOT / "tests" / "support" / "trainer_script.py"
STEPS = 6
ROW = {"input_ids": [1, 2], "labels": [1, 2]}
FIGURES = ("loss", "grad_norm", "learning_rate", "eval_loss")


def figures(folder: Path) -> dict[tuple[int, str], float]:
    """What the Trainer has logged, by step and name."""
    state = json.loads((folder / "trainer_state.json").read_text())
    return {
        (line["step"], name): line[name]
        for line in state["log_history"]
        for name in FIGURES
        if name in line
    }


def test_the_trainer_trains_with_a_plan_as_in_one_process(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    done = python(SCRIPT, "-", alone, STEPS)
    assert not done.returncode, done.stderr
    expected = figures(alone)
    assert len(expected) == 3 * STEPS + 2
    checkpoint: list[object] = []
    for name, ranks in (("zb_v", 2), ("1f1b", 4)):
        plan = tmp_path / f"{name}.json"
        write_plan(
            compile(PROGRAMS / f"{name}.sched", {"ranks": ranks, "microbatches": 4}),
            plan,
        )
        folder = tmp_path / name
        done = torchrun(ranks, SCRIPT, plan, folder, STEPS, *checkpoint)
        assert not done.returncode, done.stderr
        found = figures(folder)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4), (name, key)
        # The other plan goes on from here.
        checkpoint = [folder / "checkpoint-3"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "`train_dataset` has no rows"),
        ([{"input_ids": [1, 2]}], {}, "has input_ids and no `labels`"),
        ([ROW], {"gradient_accumulation_steps": 2}, "leave it at 1"),
        ([ROW], {}, "start the script with `torchrun --nproc-per-node 2`"),
    ],
)
def test_what_cannot_be_trained_is_said_before_it_begins(
    tmp_path: Path, rows: list[object], options: dict[str, Any], message: str
) -> None:
    plan = compile(PROGRAMS / "gpipe.sched", {"ranks": 2, "microbatches": 2})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        PipelineTrainer(LlamaForCausalLM(CONFIG), plan, arguments, rows)
