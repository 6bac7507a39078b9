"""Stages, batches and losses for tests with torch's own pipelining, on `RANKS` processes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

RANKS = 4
MICROBATCHES = 8
WIDTH = 6
#: Torch's schedules: how many stages each rank has, and whether they are placed in a V.
SCHEDULES = {
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleLoopedBFS": (2, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}


class Block(nn.Module):
    """A linear layer and tanh, times a factor that is given as a keyword, one for each row."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.double)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        out = self.linear(x).tanh()
        return out if factor is None else out * factor


def held(rank: int, name: str, ranks: int = RANKS) -> list[int]:
    """The stages that a rank has under a schedule of torch's."""
    each, in_v = SCHEDULES[name]
    if in_v:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(each)]


def stages(
    numbers: Sequence[int], count: int, group: dist.ProcessGroup | None = None
) -> list[PipelineStage]:
    """Stages of torch's, whose weights are those of their numbers."""
    cpu = torch.device("cpu")
    return [
        PipelineStage(Block(number), number, count, cpu, group=group)
        for number in numbers
    ]


def mean(output: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
    return ((output - target) ** 2).mean() * factor


def total(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def built(
    name: str,
    loss: Callable[..., Tensor] | None = mean,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Any:
    """A schedule of torch's with stages of its own."""
    ranks = dist.get_world_size(group)
    of_rank = stages(
        held(dist.get_rank(group), name, ranks), ranks * SCHEDULES[name][0], group
    )
    has_one = SCHEDULES[name][0] == 1
    made = getattr(schedules, name)
    return made(
        of_rank[0] if has_one else of_rank, MICROBATCHES, loss_fn=loss, **options
    )


def stages_of(schedule: Any) -> list[PipelineStage]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def gradients(schedule: Any) -> list[Tensor | None]:
    weights = [
        weight for stage in stages_of(schedule) for weight in stage.submod.parameters()
    ]
    return [weight.grad for weight in weights]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = (2, 2 * MICROBATCHES, WIDTH)
    inputs, targets = torch.randn(size, generator=generator, dtype=torch.double)
    return inputs, targets


def arguments(schedule: Any, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
    """What `step` and `eval` are given on this rank: inputs, and a target."""
    inputs, targets = batch(seed)
    own = stages_of(schedule)
    has_first = any(stage.is_first for stage in own)
    has_last = any(stage.is_last for stage in own)
    return [inputs] if has_first else [], targets if has_last else None


def distance(mine: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest difference; infinite where one of them has more, or something that is None."""
    if len(mine) != len(theirs):
        return float("inf")
    worst = 0.0
    for one, other in zip(mine, theirs, strict=True):
        if one is None and other is None:
            continue
        if one is None or other is None:
            return float("inf")
        worst = max(worst, float((one - other).abs().max()))
    return worst
