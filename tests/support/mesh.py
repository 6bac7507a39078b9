"""Pipelines on a device mesh: two ranks a pipeline, and two pipelines beside each other."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.models import WIDTH, alone

PIPE = 2
#: How many different inputs an embedding has.
BYTES = 12
#: With a split backward, two pipelines, two stages a rank, slices, recomputation, copies to the
#: host.
SCHEDULES = (
    "1f1b",
    "zb_v",
    "dualpipe",
    "interleaved_1f1b",
    "seq1f1b",
    "1f1b_recompute",
    "pipe_offload",
)


def mesh(*names: str) -> DeviceMesh:
    """Two ranks a pipeline, and two pipelines, along the dimensions of these names."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def place(of: DeviceMesh) -> tuple[int, int]:
    """Which replica this process belongs to, and which rank of the plan it is."""
    return of.get_local_rank("dp"), of.get_local_rank("pp")


def on(
    of: DeviceMesh, plan: Plan, model: list[nn.Module], **options: object
) -> Pipeline:
    mine = {stage: model[stage] for stage in plan.stages_of(of.get_local_rank("pp"))}
    return Pipeline(plan, mine, nn.functional.mse_loss, mesh=of, **options)


def weights(
    model: list[nn.Module], other: list[nn.Module], stages: list[int]
) -> list[tuple[nn.Parameter, ...]]:
    """Those of some stages, side by side."""
    sides = [
        [each for stage in stages for each in side[stage].parameters()]
        for side in (model, other)
    ]
    return list(zip(*sides, strict=True))


def add_gradients(
    plan: Plan,
    model: list[nn.Module],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    replicas: int = 2,
) -> list:
    """Those of the mean over the microbatches of replicas; the losses of this one's."""
    losses = []
    for x, y in zip(
        inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True
    ):
        loss = nn.functional.mse_loss(alone(model, x), y)
        (loss / plan.microbatches / replicas).backward()
        losses.append(loss.detach())
    return losses


def momentum(module: nn.Module, limit: float = math.inf) -> torch.optim.Optimizer:
    """Clips the gradient of its module, as the pages have it for plans with updates."""
    optimizer = torch.optim.SGD(
        module.parameters(), 0.1, momentum=0.9, weight_decay=0.01
    )

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), limit)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def is_same_everywhere(tensor: torch.Tensor, of: DeviceMesh) -> bool:
    """Whether both replicas have the same, to the bit."""
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor, group=of.get_group("dp"))
    return torch.equal(*both)


class Input(nn.Module):
    """Bytes to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.byte(x)))


class Output(nn.Module):
    """Vectors to a score for each byte, by its vector of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.tanh(self.mix(x)))


def embedded(stages: int, is_same: bool) -> list[nn.Module]:
    """Stages whose first and last one have the same weight, in one parameter or in two."""
    torch.manual_seed(0)
    model = [Input(), *(nn.Linear(WIDTH, WIDTH) for _ in range(stages - 2)), Output()]
    if is_same:
        model[-1].scores.weight = model[0].byte.weight
    else:
        model[-1].scores.weight.data.copy_(model[0].byte.weight.data)
    return [each.double() for each in model]


def ties(stages: int) -> list[dict[int, str]]:
    return [{0: "byte.weight", stages - 1: "scores.weight"}]
