"""Stages that FSDP2 shards over meshes as torchtitan builds them: hybrid shards (HSDP), shards of
layers that are cut by tensor parallelism, mixed precision. Losses, norms and weights are those of
one process.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from schedlang.runtime import Pipeline
from schedlang.runtime.meshes import counting_together
from schedlang.runtime.processes import Replicas
from tests.support.models import WIDTH, batch, difference, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

RANKS = 2
MICROBATCHES = 4
STEPS = 2

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")

#: What shards a stage; and the loss of a microbatch.
Shard = Callable[[nn.Module], object]
LOSS = nn.functional.mse_loss


def layers(stages: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Tanh(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        ).to(dtype)
        for _ in range(stages)
    ]


def counts_of(replica: int) -> list[int]:
    """How much the microbatches of a replica count."""
    return [1 + replica + number for number in range(MICROBATCHES)]


def trained(name: str, mesh: DeviceMesh, batches: DeviceMesh, shard: Shard) -> float:
    """The largest difference of losses, norms and weights from one process after some updates with
    clipped gradients. Each process along `batches` has a batch of its own.
    """
    plan = program(name, ranks=RANKS, microbatches=MICROBATCHES)
    model = layers(plan.layout.pieces)
    alone = nn.Sequential(*layers(plan.layout.pieces))
    own = {stage: model[stage] for stage in plan.stages_of(mesh.get_local_rank("pp"))}
    for stage in own.values():
        shard(stage)
    ours = Pipeline(plan, own, LOSS, mesh=mesh["pp"])
    optimizers = [
        torch.optim.AdamW(module.parameters(), 1e-2)
        for module in (*own.values(), alone)
    ]
    replicas = batches.size()
    replica = batches.mesh.flatten().tolist().index(torch.distributed.get_rank())
    total = sum(sum(counts_of(each)) for each in range(replicas))
    found = []
    for step in range(STEPS):
        losses = ours.step(*batch(plan, 10 * step + replica), counts=counts_of(replica))
        expected = []
        for each in range(replicas):
            parts = (part.chunk(MICROBATCHES) for part in batch(plan, 10 * step + each))
            for x, y, count in zip(*parts, counts_of(each), strict=True):
                loss = LOSS(alone(x), y)
                (loss * count / total).backward()
                expected.append(loss.detach())
        if losses is not None:
            wanted = torch.stack(expected).chunk(replicas)[replica]
            found.append(difference(losses, wanted))
        norms = (
            ours.clip_grad_norm_(0.1),
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1),
        )
        found.append(difference(*norms))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for number, stage in own.items():
        pairs = zip(stage.parameters(), alone[number].parameters(), strict=True)
        found += [difference(weight.full_tensor(), other) for weight, other in pairs]
    return max(found)


def hybrid(name: str) -> float:
    """Shards over two processes, of which there are two replicas, in a mesh of five dimensions."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", (RANKS, 2, 2, 1, 1), mesh_dim_names=names)
    both = mesh["dp_replicate", "dp_shard"]

    def shard(stage: Any) -> None:
        fully_shard(stage[0], mesh=both)
        fully_shard(stage, mesh=both)

    return trained(name, mesh, both, shard)


@pytest.mark.parametrize("name", SCHEDULES)
def test_hybrid_shards_train_as_one_process(run_ranks: Run, name: str) -> None:
    assert max(run_ranks(hybrid, 8, name).results()) < 1e-12


def cut_and_sharded(name: str) -> float:
    """Layers that are cut over two processes, whose parts are sharded over two others."""
    names = ("pp", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (RANKS, 2, 2), mesh_dim_names=names)

    def shard(stage: nn.Module) -> None:
        cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(stage, mesh["tp"], cuts)
        fully_shard(stage, mesh=mesh["dp_shard"])

    return trained(name, mesh, mesh["dp_shard"], shard)


@pytest.mark.parametrize("name", SCHEDULES)
def test_shards_of_layers_that_are_cut_train_as_one_process(
    run_ranks: Run, name: str
) -> None:
    """The weights of the norms are not cut, so gradients lie on different meshes."""
    assert max(run_ranks(cut_and_sharded, 8, name).results()) < 1e-12


def counted_with() -> list[int]:
    """With how many processes along each dimension the microbatches of a stage count, whose first
    layer is sharded over fewer processes than the others.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    (stage,) = layers(1)
    fully_shard(stage[0], mesh=mesh["dp_shard"])
    fully_shard(stage, mesh=mesh)
    alone = Replicas((torch.distributed.get_rank(),))
    return [len(each.processes) for each in counting_together(alone, [stage])]


def test_microbatches_count_with_those_of_all_processes(run_ranks: Run) -> None:
    assert run_ranks(counted_with, 4).results() == [[2, 2]] * 4


#: Computes in 16 bits; gradients of microbatches add up in 32, and are reduced so.
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def in_mixed_precision(name: str, max_gathered: int | None, drops: bool) -> float:
    """The largest difference of gradients from one process that computes in 16 bits too."""
    mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("pp", "dp_shard"))
    plan = program(name, ranks=RANKS, microbatches=2 * MICROBATCHES)
    model, alone = (layers(plan.layout.pieces, torch.float32) for _ in range(2))
    own = {stage: model[stage] for stage in plan.stages_of(mesh.get_local_rank("pp"))}
    for stage in own.values():
        for part in (stage[0], stage):
            fully_shard(
                part,
                mesh=mesh["dp_shard"],
                mp_policy=MIXED,
                reshard_after_forward=drops,
            )
    ours = Pipeline(plan, own, of_floats, mesh=mesh["pp"], max_gathered=max_gathered)
    for step in range(STEPS):
        batches = [batch(plan, 2 * step + each, torch.float32) for each in range(2)]
        ours.step(*batches[mesh.get_local_rank("dp_shard")])
        for both in batches:
            parts = (part.chunk(plan.microbatches) for part in both)
            for x, y in zip(*parts, strict=True):
                for stage in alone:
                    x = in_16_bits(stage, x)
                (of_floats(x, y) / plan.microbatches / 2).backward()
    return max(
        difference(weight.grad.full_tensor(), other.grad)
        for number, stage in own.items()
        for weight, other in zip(
            stage.parameters(), alone[number].parameters(), strict=True
        )
    )


def in_16_bits(stage: nn.Module, x: Tensor) -> Tensor:
    """What a stage makes of its input in 16 bits; its weights and gradients have 32."""
    weights = {
        name: weight.to(torch.bfloat16) for name, weight in stage.named_parameters()
    }
    return torch.func.functional_call(stage, weights, (x.to(torch.bfloat16),))


def of_floats(output: Tensor, target: Tensor) -> Tensor:
    return LOSS(output.float(), target)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("max_gathered", [None, 1])
@pytest.mark.parametrize("name", [*SCHEDULES, "1f1b_recompute"])
def test_gradients_of_16_bits_add_up_in_32(
    run_ranks: Run, name: str, max_gathered: int | None, drops: bool
) -> None:
    """Whatever a module says of dropping its weights, the plan decides when that is."""
    run = run_ranks(in_mixed_precision, 4, name, max_gathered, drops)
    assert max(run.results()) < 1e-6


def refused(what: str) -> None:
    """Shards beside replicas of the pipeline; and a stage that is sharded in part, and clipped."""
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "pp"))
    plan = program("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    rank = mesh.get_local_rank("pp")
    stage = layers(RANKS)[rank]
    fully_shard(stage[0] if what == "in part" else stage, mesh=mesh["dp"])
    ours = Pipeline(
        plan, {rank: stage}, LOSS, mesh=mesh if what == "replicas" else mesh["pp"]
    )
    ours.step(*batch(plan, mesh.get_local_rank("dp")))
    ours.clip_grad_norm_(1.0)


# All ranks have the same mistake, and any of them may be the first to tell it.
@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "replicas",
            r"stage \d is sharded, and the pipeline has replicas along another dimension of the "
            r'mesh: leave both to FSDP, `fully_shard\(stage, mesh=mesh\["dp_replicate", ',
        ),
        (
            "in part",
            r"stage \d has weights that FSDP has not sharded \(`2.weight`\), so each replica has",
        ),
    ],
)
def test_shards_that_replicas_would_not_agree_on(
    run_ranks: Run, what: str, told: str
) -> None:
    run = run_ranks(refused, 4, what)
    assert run.codes == [1] * 4
    assert any(re.search(told, log) for log in run.logs), run.logs
    asked = "their gradients are those of this process alone"
    assert any(asked in log for log in run.logs) == (what == "in part")
