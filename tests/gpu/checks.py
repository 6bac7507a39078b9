"""What a check is, and what all of them use: a model, a batch, and one process to compare with."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from schedlang import Plan, compile
from schedlang.runtime import Pipeline

#: What a check has found, by name; it is written as JSON.
Said = dict[str, Any]


@frozen
class Check:
    """A check: a function that each of its ranks calls, and that gives what was found.

    It may take `seconds`. One that measures runs `alone`. One that `breaks` ends processes while a
    GPU works for them, which may take a server of CUDA MPS with it, so it comes last, without one.
    `exit_codes` are those of the ranks of a check that went well.
    """

    name: str
    run: Callable[[], Said]
    ranks: int
    seconds: float
    alone: bool
    breaks: bool
    needs_gpu: bool
    exit_codes: tuple[int, ...]


#: All checks, in the order in which they run.
CHECKS: dict[str, Check] = {}


def check(
    ranks: int = 1,
    seconds: float = 90,
    *,
    alone: bool = False,
    breaks: bool = False,
    needs_gpu: bool = False,
    exit_codes: tuple[int, ...] = (),
) -> Callable[[Callable[[], Said]], Callable[[], Said]]:
    """Register a function as a check."""

    def register(run: Callable[[], Said]) -> Callable[[], Said]:
        name = run.__name__
        CHECKS[name] = Check(
            name,
            run,
            ranks,
            seconds,
            alone,
            breaks,
            needs_gpu,
            exit_codes or (0,) * ranks,
        )
        return run

    return register


def rank() -> int:
    """The number of this process."""
    return int(os.environ["RANK"])


def device() -> torch.device:
    """The device of this process: all of them share one GPU."""
    return torch.device(os.environ["CHECK_DEVICE"])


def on_gpu() -> bool:
    """Whether the checks run on a GPU."""
    return device().type == "cuda"


def wait_for_device() -> None:
    """Wait until the device has done what it was given."""
    if on_gpu():
        torch.cuda.synchronize()


def join(backend: str | None = None, *, eagerly: bool = False) -> None:
    """Make the process group. NCCL makes its communicator `eagerly` where it is bound to a
    device.
    """
    usual = "cpu:gloo,cuda:nccl" if on_gpu() else "gloo"
    bound = {"device_id": device()} if eagerly and on_gpu() else {}
    dist.init_process_group(backend or usual, timeout=timedelta(seconds=40), **bound)


class Block(nn.Module):
    """A block of a GPT: attention and a layer of its own, of width `width`."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.RMSNorm(width)
        self.queries = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.before_layer = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (rows, tokens, width), as its input."""
        rows, tokens, width = x.shape
        heads = rows, tokens, 3, self.heads, width // self.heads
        queries = self.queries(self.before_attention(x)).view(heads)
        attention = nn.functional.scaled_dot_product_attention(
            *queries.permute(2, 0, 3, 1, 4), is_causal=True
        )
        x = x + self.attended(attention.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_layer(x))))


def blocks(
    stages: int, width: int = 64, each: int = 1, dtype: torch.dtype | None = None
) -> list[nn.Module]:
    """A model in so many stages of `each` blocks, the same in all processes."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*(Block(width) for _ in range(each))).to(device(), dtype)
        for _ in range(stages)
    ]


def mse(output: Tensor, target: Tensor) -> Tensor:
    """The loss of all checks."""
    return nn.functional.mse_loss(output.float(), target.float())


def batch(
    rows: int, tokens: int = 32, width: int = 64, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same in all processes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, tokens, width, generator=generator).to(device(), dtype)
    return inputs, inputs.flip(1).contiguous()


def largest_difference(
    modules: Sequence[nn.Module], others: Sequence[nn.Module]
) -> float:
    """How far the gradients of two models are apart, at most, as a part of the largest one."""
    worst = 0.0
    for module, other in zip(modules, others, strict=True):
        for one, two in zip(module.parameters(), other.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is None or two.grad is None:
                continue
            difference = (one.grad - two.grad).abs().max() / two.grad.abs().max()
            worst = max(worst, float(difference))
    return worst


@frozen(eq=False)
class Trained:
    """A pipeline after some steps, with the stages of this rank and its batch."""

    plan: Plan
    pipeline: Pipeline
    stages: Mapping[int, nn.Module]
    inputs: Tensor
    targets: Tensor
    #: How far gradients are from those of one process.
    off: float

    def step(self) -> Tensor | None:
        """One more step."""
        for module in self.stages.values():
            module.zero_grad()
        return self.pipeline.step(self.inputs, self.targets)


#: How far gradients may be from those of one process: sums of floats in another order.
TOLERANCE = 2e-4


def train(
    program: str,
    sizes: Mapping[str, int],
    *,
    transport: str = "portable",
    steps: int = 2,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> Trained:
    """Some steps of a program of the gallery, whose gradients must be those of one process."""
    plan = compile(program, dict(sizes), transport=transport)
    pieces = blocks(plan.layout.pieces)
    alone = copy.deepcopy(pieces)
    rows = max(each.microbatches for each in plan.layout.pipelines)
    rows *= 1 if plan.layout.models else len(plan.layout.pipelines)
    inputs, targets = batch(2 * rows)
    for x, target in zip(inputs.chunk(rows), targets.chunk(rows), strict=True):
        for module in alone:
            x = module(x)
        (mse(x, target) / rows).backward()
    stages = {
        stage: copy.deepcopy(pieces[plan.layout.piece(stage)])
        for stage in plan.stages_of(rank())
    }
    options.setdefault("timeout", 30.0)
    pipeline = Pipeline(plan, stages, mse, **options)
    trained = Trained(plan, pipeline, stages, inputs, targets, 0.0)
    for _ in range(steps):
        trained.step()
    of_stages = [alone[plan.layout.piece(stage)] for stage in stages]
    off = largest_difference([*stages.values()], of_stages)
    if off > tolerance:
        raise AssertionError(f"{program}: gradients are off by {off:g}")
    return Trained(plan, pipeline, stages, inputs, targets, off)
