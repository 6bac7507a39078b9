"""Runs that are killed and go on from their last checkpoint, checkpoints that are of no use, and
Ctrl-C.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes import ENVIRONMENT, LIMIT, children, until, worker_of
from tests.support.programs import plan_file
from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang.runtime import Pipeline
from tests.support.models import WIDTH, batch, modules, pipeline, program
from tests.support.training import printed_figures

pytestmark = pytest.mark.processes

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--max-restarts",
    "1",
    "--nproc-per-node",
]

# Trains for 6 steps, with a checkpoint after every second one. At first, rank 1 dies in the middle
# of the fourth; after the restart, the same training is made again without a cut, and compared.
SCRIPT = """
import copy, json, os, signal, sys, torch
import torch.distributed as dist
from torch import nn
from schedlang import Kind, read_plan
from schedlang.runtime import Pipeline

plan_file, folder, name = sys.argv[1:]
dist.init_process_group("gloo")
plan, rank = read_plan(plan_file), dist.get_rank()
attempt, at_once = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), plan.layout.updates
OPTIMIZERS = {
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01),
}

forwards = []

class Dies(nn.Sequential):
    def forward(self, input):
        forwards.append(step)
        if rank == 1 and not attempt and forwards.count(3) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input)

def train(folder):
    global step
    torch.manual_seed(0)
    pieces = [Dies(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(plan.layout.pieces)]
    # Replicas, where there are two pipelines, begin with the same weights.
    mine = {stage: copy.deepcopy(pieces[stage % len(pieces)]) for stage in plan.stages_of(rank)}
    optimizers = {stage: OPTIMIZERS[name](module.parameters()) for stage, module in mine.items()}
    updates = any(Kind.U in each.kind for each in plan.ranks)
    pipeline = Pipeline(plan, mine, nn.functional.mse_loss, optimizers=optimizers if updates else None)
    others = [] if updates else list(optimizers.values())
    begin = pipeline.resume(folder, others) if folder else 0
    for step in range(begin, 6):
        generator = torch.Generator().manual_seed(step)
        pipeline.step(*torch.randn(2, plan.microbatches * 2, 8, generator=generator))
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
        if folder and step % 2:
            pipeline.save(folder, step + 1, others)
    held = [module.state_dict() for module in mine.values()], pipeline.state_dict()
    return begin, torch.utils._pytree.tree_leaves((held, [each.state_dict() for each in optimizers.values()]))

begin, resumed = train(folder)
_, uncut = train(None)
same = [torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(resumed, uncut, strict=True)]
with open(f"{folder}/found-{rank}.json", "w") as file:
    json.dump([attempt, begin, len(same), all(same)], file)
dist.barrier()
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "optimizer", "ranks"),
    list(
        product(
            ("1f1b", "zb_v", "pipedream_2bw", "dualpipe"), ("momentum", "adamw"), (4,)
        )
    ),
)
def test_a_restarted_run_is_the_uncut_one(
    tmp_path: Path, name: str, optimizer: str, ranks: int
) -> None:
    """To the bit: weights in all versions, the state of the optimizers, and random numbers by the
    way.
    """
    plan = plan_file(tmp_path, name, ranks=ranks, microbatches=2 * ranks)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        *TORCHRUN,
        str(ranks),
        str(script),
        str(plan),
        str(tmp_path / "kept"),
        optimizer,
    ]
    # Or torch may look for processes of the first attempt, as docs/training.md has it.
    environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        attempt, begin, tensors, same = json.loads(
            (tmp_path / "kept" / f"found-{rank}.json").read_text()
        )
        # 4 weights of a stage and their momenta, if no more.
        assert (attempt, begin, same) == (1, 2, True)
        assert tensors >= 8
    # The last two of every rank are kept.
    assert len(list((tmp_path / "kept").glob("*.pt"))) == 2 * ranks
    assert "rank 1 is gone" in done.stderr


def test_the_trainer_resumes_under_torchrun(tmp_path: Path) -> None:
    """A rank dies in the middle; the losses and gradients from then on are those of one process, to
    the bit.
    """
    plan = plan_file(tmp_path, "pipedream_2bw", ranks=2, microbatches=4)
    kept = tmp_path / "kept"
    options = ["--steps", "12", "--checkpoint", str(kept), "--every", "3", "--check"]
    command = [*TORCHRUN, "2", "-m", "schedlang.runtime", str(plan), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
    ) as process:
        try:
            until(
                lambda: all(
                    (kept / f"step-3-rank-{rank}.pt").exists() for rank in range(2)
                )
            )
            os.kill(worker_of(process.pid, 1), signal.SIGKILL)
            out, errors = process.communicate(timeout=LIMIT)
        finally:
            process.terminate()
    assert process.returncode == 0, errors
    assert "rank 1 is gone" in errors
    steps = [int(step) for step in re.findall(r"^step +(\d+) ", out, re.M)]
    # At most the steps since the last checkpoint are made again.
    assert steps.count(1) == 1
    assert sorted(set(steps)) == list(range(1, 13))
    figures = printed_figures(out)
    assert (figures["steps"], figures["loss_error"], figures["gradient_error"]) == (
        12,
        0,
        0,
    )


def checkpointed(schedule: str = "1f1b", width: int = WIDTH) -> Pipeline:
    plan = program(schedule, ranks=2, microbatches=4)
    return pipeline(plan, [nn.Linear(WIDTH, width) for _ in range(2)])


def partial_checkpoint(kept: Path) -> list[int]:
    """Both ranks have steps 1 and 2, rank 0 also step 3, which rank 1 has begun to write, and rank
    1 alone has 4.
    """
    rank = dist.get_rank()
    ours = checkpointed()
    empty = ours.resume(kept)
    dist.barrier()
    for step in (1, 2, 3 + rank):
        ours.save(kept, step)
    if rank == 1:
        file = kept / "step-4-rank-1.pt"
        file.with_name("step-3-rank-1.new").write_bytes(file.read_bytes()[:100])
    return [empty, ours.resume(kept)]


@pytest.mark.core
def test_the_newest_checkpoint_that_all_ranks_have_is_resumed(
    run_ranks: Run, tmp_path: Path
) -> None:
    """Not what only one has, nor what is half written; in an empty folder, none."""
    assert run_ranks(partial_checkpoint, 2, tmp_path / "kept").results() == [
        [0, 2],
        [0, 2],
    ]


def saved_in_the_midst(kept: Path) -> list[str]:
    """What is said where each second save comes between two steps whose gradients add up."""
    plan = program("1f1b", ranks=2, microbatches=4)
    model = modules(2)
    ours = pipeline(plan, model)
    optimizer = torch.optim.SGD(model[dist.get_rank()].parameters(), 0.1)
    said = []
    for step in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours.step(*batch(plan, step))
        said.append(
            any(
                "while gradients of several steps" in str(each.message)
                for each in caught
            )
        )
        if step % 2:
            optimizer.step()
            # Gradients that are zeros are none.
            optimizer.zero_grad(set_to_none=step == 1)
        ours.save(kept, step + 1, [optimizer])
    return said


@pytest.mark.core
def test_a_checkpoint_between_steps_that_add_up_is_asked_about(
    run_ranks: Run, tmp_path: Path
) -> None:
    said = run_ranks(saved_in_the_midst, 2, tmp_path / "kept").results()
    assert said == [[False, True, False, True, False]] * 2


def checkpoint_of_another_plan(kept: Path) -> None:
    checkpointed().save(kept, 2)
    checkpointed("gpipe").resume(kept)


def damaged_checkpoint(kept: Path) -> None:
    checkpointed().save(kept, 2)
    if dist.get_rank() == 1:
        file = kept / "step-2-rank-1.pt"
        file.write_bytes(file.read_bytes()[:100])
    checkpointed().resume(kept)


def checkpoint_of_another_model(kept: Path) -> None:
    checkpointed().save(kept, 2)
    checkpointed(width=WIDTH + 1).resume(kept)


def nowhere_to_write(kept: Path) -> None:
    if dist.get_rank() == 0:
        kept.write_text("")
    dist.barrier()
    checkpointed().save(kept, 2)


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (
            checkpoint_of_another_plan,
            r"the checkpoint `\S+-rank-\d\.pt` is of `one_f_one_b` with ranks = 2, microbatches = 4, not of `gpipe` with "
            r"ranks = 2, microbatches = 4: resume with its own plan, or in another folder",
        ),
        (
            damaged_checkpoint,
            r"the checkpoint `\S+/step-2-rank-1\.pt` cannot be read: .*",
        ),
        (
            checkpoint_of_another_model,
            r"the checkpoint does not fit stage \d: Error\(s\) in loading state_dict .*",
        ),
        (
            nowhere_to_write,
            r"the checkpoint `\S+` cannot be written: (Not a directory|File exists)",
        ),
    ],
)
def test_a_checkpoint_of_no_use_is_one_error(
    run_ranks: Run, tmp_path: Path, resume: Callable[[Path], None], message: str
) -> None:
    outcome = run_ranks(resume, 2, tmp_path / "kept")
    assert outcome.codes == [1, 1], outcome.logs
    for log in outcome.logs:
        assert re.search(
            rf"(^|stopped: |Error: )rank \d failed: {message}$", log, re.M
        ), outcome.logs


def test_a_bar_on_a_terminal_and_ctrl_c(tmp_path: Path) -> None:
    """No traceback and nothing left running; what is said is one line."""
    command = [
        sys.executable,
        "-m",
        "schedlang",
        "run",
        str(PROGRAMS / "1f1b.sched"),
        "-p",
        "ranks=2",
    ]
    ours, theirs = pty.openpty()
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--steps", "1000"], stdout=theirs, stderr=stderr, env=ENVIRONMENT
        )
    os.close(theirs)
    shown = b""
    # By then all ranks train, and something is to be ended.
    while b"step 2/1000" not in shown:
        shown += os.read(ours, 1000)
    (launcher,) = children(process.pid)
    ranks = children(launcher)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 130, errors.read_text()
    assert not any(Path(f"/proc/{each}").exists() for each in [launcher, *ranks])
    os.close(ours)
    assert errors.read_text() == "\nstopped by SIGINT\n"
    bar = (
        r"\x1b\[Kstep 2/1000 ░{24} loss \d\.\d{4}  [\d,]+ tokens/s  rank 1 idle \d+%\r"
    )
    assert re.search(bar, shown.decode(errors="ignore") + "\r")
