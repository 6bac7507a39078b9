"""Every program of the gallery trains: its loss falls as that of 1F1B does, with the command's own
learning rates. `make explore WHAT=trainings` tries all of them, with as many ranks as they have by default.
"""

import re
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
from tests.support.paths import GALLERY, PROGRAMS
from tests.support.training import Train

pytestmark = pytest.mark.processes

STEPS = 30
#: What remains of the first loss, at most.
FALLEN = 2 / 3
#: How much higher the last losses may be than those of 1F1B on the same batches. Late gradients
#: need smaller steps: a delay of three updates a quarter of the rate, and no momentum.
BEHIND = 1.5


def losses_of(train: Train, ranks: int, program: Path, *options: object) -> list[float]:
    """Those that the command prints, step by step."""
    done = train(ranks, program, "--steps", STEPS, *options)
    assert done.codes == [0] * ranks, done.stderr
    return [
        float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", done.stdout, re.M)
    ]


def check(losses: list[float]) -> None:
    assert len(losses) >= STEPS
    assert losses[-1] < FALLEN * losses[0]


def test_late_gradients_train_as_those_of_1f1b(train: Train) -> None:
    """It used to end at a loss of 32, where 1F1B has 2.5."""
    sizes = ["-p", "microbatches=2"]
    late = losses_of(train, 2, PROGRAMS / "pipedream_2bw.sched", *sizes)
    check(late)
    in_time = losses_of(train, 2, PROGRAMS / "1f1b.sched", *sizes)
    assert mean(late[-5:]) < BEHIND * mean(in_time[-5:])


@pytest.mark.parametrize(
    "optimizer", [pytest.param("adam", marks=pytest.mark.large), "adamw"]
)
def test_other_optimizers(train: Train, optimizer: str) -> None:
    program = PROGRAMS / "pipedream_2bw.sched"
    sizes = ["-p", "microbatches=2"]
    check(losses_of(train, 2, program, *sizes, "--optimizer", optimizer, "--lr", 0.002))


@pytest.mark.core
def test_slices_that_do_not_divide_64_bytes(train: Train) -> None:
    sizes = ["-p", "microbatches=2", "-p", "slices=3", "--steps", 2, "--check"]
    done = train(2, PROGRAMS / "seq1f1b.sched", *sizes)
    assert done.codes == [0, 0], done.stderr
    assert "on 504 bytes per step" in done.stdout


def test_a_plan_without_backwards_evaluates(train: Train) -> None:
    sizes = ["-p", "microbatches=2", "--steps", 3, "--check"]
    done = train(2, PROGRAMS / "forward_only.sched", *sizes)
    assert done.codes == [0, 0], done.stderr
    assert (
        "forward_only (ranks 2, stages 2, microbatches 2) evaluates a GPT"
        in done.stdout
    )
    assert "largest difference over 3 steps of a loss 0.0e+00" in done.stdout


@pytest.mark.core
def test_a_loss_that_is_no_number_is_named(train: Train) -> None:
    """By step and microbatch, once; and it ends a training where that is asked for."""
    sizes = ["-p", "microbatches=2", "--lr", 1e30, "--steps", 4]
    done = train(2, PROGRAMS / "1f1b.sched", *sizes)
    said = r"warning: step (\d) of the pipeline: the loss is not finite for microbatch 0 \(nan\)"
    assert done.codes == [0, 0]
    assert len(re.findall(said, done.stderr)) == 1
    stopped = train(2, PROGRAMS / "1f1b.sched", *sizes, "--stop-on-nan")
    assert stopped.codes == [1, 1]
    assert "rank 1 failed" in stopped.stderr
    assert "the loss is not finite for microbatch 0 (nan)" in stopped.stderr
    assert stopped.stdout.count("step ") < done.stdout.count("step ")


@pytest.mark.trainings
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_the_gallery_trains(train: Train, path: Path) -> None:
    ranks = int(re.search(r"param ranks = (\d+)", path.read_text())[1])
    losses = losses_of(train, ranks, path)
    if path.stem in ("forward_only", "decoding"):
        assert len(losses) == STEPS
    else:
        check(losses)
    print(f"{path.stem}: {losses[0]:.2f} to {losses[-1]:.2f}")
