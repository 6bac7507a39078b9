"""Models with skips on real processes: their gradients are those of the same model in one process."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launches import ENVIRONMENT, Run, fixtures
from tests.support.paths import DOCS, PROGRAMS

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch

from tests.support.skip_models import LENGTH, WIDTH, UNet

pytestmark = pytest.mark.processes

worker, run = fixtures("skip_worker.py")


def test_a_unet_and_a_translator(run: Run) -> None:
    """What the first half of a U-Net makes goes to its mirror image, what an encoder makes to all
    of its decoder.
    """
    for found in run("models", 4).found():
        assert len(found) == 12
        assert max(found.values()) < 1e-12, found


def test_the_stages_of_the_page_are_those_of_a_unet() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(class Down.*?)^```", page, re.M | re.S)
    names = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    exec(block, names)
    model = UNet(3)
    x = torch.randn(2, WIDTH, LENGTH, dtype=torch.float64)
    down = names["Down"]()
    up = names["Up"]()
    (down.block,) = model.down
    (up.block,) = model.up
    down.later = 2
    up.earlier = 0
    output, given = down(x)
    assert torch.equal(up(model.bottom[0](output), {0: given[2]}), model(x))


def test_skips_of_all_kinds(run: Run) -> None:
    for found in run("graphs", 4).found():
        assert len(found) == 10
        assert max(found.values()) < 1e-12, found


def test_losses_stay_those_of_one_process(run: Run) -> None:
    (found,) = filter(None, run("steps", 4).found())
    assert len(found) == 20
    assert max(abs(ours - right) for ours, right in found) < 1e-12
    assert found[-1][0] < found[0][0] - 0.05


def test_steps_with_other_inputs_and_half_the_bits(run: Run) -> None:
    """What passes by a skip is found out anew for inputs of another shape; `transfer_dtype` is also
    for skips.
    """
    for shapes, rounded in run("other_inputs", 4).found():
        assert shapes < 1e-12
        assert 1e-4 < rounded < 0.1


def test_replicas_and_sharded_stages_with_skips(run: Run) -> None:
    for found in run("on_a_mesh", 4).found():
        assert len(found) == 8
        assert max(found) < 1e-12


def test_skips_of_a_schedule_without_a_flush(tmp_path: Path) -> None:
    """With older versions of the weights, as in one process."""
    text = (PROGRAMS / "pipedream_2bw.sched").read_text()
    program = tmp_path / "late.sched"
    line = "param microbatches = 4"
    program.write_text(text.replace(line, f"{line} skip s in 0 .. 2 from s to s + 2"))
    assert program.read_text() != text
    command = [sys.executable, "-m", "schedlang", "run", str(program), "--steps", "3", "--check"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["loss_error"] < 1e-6
    assert figures["gradient_error"] < 1e-5


WANTED = r"where the plan has skips, it must return two values, its output and a dictionary of what it gives to the"
FAILURES = {
    "nothing": ("0F2", rf"stage 0 returns a Tensor: {WANTED} stages \[2\]"),
    "other_stage": ("0F2", rf"stage 0 returns values for the stages \[1\]: {WANTED} stages \[2\]"),
    "text": ("0F2", r"what stage 0 returns for stage 2 is a str: it must be a tensor, or .*"),
    "shape": (
        "3SEND_F2",
        r"what stage 0 returns for stage 2 is float64 \[2, 4, 16\] for microbatch 2, "
        r"but float64 \[3, 4, 16\] in the first step with inputs of this shape",
    ),
}


@pytest.mark.parametrize("scenario", FAILURES)
def test_what_does_not_match_the_plan_is_one_error(run: Run, scenario: str) -> None:
    outcome = run(scenario, 3)
    (place, message) = FAILURES[scenario]
    assert outcome.codes == [1, 1, 1], outcome.logs
    for log in outcome.logs:
        assert re.search(
            rf"rank 0 failed at {place} \(unet_1f1b.sched:\d+\): {message}$", log, re.M
        ), outcome.logs


def test_split_cuts_for_plans_without_skips(run: Run) -> None:
    outcome = run("by_split", 4)
    message = "the plan has skips, whose stages take and return more than blocks: build"
    assert outcome.codes == [1] * 4
    assert all(message in log for log in outcome.logs), outcome.logs
