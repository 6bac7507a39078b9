"""Small models in stages, their plans and batches, and what one process makes of them."""

import copy
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from schedlang import Source
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from schedlang.schedule.layout import Layout
from tests.support.paths import PROGRAMS
from tests.support.plans import compiled
from tests.support.ranks import LIMIT
from tests.support.skip_models import Skipping, in_order

T = TypeVar("T")
V = TypeVar("V")
WIDTH = 8
ROWS = 3

# The second half of the stages of a V splits its backward, the first does not; both are updated.
UPDATES = """schedule updates {
    param ranks = 2
    param microbatches = 3
    stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s
    rank r {
        let late = 2 * ranks - 1 - r
        for m in 0 .. microbatches { F(r, m) }
        for m in 0 .. microbatches { F(late, m)  B(late, m) }
        for m in 0 .. microbatches { BW(r, m)  W(late, m) }
        U
    }
}
"""


def program(name: str, **params: int) -> Plan:
    """A plan of a program in the gallery."""
    path = PROGRAMS / f"{name}.sched"
    return compiled(Source(path.name, path.read_text()), params)


def program_with(name: str, lines: str, **params: int) -> Plan:
    """A plan of a program in the gallery with more lines at its end, without what it claims."""
    # A claim is of the program as it is, and may not be true of it with more lines.
    text = re.sub(
        r"^ *assert .*\n(?: *or .*\n)*",
        "",
        (PROGRAMS / f"{name}.sched").read_text(),
        flags=re.M,
    )
    text = f"{text[: text.rindex('}')]}    {lines}\n}}\n"
    return compiled(
        Source(f"{name}.sched", text), {"ranks": 4, "microbatches": 8} | params
    )


class Summed(nn.Module):
    """Where microbatches have slices: every position sees those before."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(
        self, x: torch.Tensor, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.linear(x).cumsum(dim=1) + (0 if past is None else past)
        # The last position has the sum of all before, which is what the next slice needs.
        return torch.tanh(seen), seen[:, -1:]


def modules(
    stages: int,
    dtype: torch.dtype = torch.float64,
    sliced: bool = False,
    skips: tuple[tuple[int, int], ...] = (),
) -> list[nn.Module]:
    """All stages of a small model, the same on every rank."""
    torch.default_generator.manual_seed(0)
    if sliced:
        return [Summed(dtype) for _ in range(stages)]
    found = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh())
        for _ in range(stages)
    ]
    return (
        [
            Skipping(*each, later=[b for a, b in skips if a == n])
            for n, each in enumerate(found)
        ]
        if skips
        else found
    )


def one_model(layout: Layout, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """The stages of a small model for a plan, without replicas."""
    return modules(layout.pieces, dtype, layout.slices > 1, layout.skips)


def replicated(plan: Plan, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """All stages of a small model, the same on every rank, with replicas for all pipelines."""
    layout = plan.layout
    return [
        module
        for pipeline in layout.pipelines
        for module in one_model(layout, dtype)[: pipeline.stop - pipeline.start]
    ]


class Handing(nn.Module):
    """The first stage hands on its weight itself and a view of it, which all later ones use."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.is_first = is_first
        self.is_last = is_last

    def forward(self, *given: Any) -> Any:
        # In one process, a stage gets the tuple of the one before.
        x, *weights = given if isinstance(given[0], torch.Tensor) else given[0]
        if self.is_first:
            weight = self.linear.weight
            return self.linear(x), weight, weight[1:2].t()
        weight, row = weights
        y = self.linear(x) @ weight + row.squeeze()
        return y if self.is_last else (y, weight, row)


def handing(pieces: int) -> list[nn.Module]:
    """A model of these."""
    torch.manual_seed(0)
    return [Handing(piece == 0, piece == pieces - 1) for piece in range(pieces)]


def alone(model: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """The output of all stages, of whole microbatches."""
    if isinstance(model[0], Skipping):
        return in_order(model, x)
    for each in model:
        x = each(x, None)[0] if isinstance(each, Summed) else each(x)
    return x


def batch(
    plan: Plan, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    # A generator of its own: what else draws numbers changes nothing.
    generator = torch.Generator().manual_seed(seed)
    shape = [ROWS * plan.microbatches, WIDTH]
    if plan.layout.slices > 1:
        # Three positions for each slice.
        shape.insert(1, 3 * plan.layout.slices)
    inputs = torch.randn(shape, generator=generator, dtype=dtype)
    return inputs, torch.randn(shape, generator=generator, dtype=dtype)


def pipeline(plan: Plan, model: list[nn.Module], **options: object) -> Pipeline:
    mine = plan.stages_of(dist.get_rank())
    return Pipeline(
        plan, {stage: model[stage] for stage in mine}, nn.functional.mse_loss, **options
    )


def difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((ours - expected).abs().max() / expected.abs().max()).detach())


def loss_difference(
    plan: Plan, losses: torch.Tensor | None, expected: list[torch.Tensor], rank: int
) -> float:
    """Of the losses on a rank, which are those of the pipelines that end here."""
    here = []
    begin = 0
    for each in plan.layout.trained:
        if plan.placement[each.stop - 1] == rank:
            here += expected[begin : begin + each.microbatches]
        begin += each.microbatches
    assert (losses is None) == (not here)
    return 0.0 if losses is None else difference(losses, torch.stack(here))


# Schedules that update.

# Schedules that update: by name, the delay of each stage's weights for some ranks.
DELAYS = {
    "pipedream": lambda ranks: [ranks - 1 - stage for stage in range(ranks)],
    "pipedream_vertical": lambda ranks: [ranks - 1] * ranks,
    "pipedream_2bw": lambda ranks: [1] * ranks,
    "wpipe": lambda ranks: [1] * ranks + [0] * ranks,
    "gpipe_groups": lambda ranks: [0] * (2 * ranks),
}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1),
    "momentum": lambda weights: torch.optim.SGD(
        weights, 0.1, momentum=0.9, weight_decay=0.01
    ),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01),
    "fused": lambda weights: torch.optim.AdamW(weights, 0.01, fused=True),
}


def version_plan(name: str, ranks: int) -> Plan:
    """A plan with enough updates to tell every delay from others."""
    plan = program(
        name, ranks=ranks, **({"microbatches": 2 * ranks} if name == "wpipe" else {})
    )
    return (
        plan.for_updates(max(plan.layout.updates, ranks + 3)) if plan.kernels else plan
    )


def normed(stages: int) -> list[nn.Module]:
    """Stages with a layer of every kind whose backward reads its weights."""
    torch.default_generator.manual_seed(0)
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for _ in range(stages)
    ]


def update_batches(
    plan: Plan, updates: range
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of some updates."""
    rows = ROWS * plan.microbatches // plan.layout.updates
    generators = (torch.Generator().manual_seed(update) for update in updates)
    return [tuple(torch.randn(2, rows, WIDTH, generator=each)) for each in generators]


class Versions:
    """The weights of stages after each update of one process, and stages that read older ones."""

    def __init__(self, stages: list[nn.Module]) -> None:
        self.stages = stages
        self._readers = [copy.deepcopy(each) for each in stages]
        self._kept: list[list[list[torch.Tensor]]] = []
        self._keep()

    def _keep(self) -> None:
        self._kept.append(
            [
                [weight.detach().clone() for weight in each.parameters()]
                for each in self.stages
            ]
        )

    def read(self, delays: list[int]) -> nn.Sequential:
        """The stages with their weights of so many updates before."""
        newest = len(self._kept) - 1
        for stage, (reader, delay) in enumerate(
            zip(self._readers, delays, strict=True)
        ):
            # Before there are as many versions, the first one is read.
            kept = self._kept[max(newest - delay, 0)][stage]
            for weight, old in zip(reader.parameters(), kept, strict=True):
                weight.data.copy_(old)
        return nn.Sequential(*self._readers)

    def update(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make an update with the gradients of the stages that were read."""
        self.take_gradients()
        for each in optimizers:
            each.step()
        self._keep()

    def take_gradients(self) -> None:
        """Give the stages the gradients of those that were read."""
        for stage, reader in zip(self.stages, self._readers, strict=True):
            for weight, other in zip(
                stage.parameters(), reader.parameters(), strict=True
            ):
                if other.grad is not None:
                    weight.grad = other.grad
                    other.grad = None


def delayed(
    plan: Plan, delays: list[int], optimizer: str, updates: int
) -> list[nn.Module]:
    """What one process makes of gradients that are so late."""
    stages = normed(len(delays))
    versions = Versions(stages)
    optimizers = [OPTIMIZERS[optimizer](list(each.parameters())) for each in stages]
    per_update = plan.microbatches // plan.layout.updates
    for inputs, targets in update_batches(plan, range(updates)):
        read = versions.read(delays)
        for x, y in zip(
            inputs.chunk(per_update), targets.chunk(per_update), strict=True
        ):
            (nn.functional.mse_loss(read(x), y) / per_update).backward()
        versions.update(*optimizers)
    return stages


def shared_out(function: Callable[[T], V], cases: Mapping[str, T]) -> dict[str, V]:
    """What a function makes of each case, for all ranks: each computes a part of them."""
    # Every n-th case, so that expensive ones, which mostly stand together, are shared out too.
    mine = list(cases.items())[dist.get_rank() :: dist.get_world_size()]
    # As one file: of an object with many tensors, each would be a file of its own.
    file = BytesIO()
    torch.save({name: function(case) for name, case in mine}, file)
    files = [b""] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    found: dict[str, V] = {}
    for each in files:
        found |= torch.load(BytesIO(each), weights_only=False)
    return found


# What goes wrong.


class Does(nn.Module):
    def __init__(self, inner: nn.Module, call: int, what: object) -> None:
        super().__init__()
        self.inner = inner
        self.call = call
        self.what = what

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.inner(input)
        self.call -= 1
        return output if self.call >= 0 else self.what(output)


def kill(_: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def sleep(_: torch.Tensor) -> torch.Tensor:
    time.sleep(LIMIT)
    raise AssertionError
