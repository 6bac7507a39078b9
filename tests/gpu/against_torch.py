"""Step time and memory beside torch.distributed.pipelining, on the same blocks in the same run."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from schedlang import compile
from schedlang.runtime import Pipeline
from tests.gpu.checks import (
    Said,
    batch,
    blocks,
    check,
    device,
    join,
    mse,
    on_gpu,
    rank,
    wait_for_device,
)

SCHEDULES: dict[str, tuple[dict[str, int], Any]] = {
    "1f1b": ({}, Schedule1F1B),
    "interleaved_1f1b": ({"chunks": 2}, ScheduleInterleaved1F1B),
    "zb_v": ({}, ScheduleZBVZeroBubble),
}
MICROBATCHES = 8


@check(ranks=2, seconds=120, alone=True)
def step_time() -> Said:
    """Steps of both in turns: 8 blocks of bfloat16 on two ranks."""
    return _beside_torch(as_graphs=False)


@check(ranks=2, seconds=120, alone=True)
def graph_time() -> Said:
    """The same, with steps as CUDA graphs."""
    return _beside_torch(as_graphs=True)


def _beside_torch(as_graphs: bool) -> Said:
    join()
    width, tokens, dtype = (2048, 2048, torch.bfloat16) if on_gpu() else (64, 32, None)
    turns = 6 if on_gpu() else 3
    said: Said = {}
    for program, (sizes, theirs) in SCHEDULES.items():
        sizes = {"ranks": 2, "microbatches": MICROBATCHES, **sizes}
        plan = compile(program, sizes)
        count = len(plan.placement)
        own = plan.stages_of(rank())
        pieces = blocks(count, width, each=8 // count, dtype=dtype)
        stages = {stage: pieces[stage] for stage in own}
        del pieces
        inputs, targets = batch(MICROBATCHES, tokens, width, dtype)
        pipeline = Pipeline(plan, stages, mse)
        torchs = [PipelineStage(stages[stage], stage, count, device()) for stage in own]
        schedule = theirs(
            torchs if len(own) > 1 else torchs[0], MICROBATCHES, loss_fn=mse
        )

        def by(
            pipeline: Pipeline, inputs: Any = inputs, targets: Any = targets
        ) -> Callable[[], None]:
            return lambda: void(pipeline.step(inputs, targets))

        def by_torch(
            schedule: Any = schedule,
            first: tuple[Any, ...] = (inputs,) if 0 in own else (),
            last: Any = targets if count - 1 in own else None,
        ) -> None:
            schedule.step(*first, target=last)

        ways = {"ours": by(pipeline), "torch": by_torch}
        if as_graphs:
            graphs = Pipeline(plan, stages, mse, cuda_graphs=True)
            ways["as_a_graph"] = by(graphs)
        else:
            for_nccl = Pipeline(compile(program, sizes, transport="nccl"), stages, mse)
            ways["for_nccl"] = by(for_nccl)
        figures = _in_turns(ways, [*stages.values()], turns)
        figures["ratio"] = figures["ours"]["ms"] / figures["torch"]["ms"]
        said[program] = figures
    return said


def void(_: object) -> None:
    """Of what was computed, nothing is kept."""


def _in_turns(
    ways: dict[str, Callable[[], None]], modules: list[torch.nn.Module], turns: int
) -> dict[str, Any]:
    """The median time of a step of each way, in milliseconds, and its peak memory in GiB."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for _ in range(turns):
        for name, step in ways.items():
            if on_gpu():
                torch.cuda.reset_peak_memory_stats()
            dist.all_reduce(torch.zeros(1, device=device()))
            wait_for_device()
            start = time.perf_counter()
            for _ in range(3):
                for module in modules:
                    module.zero_grad()
                step()
            wait_for_device()
            times[name].append((time.perf_counter() - start) / 3)
            if on_gpu():
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
            for module in modules:
                module.zero_grad()
    figures: dict[str, Any] = {}
    for name, each in times.items():
        # The first two turns pay for what is set up once.
        later = sorted(each[2:])
        figures[name] = {"ms": later[len(later) // 2] * 1e3}
        if name in peaks:
            figures[name]["peak_gib"] = peaks[name]
    return figures
