"""Context parallelism: each process along another dimension of the mesh has a part of every row, and
attention gathers the keys and values of the other parts. Rows are packed with several texts, and
some tokens have no target. Losses and gradients are those of one process that has whole rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.models import WIDTH, difference, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

RANKS = 2
PARTS = 2
MICROBATCHES = 4
ROWS = 2
LENGTH = 12
WORDS = 10

#: Whole backwards, stages in a V with split ones, interleaved ones, and forwards that run again.
SCHEDULES = ("1f1b", "zb_v", "interleaved_1f1b", "1f1b_recompute")


class Gathered(torch.autograd.Function):
    """The parts of all processes, by an all-gather; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: Tensor) -> Any:
        ctx.group = group
        size = dist.get_world_size(group)
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous(), group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        total = torch.stack(gradients)
        dist.all_reduce(total, group=ctx.group)
        return None, total[dist.get_rank(ctx.group)]


class Around(torch.autograd.Function):
    """The parts of all processes, which pass them on around a ring; and their gradients back."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: Tensor) -> Any:
        ctx.group = group
        size = dist.get_world_size(group)
        parts = [part.contiguous()]
        for _ in range(size - 1):
            parts.append(_passed_on(parts[-1], group))
        # This process has part r, then r - 1, and so on.
        own = dist.get_rank(group)
        return tuple(parts[(own - place) % size] for place in range(size))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        size = len(gradients)
        own = dist.get_rank(ctx.group)
        # The sum of part r begins behind process r, and comes home last.
        total = gradients[(own - 1) % size]
        for step in range(2, size + 1):
            total = _passed_on(total, ctx.group) + gradients[(own - step) % size]
        return None, total


def _passed_on(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the process before this one has, while this one's part goes to the next."""
    size = dist.get_world_size(group)
    own = dist.get_rank(group)
    sent = part.contiguous()
    received = torch.empty_like(sent)
    both = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(own + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(own - 1) % size),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return received


#: Gives the keys or values of all parts of the rows, by part.
Gather = Callable[[Tensor], Sequence[Tensor]]


class Stage(nn.Module):
    """An attention block, behind an embedding in the first stage, and before a head in the last."""

    def __init__(self, number: int, count: int, gather: Gather) -> None:
        super().__init__()
        self.gather = gather
        self.words = nn.Embedding(WORDS, WIDTH) if number == 0 else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        is_last = number == count - 1
        self.head = nn.Linear(WIDTH, WORDS) if is_last else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.words(x)
        query, *others = self.project(self.norm(x)).chunk(3, dim=-1)
        key, value = (torch.cat([*self.gather(each)], dim=1) for each in others)
        return self.head(x + F.scaled_dot_product_attention(query, key, value, mask))


def stages(count: int, gather: Gather) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Stage(number, count, gather).double() for number in range(count)]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of words, their targets, of which many are left out, and the text of each word."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * MICROBATCHES, LENGTH)
    words = torch.randint(WORDS, shape, generator=generator)
    targets = torch.randint(WORDS, shape, generator=generator)
    # The further back in a row, the fewer words count.
    is_out = torch.rand(shape, generator=generator) < torch.linspace(0, 1, LENGTH)
    begins = torch.rand(shape, generator=generator) < 0.3
    return words, targets.masked_fill(is_out, -100), begins.cumsum(1)


def mask_of(texts: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Which words may look at which: those of the same text, from their own place back."""
    is_same = texts[:, queries, None] == texts[:, None, keys]
    return is_same & (queries[:, None] >= keys)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the words that count; 0 where there are none."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)


def in_parts(name: str, gather: str, is_sharded: bool) -> list[float]:
    """The largest differences of losses and gradients from those of one process, after two steps
    whose gradients add up.
    """
    mesh = init_device_mesh("cpu", (PARTS, RANKS), mesh_dim_names=("cp", "pp"))
    group = mesh.get_group("cp")
    gathers: dict[str, Gather] = {
        "all-gather": lambda part: Gathered.apply(group, part),
        "ring": lambda part: Around.apply(group, part),
    }
    plan = program(name, ranks=RANKS, microbatches=MICROBATCHES)
    model = stages(plan.layout.pieces, gathers[gather])
    alone = stages(plan.layout.pieces, lambda part: [part])
    own = {stage: model[stage] for stage in plan.stages_of(mesh.get_local_rank("pp"))}
    for stage in own.values() if is_sharded else ():
        fully_shard(stage, mesh=mesh["cp"])
    ours = Pipeline(plan, own, loss_fn, mesh=mesh["pp"] if is_sharded else mesh)
    losses = [step(ours, plan, mesh, seed) - step_alone(alone, seed) for seed in (0, 1)]
    found = []
    for number, stage in own.items():
        pairs = zip(stage.parameters(), alone[number].parameters(), strict=True)
        for weight, other in pairs:
            gradient = weight.grad.full_tensor() if is_sharded else weight.grad
            found.append(difference(gradient, other.grad))
    return [max(map(abs, losses)), max(found)]


def step(ours: Pipeline, plan: Plan, mesh: DeviceMesh, seed: int) -> float:
    """A step with this process's part of each row; the mean loss over all words that count."""
    words, targets, texts = batch(seed)
    # The first and the last quarter of a row, or those between: a causal mask gives both parts as
    # much to do.
    first, second, third, fourth = torch.arange(LENGTH).chunk(2 * PARTS)
    parts = [torch.cat([first, fourth]), torch.cat([second, third])]
    own = parts[mesh.get_local_rank("cp")]
    counts = [int((each != -100).sum()) for each in targets[:, own].chunk(MICROBATCHES)]
    mask = mask_of(texts, own, torch.cat(parts))
    ours.step(words[:, own], targets[:, own], counts=counts, mask=mask)
    loss = torch.tensor(ours.named_losses()["loss"], dtype=torch.float64)
    if not ours._processes.replicas.are_several:
        # The pipeline has the losses of its own part alone.
        dist.all_reduce(loss, group=mesh.get_group("cp"))
        loss /= PARTS
    return loss.item()


def step_alone(alone: list[nn.Module], seed: int) -> float:
    """The same of whole rows in one process."""
    x, targets, texts = batch(seed)
    mask = mask_of(texts, torch.arange(LENGTH), torch.arange(LENGTH))
    for stage in alone:
        x = stage(x, mask)
    loss = loss_fn(x, targets)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("gather", ["all-gather", "ring"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_parts_of_rows_train_as_whole_rows_in_one_process(
    run_ranks: Run, name: str, gather: str, is_sharded: bool
) -> None:
    ranks = PARTS * RANKS
    for found in run_ranks(in_parts, ranks, name, gather, is_sharded).results():
        assert max(found) < 1e-12
