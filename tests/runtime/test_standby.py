"""A rank that is killed in a step: the others do the step again under the plan for those left, and
what they train is what one process trains.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from schedlang import Plan, compile
from schedlang.runtime import PipelineError, Standby
from schedlang.runtime.standby import _State as State
from schedlang.runtime.watchdog import GRACE
from tests.support.forks import fork
from tests.support.models import WIDTH, batch, difference, modules, program
from tests.support.pages import program_of
from tests.support.paths import ROOT
from tests.support.processes import torchrun
from tests.support.ranks import Run
from tests.support.training import Training, launched

pytestmark = pytest.mark.processes

REPLICAS = 2
STEPS = 4
#: The step in which a rank is killed.
STEP = 1
#: Where a rank is killed behind the last call of its step.
AT_BARRIER, BEFORE_OUTCOME, AFTER_OUTCOME = "barrier", "before", "after"
#: Seconds that processes may lose on a machine that does other things, too.
SLACK = 20.0


def test_gradients_are_restored_in_the_memory_of_the_script() -> None:
    """A script may have laid out gradients in a flat tensor."""
    stage = nn.Linear(WIDTH, WIDTH, bias=False)
    flat = torch.ones(WIDTH * WIDTH)
    stage.weight.grad = flat.view(WIDTH, WIDTH)
    before = State({0: stage})
    stage.weight.grad += 1
    before.restore()
    assert torch.equal(flat, torch.ones_like(flat))
    assert stage.weight.grad.data_ptr() == flat.data_ptr()


class Counting(nn.Module):
    """A stage whose forwards change buffers, the averages of a norm, from which nothing follows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.BatchNorm1d(WIDTH, affine=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(x)
        return self.inner(x)

    @property
    def forwards(self) -> int:
        """How often it has run."""
        return int(self.norm.num_batches_tracked)


def all_ranks(ranks: int) -> Plan:
    """Several pipelines with the same weights, each on ranks of its own."""
    source = program_of(ROOT / "docs" / "training.md", "replicated.sched")
    return compile(source, {"ranks": ranks, "replicas": REPLICAS, "microbatches": 4})


def without(ranks: int, rank: int) -> Plan:
    """ReCycle's plan for the other ranks."""
    return program(
        "recycle",
        ranks=ranks - 1,
        replicas=REPLICAS,
        lost=rank // REPLICAS,
        microbatches=4,
    )


@frozen
class Death:
    """A rank that is killed at a call of a step, by its index, or behind the last one."""

    rank: int
    at: int | str
    step: int = STEP


@frozen
class Trained:
    """What a rank has after its steps."""

    #: How often its stage has run forward, by its buffer.
    forwards: int
    #: The largest difference of the gradients of any step from those of one process.
    worst: float
    #: Of each step.
    seconds: list[float]
    #: How many calls a step of the first plan has.
    calls: int
    norms: list[float]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_trap(standby: Standby, at: int | str) -> None:
    """Let this process be killed in the next step."""
    if isinstance(at, int):
        calls = standby.pipeline._training
        calls.insert(at, (calls[min(at, len(calls) - 1)][0], die, None))
    elif at == AT_BARRIER:
        standby.pipeline.barrier = die
    else:
        write = standby._outcomes.write

        def die_beside(outcome: str) -> str:
            if at == BEFORE_OUTCOME:
                die()
            write(outcome)
            die()
            return outcome

        standby._outcomes.write = die_beside


def add_gradients(model: nn.Sequential, plan: Plan, step: int) -> None:
    """Those of the mean over the whole batch."""
    inputs, targets = batch(plan, step)
    nn.functional.mse_loss(model(inputs), targets).backward()


def whole_model(pieces: int, ties: bool) -> nn.Sequential:
    """The stages of one pipeline, of which the first and the last one may have the same weight."""
    model = nn.Sequential(*map(Counting, modules(pieces)))
    if ties:
        model[-1].inner[0].weight = model[0].inner[0].weight
    return model


def train(
    folder: Path,
    ranks: int,
    death: Death | None,
    clips: bool = False,
    ties: bool = False,
    every: int = 1,
) -> None:
    """Some steps, in one of which a rank is killed. Whoever is left keeps what it has."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plan = all_ranks(ranks)
    left = {each: without(ranks, each) for each in range(ranks)}
    own = whole_model(plan.layout.pieces, ties)[rank // REPLICAS]
    alone = whole_model(plan.layout.pieces, ties)
    right = alone[rank // REPLICAS]
    (stage,) = plan.stages_of(rank)
    weight = "inner.0.weight"
    tied = [{0: weight, plan.layout.pieces - 1: weight}] if ties else None
    loss_fn = nn.functional.mse_loss
    standby = Standby(plan, left, {stage: own}, loss_fn, tied=tied)
    calls = len(standby.pipeline._training)
    optimizers = [
        torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (own, alone)
    ]
    worst = 0.0
    seconds = []
    norms = []
    for step in range(STEPS):
        if death is not None and death.step == step and death.rank == rank:
            set_trap(standby, death.at)
        begin = time.monotonic()
        inputs, targets = batch(plan, step)
        if clips:
            norms.append(float(standby.run(partial(clipped, inputs, targets))))
        else:
            standby.step(inputs, targets)
        seconds.append(time.monotonic() - begin)
        add_gradients(alone, plan, step)
        if clips:
            nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        pairs = [*zip(own.parameters(), right.parameters(), strict=True)]
        worst = max(
            worst, *(difference(ours.grad, theirs.grad) for ours, theirs in pairs)
        )
        for optimizer in optimizers if step % every == every - 1 else ():
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, *(difference(ours, theirs) for ours, theirs in pairs))
    found = Trained(own.forwards, worst, seconds, calls, norms)
    (folder / f"{rank}.trained").write_bytes(pickle.dumps(found))


def clipped(inputs: torch.Tensor, targets: torch.Tensor, pipeline: Any) -> torch.Tensor:
    pipeline.step(inputs, targets)
    return pipeline.clip_grad_norm_(0.01)


def shielded(main: Callable[[], None]) -> None:
    """As `sh -c 'python train.py || [ $? -gt 128 ]'`: a process that is killed has not failed."""
    _, status = os.waitpid(fork(main), 0)
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        raise SystemExit(code)


@frozen
class Survivors:
    """What became of a training."""

    trained: dict[int, Trained]
    training: Training


def survivors(
    run_ranks: Run, folder: Path, ranks: int, death: Death | None, **options: Any
) -> Survivors:
    """Train, and check that all ranks but the dead one have trained what one process trains."""
    for old in folder.glob("*.trained"):
        old.unlink()
    main = partial(shielded, partial(train, folder, ranks, death, **options))
    training = launched(run_ranks, folder, ranks, main)
    found = {
        int(path.stem): pickle.loads(path.read_bytes())
        for path in folder.glob("*.trained")
    }
    dead = set() if death is None else {death.rank}
    assert found.keys() == {*range(ranks)} - dead, training.stderr
    for each in found.values():
        assert each.worst < 1e-12
    if death is not None:
        assert f"rank {death.rank} is gone" in training.stderr
        seconds = max(max(each.seconds) for each in found.values())
        usual = max(each.seconds[-1] for each in found.values())
        print(f"{death}: {seconds:.2f} s in place of {usual:.3f} s")
        assert seconds < 2 * usual + GRACE + SLACK
    return Survivors(found, training)


@pytest.mark.core
def test_a_killed_rank_is_routed_around(run_ranks: Run, tmp_path: Path) -> None:
    """In the midst of its step; forwards that are run again count once in a buffer."""
    found = survivors(run_ranks, tmp_path, 4, Death(3, 6))
    # From that step on, rank 2 has the microbatches of both.
    assert found.trained[2].forwards == 2 * STEP + 4 * (STEPS - STEP)


@pytest.mark.core
def test_what_is_done_with_gradients_is_done_again(
    run_ranks: Run, tmp_path: Path
) -> None:
    """A rank is killed after the norm is known, before all know that the step is done."""
    found = survivors(run_ranks, tmp_path, 4, Death(1, AT_BARRIER), clips=True)
    norms = {tuple(each.norms) for each in found.trained.values()}
    assert len(norms) == 1


@pytest.mark.parametrize("options", [{"ties": True}, {"every": 2}], ids=["tied", "two"])
def test_gradients_of_two_stages_and_of_two_steps_add_up(
    run_ranks: Run, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Where a weight is tied; and where an optimizer steps after every second step of the pipeline,
    so that there are gradients before the step in which a rank is killed.
    """
    survivors(run_ranks, tmp_path, 4, Death(2, 7), **options)


@pytest.mark.large
@pytest.mark.parametrize(
    ("ranks", "rank", "step"),
    [
        (ranks, rank, step)
        for ranks, step in ((4, 0), (4, STEP), (6, STEP))
        for rank in range(ranks)
    ],
)
def test_a_rank_may_be_killed_at_every_call(
    run_ranks: Run, tmp_path: Path, ranks: int, rank: int, step: int
) -> None:
    """Of the first step, in which ranks learn the shapes of messages, and of a later one."""
    calls = survivors(run_ranks, tmp_path, ranks, None).trained[rank].calls
    assert calls > 8
    for at in [*range(calls + 1), AT_BARRIER, BEFORE_OUTCOME, AFTER_OUTCOME]:
        survivors(run_ranks, tmp_path, ranks, Death(rank, at, step))


def dies_after_another(folder: Path) -> None:
    """Two ranks are killed, one after the other."""
    dist.init_process_group("gloo")
    standby, _ = small_standby()
    for step in range(STEPS):
        if (dist.get_rank(), step) in ((3, 1), (1, 2)):
            set_trap(standby, 4)
        standby.step(*batch(all_ranks(4), step))


def dies_as_others_go_on(folder: Path) -> None:
    """A second rank is killed where the others connect anew."""
    dist.init_process_group("gloo")
    standby, _ = small_standby(timeout=5)
    if dist.get_rank() == 3:
        set_trap(standby, 4)
    if dist.get_rank() == 1:
        standby._build = die
    standby.step(*batch(all_ranks(4), 0))


def fails(folder: Path) -> None:
    """A rank fails with an error of its own."""
    dist.init_process_group("gloo")
    standby, model = small_standby()
    if dist.get_rank() == 3:
        model.register_forward_pre_hook(throw)
    standby.step(*batch(all_ranks(4), 0))


def throw(*_: object) -> None:
    raise ValueError("boom")


def small_standby(timeout: float = 60) -> tuple[Standby, nn.Module]:
    """A standby on four ranks, and the module of this one."""
    plan = all_ranks(4)
    left = {each: without(4, each) for each in range(4)}
    (stage,) = plan.stages_of(dist.get_rank())
    model = modules(plan.layout.pieces)[plan.layout.piece(stage)]
    loss_fn = nn.functional.mse_loss
    return Standby(plan, left, {stage: model}, loss_fn, timeout=timeout), model


@pytest.mark.parametrize(
    ("main", "dead", "message"),
    [
        (dies_after_another, 2, "rank 1 is gone, and there is no plan for the others"),
        (dies_as_others_go_on, 2, "the ranks 0, 1, 2 have not connected within 5 s"),
        (
            fails,
            0,
            "rank 3 (pp 3) failed at lane(1,1)F0 (replicated.sched:15): ValueError: boom",
        ),
    ],
    ids=["second", "connecting", "error"],
)
def test_what_no_rank_survives_ends_all_with_a_cause(
    run_ranks: Run,
    tmp_path: Path,
    main: Callable[[Path], None],
    dead: int,
    message: str,
) -> None:
    training = launched(
        run_ranks, tmp_path, 4, partial(shielded, partial(main, tmp_path))
    )
    # A rank that was killed has not failed for the launcher.
    assert training.codes.count(0) == dead
    assert message in training.stderr


def refusals() -> list[str]:
    """What a standby is refused for, in a process group whose store is in rank 0."""
    plan = all_ranks(4)
    module = nn.Linear(WIDTH, WIDTH)
    cases = [
        {3: plan},
        {3: program("recycle", ranks=3, replicas=2, lost=1, microbatches=8)},
        {3: program("1f1b", ranks=3, microbatches=4)},
        {3: without(4, 0)},
        {0: without(4, 0)},
        {3: without(4, 3)},
    ]
    found = []
    for left in cases:
        with pytest.raises(PipelineError) as error:
            Standby(plan, left, {0: module}, nn.functional.mse_loss)
        found.append(str(error.value))
    return found


def test_plans_under_which_the_others_cannot_go_on_are_refused(run_ranks: Run) -> None:
    (found,) = run_ranks(refusals, 1).results()
    assert found == [
        "`left[3]`, replicated (replicas = 2, ranks = 4, microbatches = 4), is for 4 ranks, and "
        "without rank 3 there are 3",
        "`left[3]`, recycle (replicas = 2, ranks = 3, microbatches = 8, lost = 1), has 8 "
        "microbatches, the plan 4",
        "`left[3]`, one_f_one_b (ranks = 3, microbatches = 4), has 3 stages in a pipeline, the "
        "plan 2",
        "`left[3]`, recycle (replicas = 2, ranks = 3, microbatches = 4, lost = 0), gives rank 1 "
        "the stages [1] of a pipeline, and it has the weights of [0]",
        "rank 0 has the store of the process group, so no rank can go on without it: start the "
        "processes with torchrun, which has the store itself, or leave rank 0 out of `left`",
        "the plan needs 4 processes, 1 was started",
    ]


SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from schedlang import Source, compile
from schedlang.runtime import Standby, split
from tests.support.pages import program_of
from tests.support.paths import PROGRAMS, ROOT


class Dies(nn.Linear):
    forwards = 0

    def forward(self, x):
        Dies.forwards += 1
        if dist.get_rank() == 0 and Dies.forwards == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(Dies(8, 8), nn.Tanh(), nn.Linear(8, 8))
plan = compile(program_of(ROOT / "docs" / "training.md", "replicated.sched"))
recycle = Source("recycle.sched", (PROGRAMS / "recycle.sched").read_text())
params = {"ranks": 3, "replicas": 2, "microbatches": 8}
left = {rank: compile(recycle, params | {"lost": rank // 2}) for rank in range(4)}
standby = Standby(plan, left, split(model, plan), nn.functional.mse_loss)
for step in range(3):
    standby.step(torch.ones(16, 8), torch.zeros(16, 8))
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
    file.write(standby.pipeline._plan.name)
"""


@pytest.mark.large
def test_torchrun_goes_on_without_a_killed_rank(tmp_path: Path) -> None:
    """By the line of the page; rank 0 is killed, and torchrun has the store."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shielded = f"{sys.executable} {script} {tmp_path} || [ $? -gt 128 ]"
    done = torchrun(4, "--no-python", "sh", "-c", shielded)
    assert done.returncode == 0, done.stderr
    assert "rank 0 is gone" in done.stderr
    plans = {int(rank): (tmp_path / rank).read_text() for rank in "123"}
    assert plans == dict.fromkeys((1, 2, 3), "recycle")
    assert not (tmp_path / "0").exists()
