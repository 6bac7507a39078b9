"""What scripts do around a pipeline as they do it in one process: it is as there, or refused."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from schedlang.runtime import Pipeline, load_model, split
from tests.support.cut_models import sequence
from tests.support.mesh import PIPE, mesh, place
from tests.support.models import (
    ROWS,
    WIDTH,
    difference,
    modules,
    program,
)
from tests.support.processes import torchrun
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

MICROBATCHES = 4


class Weighted(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output * self.weight, target)


def goes_wrong(what: str) -> None:
    name = "pipedream_2bw" if what == "a loss with late weights" else "1f1b"
    plan = program(name, ranks=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    module = modules(2)[rank]
    stages = {rank: module}
    loss_fn = nn.functional.mse_loss
    if what == "DDP":
        stages = {rank: DistributedDataParallel(module)}
    elif what == "DDP inside":
        # Each rank by itself has one, so nobody waits in it.
        alone = [dist.new_group([each]) for each in range(2)][rank]
        module[0] = DistributedDataParallel(module[0], process_group=alone)
    elif what == "replicate":
        replicate(
            module, process_group=dist.new_group([rank], use_local_synchronization=True)
        )
    elif what == "a loss with weights":
        loss_fn = Weighted()
    elif what == "a loss around one with weights":
        inner = Weighted()
        loss_fn = lambda output, target: {"loss": inner(output, target)}  # noqa: E731
    elif what == "a loss with late weights":
        loss_fn = Weighted()
        stages[rank].register_parameter("factor", loss_fn.weight)
    elif what == "a temperature":
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        loss_fn = lambda *given: scale * nn.functional.mse_loss(*given)  # noqa: E731
    optimizers = {rank: SGD(module.parameters(), 0.1)} if plan.has_updates else None
    pipeline = Pipeline(plan, stages, loss_fn, optimizers=optimizers, timeout=20)
    if what == "assigned":
        copies = {name: each.clone() for name, each in module.state_dict().items()}
        module.load_state_dict(copies, assign=True)
    elif what == "an adapter":
        module.append(nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
    elif what == "a layer out":
        del module[0]
    elif what == "a gradient elsewhere":
        module[0].weight.main_grad = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    inputs = torch.randn(MICROBATCHES * ROWS, WIDTH, dtype=torch.float64)
    pipeline.step(inputs, inputs)
    pipeline.clip_grad_norm_(1.0)


DDP = "DistributedDataParallel, which takes the forward and the backward of a microbatch to"
LOSS = "`loss_fn` has weights of its own, of shape {}, which no stage has"
WEIGHTS = "has other weights than when the pipeline was built: "
MESSAGES = {
    "a gradient elsewhere": f"the gradients of a weight {[WIDTH, WIDTH]} add up in its `main_grad`",
    "DDP": f"is in {DDP}",
    "replicate": "is in DDPSequential, which takes the forward and the backward",
    # Either rank may be the first to say so.
    "DDP inside": f"is, in `0`, in {DDP}",
    "a loss with weights": LOSS.format([WIDTH]),
    "a loss with late weights": "let the forward of the last stage return them with its output",
    "a loss around one with weights": LOSS.format([WIDTH]),
    "a temperature": LOSS.format([]),
    "assigned": f"{WEIGHTS}`0.bias` was replaced, and 1 more like it",
    "an adapter": f"{WEIGHTS}`2.bias` is new, and 1 more like it",
    "a layer out": f"{WEIGHTS}`0.bias` is gone, and 1 more like it",
}


@pytest.mark.parametrize("what", MESSAGES)
def test_what_would_train_otherwise_is_refused(what: str, run_ranks: Run) -> None:
    run = run_ranks(goes_wrong, 2, what)
    assert any(MESSAGES[what] in log for log in run.logs), run.logs
    assert run.codes == [1, 1]
    # Nobody has waited for a rank that has failed.
    assert run.seconds < 20


def one_process_too_many() -> None:
    split(sequence(), program("1f1b", ranks=2, microbatches=MICROBATCHES))


def test_more_processes_than_ranks(run_ranks: Run) -> None:
    log = "".join(run_ranks(one_process_too_many, 3).logs)
    assert (
        "3 processes were started, and the plan has 2 ranks: start 2, `torchrun" in log
    )


BACKWARD = """
import torch
import torch.distributed as dist
from torch import nn

import schedlang
from schedlang.runtime import Pipeline

dist.init_process_group("gloo")
plan = schedlang.compile("1f1b", {"ranks": 2, "microbatches": 2})
stages = {dist.get_rank(): nn.Linear(4, 4)}
pipeline = Pipeline(plan, stages, nn.functional.mse_loss, timeout=20)
losses = pipeline.step(torch.ones(2, 4), torch.ones(2, 4))
if losses is not None:
    losses.mean().backward()
pipeline.step(torch.ones(2, 4), torch.ones(2, 4))
"""


def test_a_backward_of_the_losses_of_a_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BACKWARD)
    printed = torchrun(2, script).stderr
    assert "rank 1 failed: RuntimeError: element 0 of tensors" in printed
    assert "the step has made their backwards, so that all gradients are in" in printed


def with_loss_in_stage(folder: Path, schedule: str) -> list[float]:
    """Two replicas of a pipeline, and one process: the largest differences of a norm, of a weight,
    and of a weight in the files.
    """
    of = mesh("dp", "pp")
    replica, rank = place(of)
    plan = program(schedule, ranks=PIPE, microbatches=MICROBATCHES)
    stages = split(sequence(), plan, rank=rank)
    last = len(plan.placement) - 1
    loss = Weighted()
    # As the refusal of others says.
    if last in stages:
        stages[last].register_parameter("factor", loss.weight)
    ours = Pipeline(plan, stages, loss, mesh=of)
    whole = sequence()
    loss_alone = Weighted()
    whole.register_parameter("factor", loss_alone.weight)
    optimizers = [SGD(each.parameters(), 0.1) for each in (*stages.values(), whole)]
    generator = torch.Generator().manual_seed(1)
    size = (2, 2, MICROBATCHES * ROWS, WIDTH)
    off = [0.0, 0.0, 0.0]
    for _ in range(3):
        batches = torch.randn(size, generator=generator, dtype=torch.float64)
        for inputs, targets in batches:
            (loss_alone(whole(inputs), targets) / 2).backward()
        ours.step(*batches[replica])
        norm = ours.clip_grad_norm_(0.1)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        off[0] = max(off[0], difference(norm, expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours.save_model(folder / schedule)
    loaded = sequence()
    loaded.register_parameter("factor", Weighted().weight)
    load_model(folder / schedule, {0: loaded})
    expected_weights = dict(whole.named_parameters())
    for column, modules_of in ((1, stages.values()), (2, [loaded])):
        for module in modules_of:
            for name, weight in module.named_parameters():
                pair = weight.detach(), expected_weights[name].detach()
                off[column] = max(off[column], difference(*pair))
    return off


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_weights_of_a_loss_are_those_of_the_stage_that_has_it(
    run_ranks: Run, tmp_path: Path, schedule: str
) -> None:
    """In norms, in sums over replicas, and in files."""
    for off in run_ranks(with_loss_in_stage, 4, tmp_path, schedule).results():
        assert max(off) < 1e-12


def drops(seed_of_rank: int) -> None:
    """Each stage has dropout, on ranks that are seeded alike, or not."""
    plan = program("1f1b", ranks=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    module = nn.Sequential(modules(2)[rank], nn.Dropout())
    torch.manual_seed(seed_of_rank * rank)
    inputs = torch.ones(MICROBATCHES * ROWS, WIDTH, dtype=torch.float64)
    Pipeline(plan, {rank: module}, nn.functional.mse_loss).step(inputs, inputs)


@pytest.mark.parametrize("seed_of_rank", [0, 1])
def test_stages_that_draw_the_same_numbers_are_asked_about(
    run_ranks: Run, seed_of_rank: int
) -> None:
    done = run_ranks(drops, 2, seed_of_rank)
    assert done.results() == [None, None]
    said = "stages 0 and 1 draw the same random numbers"
    assert [said in log for log in done.logs] == [seed_of_rank == 0, False]


def keeps_inputs(schedule: str) -> None:
    """Hooks that hand the input of a layer from its forward to its backward, as K-FAC has them."""
    plan = program(schedule, ranks=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    module = modules(2)[rank]
    kept: list[Tensor] = []
    module[0].register_forward_hook(lambda *given: kept.append(given[-1]))
    module[0].register_full_backward_hook(lambda *_: None)
    inputs = torch.ones(MICROBATCHES * ROWS, WIDTH, dtype=torch.float64)
    stages = {rank: module}
    Pipeline(plan, stages, nn.functional.mse_loss, audit=True).step(inputs, inputs)


def test_an_audit_asks_about_hooks_of_forward_and_backward(run_ranks: Run) -> None:
    """On rank 0, which has several microbatches under way, and not on rank 1, which has one."""
    done = run_ranks(keeps_inputs, 2, "1f1b")
    assert done.results() == [None, None]
    said = "has hooks of the forward and of the backward of `0`"
    assert [said in log for log in done.logs] == [True, False]
