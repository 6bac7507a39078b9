"""Checks of one process that has all stages."""

import time
import warnings
from collections.abc import Callable
from importlib import import_module, reload
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang import compile
from schedlang.runtime import Pipeline, torch_private
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
    train,
    wait_for_device,
)

#: One of each kind: plain, whose backward is split, that runs forwards again, of two pipelines.
PROGRAMS = ("gpipe", "1f1b", "zb_v", "zb_2p", "dualpipe_v", "1f1b_recompute")
SIZES = {"ranks": 1, "microbatches": 4}


@check()
def versions() -> Said:
    """What this machine has, and which of torch's private parts are missing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in iter_modules(
            torch_private.__path__, "schedlang.runtime.torch_private."
        ):
            reload(import_module(module.name))
    missing = [str(each.message) for each in caught if "has no" in str(each.message)]
    said: Said = {"torch": torch.__version__, "missing": missing}
    if on_gpu():
        said["gpu"] = torch.cuda.get_device_name()
        said["cuda"] = torch.version.cuda
        said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return said


@check(seconds=120)
def programs() -> Said:
    """Programs of each kind train as one model does, hold no memory from step to step, and nothing
    in a step waits for the GPU.
    """
    join()
    said: Said = {}
    for program in PROGRAMS:
        trained = train(program, SIZES)
        said[program] = {"off": trained.off}
        if on_gpu():
            said[program]["waits"] = waits_in(trained.step)
            before = torch.cuda.memory_allocated()
            for _ in range(4):
                trained.step()
            wait_for_device()
            said[program]["leaked"] = torch.cuda.memory_allocated() - before
    waits = [each.get("waits") for each in said.values()]
    leaks = [each.get("leaked") for each in said.values()]
    assert not any(waits), said
    assert not any(leaks), said
    return said


def waits_in(call: Any) -> list[str]:
    """Where a call waits for the GPU, by file and line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sorted(
        {
            f"{Path(each.filename).name}:{each.lineno}"
            for each in caught
            if "called a synchronizing" in str(each.message)
        }
    )


class Checkpointed(nn.Module):
    """A block whose forward its backward runs again."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        """Of the block's shape."""
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@check()
def split_backwards() -> Said:
    """A split backward, which on a GPU runs in a thread of autograd: with checkpoints, and under
    autocast.
    """
    join()
    said: Said = {}
    plan = compile("zb_v", SIZES)
    for use_reentrant in (False, True):
        whole = [Checkpointed(each, use_reentrant) for each in blocks(2)]
        alone = [Checkpointed(each, use_reentrant) for each in blocks(2)]
        inputs, targets = batch(8)
        for x, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            x = x.clone().requires_grad_()
            (mse(alone[1](alone[0](x)), target) / 4).backward()
        given = inputs.clone().requires_grad_() if use_reentrant else inputs
        Pipeline(plan, dict(enumerate(whole)), mse).step(given, targets)
        name = "reentrant" if use_reentrant else "checkpoint"
        said[name] = largest_difference(whole, alone)
    with torch.autocast(device().type, dtype=torch.bfloat16):
        said["autocast"] = train("zb_v", SIZES, tolerance=0.5).off
    assert max(said["checkpoint"], said["reentrant"]) < TOLERANCE, said
    return said


class Exchanged(nn.Module):
    """A block that takes rows in another order, as an exchange would bring them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def exchange(self, x: Tensor) -> Tensor:
        """The rows from the last to the first."""
        return 2 * x.flip(0)

    def forward(self, x: Tensor) -> Any:
        """Of the block's shape."""
        return self.block(x)


def _exchanging(stages: list[nn.Module]) -> list[nn.Module]:
    """Stages of which all but the first one take what was exchanged."""
    first, *others = stages
    return [first, *map(Exchanged, others)]


@check()
def exchanges() -> Said:
    """Exchanges on a stream beside that of the ops train as one process does, and nothing in a step
    waits for the GPU.
    """
    join()
    plan = compile("experts_1f1b", SIZES)
    whole, alone = (_exchanging(blocks(3)) for _ in range(2))
    inputs, targets = batch(8)
    for x, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        for stage in alone:
            x = stage(stage.exchange(x) if isinstance(stage, Exchanged) else x)
        (mse(x, target) / 4).backward()
    pipeline = Pipeline(plan, dict(enumerate(whole)), mse)
    pipeline.step(inputs, targets)
    said: Said = {"off": largest_difference(whole, alone)}
    if on_gpu():
        said["waits"] = waits_in(lambda: pipeline.step(inputs, targets))
    assert said["off"] < TOLERANCE, said
    assert not said.get("waits"), said
    return said


class LayerDrop(nn.Module):
    """A layer that is left out at random, by a number of the CPU's generator, with dropout."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        is_kept = float(torch.rand(()) < 0.5)
        return x + is_kept * nn.functional.dropout(self.layer(x), 0.1)


@check()
def random_numbers() -> Said:
    """A forward that is run again draws the same numbers, of the CPU and of the GPU."""
    join()
    plan = compile("1f1b_recompute", {"ranks": 1, "microbatches": 8})
    torch.manual_seed(0)
    stages = {
        stage: LayerDrop(nn.Linear(64, 64)).to(device()) for stage in plan.stages_of(0)
    }
    inputs, targets = batch(16)
    losses = Pipeline(plan, stages, mse, verify="always").step(inputs, targets)
    assert losses is not None
    return {"losses": losses.tolist()}


@check()
def copies_to_the_host() -> Said:
    """Activations that go to the host and back, while others ask for the memory that they leave."""
    join()
    sizes = {"ranks": 1, "microbatches": 8, "group": 4}
    said: Said = {"off": train("pipe_offload", sizes, steps=6).off}
    width, tokens = (512, 512) if on_gpu() else (64, 32)
    first: Tensor | None = None
    for offloaded in (1, 0):
        plan = compile("pipe_offload", {**sizes, "offloaded": offloaded})
        assert len(plan.offloaded) == 8 * offloaded
        stages = dict(enumerate(blocks(len(plan.placement), width, each=2)))
        pipeline = Pipeline(plan, stages, mse)
        inputs, targets = batch(16, tokens, width)
        for _ in range(5):
            for module in stages.values():
                module.zero_grad()
            if on_gpu():
                torch.cuda.reset_peak_memory_stats()
            pipeline.step(inputs, targets)
            # Whoever reads memory that was given away too early reads these.
            junk = [
                torch.full((1 << 20,), torch.nan, device=device()) for _ in range(8)
            ]
            del junk
            gradients = torch.cat(
                [
                    weight.grad.flatten()
                    for module in stages.values()
                    for weight in module.parameters()
                    if weight.grad is not None
                ]
            )
            first = gradients if first is None else first
            difference = float((gradients - first).abs().max() / first.abs().max())
            assert difference < TOLERANCE, difference
        if on_gpu():
            # However far the host runs ahead, memory is free where the plan says so.
            peak = torch.cuda.max_memory_allocated() / 2**20
            said["peak_mib" if offloaded else "peak_mib_without"] = peak
    if on_gpu():
        assert said["peak_mib"] < said["peak_mib_without"]
    return said


@check()
def norms_and_updates() -> Said:
    """Clipping, named losses, and updates that do not wait for the norm."""
    join()
    trained = train("1f1b", SIZES)
    said: Said = {"norm": float(trained.pipeline.clip_grad_norm_(1.0))}
    said |= trained.pipeline.named_losses()
    plan = compile("zb_v", SIZES)
    stages = dict(enumerate(blocks(2)))
    optimizers = {
        stage: torch.optim.AdamW(module.parameters(), fused=on_gpu())
        for stage, module in stages.items()
    }
    pipeline = Pipeline(plan, stages, mse, optimizers=optimizers, max_norm=1.0)
    inputs, targets = batch(8)
    losses = [pipeline.step(inputs, targets) for _ in range(6)]
    pipeline.validate()
    means = [float(each.mean()) for each in losses if each is not None]
    assert means[-1] < means[0], means
    return said | {"losses": means}


@check()
def not_finite() -> Said:
    """A loss that is no number is told, also where nothing waits for the GPU."""
    join()
    trained = train("1f1b", SIZES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained.pipeline.step(trained.inputs * torch.inf, trained.targets)
        wait_for_device()
        trained.step()
    told = [str(each.message) for each in caught if "not finite" in str(each.message)]
    assert len(told) == 1, told
    return {"told": told[0]}


@check()
def recorded() -> Said:
    """The times of ops, which a GPU takes by events: in order, and as long as the step."""
    join()
    trained = train("1f1b", SIZES)
    trained.pipeline.record = True
    wait_for_device()
    start = time.perf_counter()
    trained.step()
    wait_for_device()
    seconds = time.perf_counter() - start
    bars = trained.pipeline.bars
    assert len(bars) == 2 * SIZES["microbatches"], bars
    assert all(bar.start <= bar.end for bar in bars)
    assert all(one.end <= other.start + 1e-4 for one, other in pairwise(bars))
    busy = sum(bar.end - bar.start for bar in bars)
    assert busy < 1.1 * seconds, (busy, seconds)
    return {"step_ms": seconds * 1e3, "ops_ms": busy * 1e3}


@check(alone=True)
def host_time() -> Said:
    """What the host spends on a microbatch, where the device has next to nothing to do, beside a
    loop over the same layers without any pipeline.
    """
    join()
    said: Said = {}
    microbatches = 32
    width = 256 if on_gpu() else 16
    for program in ("1f1b", "zb_v"):
        plan = compile(program, {"ranks": 1, "microbatches": microbatches})
        layers = {
            stage: nn.Sequential(
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
            )
            for stage in range(len(plan.placement))
        }
        stages = {stage: layer.to(device()) for stage, layer in layers.items()}
        pipeline = Pipeline(plan, stages, nn.functional.mse_loss)
        captured = Pipeline(plan, stages, nn.functional.mse_loss, cuda_graphs=True)
        x = torch.randn(microbatches * 4, width, device=device())

        def plain(x: Tensor = x, stages: dict[int, nn.Sequential] = stages) -> None:
            for piece in x.chunk(microbatches):
                y = piece
                for module in stages.values():
                    y = module(y)
                nn.functional.mse_loss(y, piece).backward()

        def by(
            pipeline: Pipeline,
            x: Tensor = x,
            stages: dict[int, nn.Sequential] = stages,
        ) -> Callable[[], None]:
            def step() -> None:
                pipeline.step(x, x)
                for module in stages.values():
                    module.zero_grad()

            return step

        ways = {
            "us_per_microbatch": by(pipeline),
            "plain_loop": plain,
            "as_a_graph": by(captured),
        }
        said[program] = {
            name: round(_seconds(way) / microbatches * 1e6)
            for name, way in ways.items()
        }
    return said


def _seconds(call: Any) -> float:
    """The time of a call, the median of several, with what the device does for it."""
    times = []
    for _ in range(12):
        wait_for_device()
        start = time.perf_counter()
        call()
        wait_for_device()
        times.append(time.perf_counter() - start)
    return sorted(times[5:])[3]


@check(needs_gpu=True)
def nccl_alone() -> Said:
    """A process group of NCCL alone, as launchers make it: the pipeline makes one for CPUs."""
    join("nccl")
    said: Said = {"backends": dist.get_backend_config()}
    return said | {"off": train("1f1b", SIZES).off}
