"""Checks of several processes, which share one GPU: NCCL takes them for those of several hosts."""

import os
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from schedlang import compile
from schedlang.examples.demo.corpus import read_corpus
from schedlang.examples.demo.gpt import BLOCKS
from schedlang.examples.demo.one_process import train_reference
from schedlang.examples.demo.recipe import Recipe
from schedlang.examples.demo.report import compare, total_losses
from schedlang.examples.demo.training import train as train_example
from schedlang.examples.demo.workload import Workload
from schedlang.runtime import Pipeline, PipelineError
from tests.gpu.checks import (
    TOLERANCE,
    Said,
    batch,
    blocks,
    check,
    device,
    join,
    largest_difference,
    mse,
    on_gpu,
    rank,
    train,
    wait_for_device,
)
from tests.gpu.one_rank import waits_in

TWO: tuple[tuple[str, dict[str, int]], ...] = (
    ("1f1b", {"ranks": 2, "microbatches": 6}),
    ("interleaved_1f1b", {"ranks": 2, "chunks": 2, "microbatches": 4}),
    ("zb_h1", {"ranks": 2, "microbatches": 6}),
    ("zb_v", {"ranks": 2, "microbatches": 6}),
)


def _train_all(*transports: str) -> Said:
    return {
        f"{program}, {transport}": train(program, sizes, transport=transport).off
        for transport in transports
        for program, sizes in TWO
    }


@check(ranks=2)
def lazily() -> Said:
    """Communicators that NCCL makes at their first use."""
    join()
    return _train_all("portable", "nccl")


@check(ranks=2)
def eagerly() -> Said:
    """One communicator that NCCL makes at the start, bound to a device."""
    join(eagerly=True)
    return _train_all("portable", "nccl-eager")


@check(ranks=2)
def by_edges() -> Said:
    """A communicator for each direction between two ranks."""
    join()
    return _train_all("nccl-edge")


@check(ranks=2)
def by_edges_that_are_split() -> Said:
    """The same, split from a communicator that is bound to a device."""
    join(eagerly=True)
    return _train_all("nccl-edge")


def _workload(program: Path, ranks: int) -> Workload | None:
    """The training of a program of the gallery on so many ranks, or None where it has no such
    size.
    """
    try:
        plan = compile(program, {"ranks": ranks})
    except Exception:
        return None
    if len(plan.ranks) != ranks:
        return None
    if plan.kernels:
        plan = plan.for_updates(max(2, plan.layout.updates))
    layers = max(BLOCKS, plan.layout.pieces)
    return Workload(plan, read_corpus(), layers, 0, 1, Recipe(), device=device())


@check(ranks=4, seconds=200, alone=True)
def gallery() -> Said:
    """Every program of the gallery that runs on 4 ranks, and rank 0 trains again alone."""
    join()
    programs = sorted(Path(str(files("schedlang") / "programs")).glob("*.sched"))
    if not on_gpu():
        programs = [each for each in programs if each.stem in ("1f1b", "pipedream_2bw")]
    said: Said = {}
    wrong: dict[str, Any] = {}
    for program in programs:
        workload = _workload(program, 4)
        if workload is None:
            continue
        if on_gpu() and workload.plan.layout.keepers:
            said[program.stem] = "refused: a rank keeps what another one offloads"
            continue
        updates = max(2, workload.plan.layout.updates)
        training = train_example(workload, updates, 30.0)
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, training)
        if rank() == 0:
            steps = len(total_losses(found))
            alone = train_reference(workload, steps)
            said[program.stem] = max(
                compare(found, total_losses(found), alone).values()
            )
            if said[program.stem] > TOLERANCE:
                wrong[program.stem] = said[program.stem]
    assert not wrong, wrong
    return said


@check(ranks=4)
def replicas() -> Said:
    """Two replicas of a pipeline of two: sums of gradients; and in none of it the host waits."""
    join()
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "pp"))
    plan = compile("zb_v", {"ranks": 2, "microbatches": 4})
    own = mesh.get_local_rank("pp")
    replica = mesh.get_local_rank("dp")
    pieces = blocks(len(plan.placement))
    alone = blocks(len(plan.placement))
    inputs, targets = batch(16)
    for x, target in zip(inputs.chunk(8), targets.chunk(8), strict=True):
        for module in alone:
            x = module(x)
        (mse(x, target) / 8).backward()
    stages = {stage: pieces[stage] for stage in plan.stages_of(own)}
    pipeline = Pipeline(plan, stages, mse, mesh=mesh)
    mine = [each.chunk(2)[replica].contiguous() for each in (inputs, targets)]

    def step() -> Tensor:
        for module in stages.values():
            module.zero_grad()
        pipeline.step(*mine)
        return pipeline.clip_grad_norm_(1e9)

    for _ in range(2):
        step()
    off = largest_difference([*stages.values()], [alone[stage] for stage in stages])
    assert off < TOLERANCE, off
    said: Said = {"off": off}
    if on_gpu():
        said["waits"] = waits_in(step)
        assert not said["waits"], said
    return said


@check(ranks=4)
def sharded() -> Said:
    """Stages that FSDP2 shards over two replicas."""
    from torch.distributed.fsdp import fully_shard

    join()
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "pp"))
    plan = compile("1f1b", {"ranks": 2, "microbatches": 4})
    own = mesh.get_local_rank("pp")
    pieces = blocks(2)
    alone = blocks(2)
    inputs, targets = batch(16)
    for x, target in zip(inputs.chunk(8), targets.chunk(8), strict=True):
        for module in alone:
            x = module(x)
        (mse(x, target) / 8).backward()
    module = pieces[own]
    fully_shard(module, mesh=mesh["dp"])
    pipeline = Pipeline(plan, {own: module}, mse, mesh=mesh["pp"])
    replica = mesh.get_local_rank("dp")
    pipeline.step(*(each.chunk(2)[replica].contiguous() for each in (inputs, targets)))
    worst = 0.0
    for one, other in zip(module.parameters(), alone[own].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        whole: Tensor = one.grad.full_tensor()  # type: ignore[attr-defined]
        difference = (whole - other.grad).abs().max() / other.grad.abs().max()
        worst = max(worst, float(difference))
    assert worst < TOLERANCE, worst
    return {"off": worst}


@check(needs_gpu=True)
def gloo_is_refused() -> Said:
    """gloo cannot send what is on a GPU: said before anything is sent."""
    join("gloo")
    with pytest.raises(PipelineError, match="cpu:gloo,cuda:nccl") as caught:
        train("1f1b", {"ranks": 1, "microbatches": 4})
    return {"told": str(caught.value)}


@check(ranks=2)
def without_weights() -> Said:
    """A rank without weights computes where its neighbours do."""
    join()
    plan = compile("1f1b", {"ranks": 2, "microbatches": 4})
    module = (nn.Linear(64, 64), nn.ReLU())[rank()].to(device())
    pipeline = Pipeline(plan, {rank(): module}, mse, timeout=20)
    inputs, targets = batch(8)
    losses = [pipeline.step(inputs, targets) for _ in range(3)]
    return {"losses": [float(each.mean()) for each in losses if each is not None]}


class Slow(nn.Linear):
    """A layer for which a GPU takes a second, and its host no time."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        if on_gpu():
            torch.cuda._sleep(int(1.5e9))
        else:
            time.sleep(0.02)
        return super().forward(x)


@check(ranks=2, seconds=100, breaks=True)
def busy() -> Said:
    """A GPU that works for longer than the time limit does not hang."""
    join()
    plan = compile("gpipe", {"ranks": 2, "microbatches": 8})
    pipeline = Pipeline(plan, {rank(): Slow(64, 64).to(device())}, mse, timeout=6.0)
    inputs, targets = batch(16)
    # The first step finds out shapes, for which the host waits.
    pipeline.step(inputs, targets)
    start = time.perf_counter()
    pipeline.step(inputs, targets)
    on_host = time.perf_counter() - start
    # The watchdog looks on while the host waits here.
    wait_for_device()
    return {"host_seconds": on_host, "seconds": time.perf_counter() - start}


@check(ranks=2, seconds=60, breaks=True, exit_codes=(1, 9))
def death() -> Said:
    """A rank that dies is told by the other one, soon."""
    join()
    trained = train("1f1b", TWO[0][1], timeout=15.0)
    if rank() == 1:
        os._exit(9)
    start = time.perf_counter()
    try:
        for _ in range(3):
            trained.step()
            wait_for_device()
    except PipelineError as error:
        print(str(error), flush=True)
    print(f"after {time.perf_counter() - start:.1f} s", flush=True)
    os._exit(1)
