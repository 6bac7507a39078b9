"""What it gains that updates do not wait for the norm by which they are clipped, on 4 processes, in
one run: `make bench WHAT=post_validation`.

The ops of ZB-2P only sleep, each for UNIT seconds, so that what is measured is who waits for whom.
A turn is some steps one after the other, in each of these ways; figures are medians over the turns,
of the time of a step.

    waits       `clip_grad_norm_` after each step, then the optimizers
    ahead       `max_norm`, which no norm is above
    clipped     `max_norm`, which all are above: from the first on, updates wait
    by turns    `max_norm`, above which every other norm is: half of the updates wait, and the
                others are made anew, with the warm-up that follows

What is predicted is the longest span of a rank for the second, over the makespan for the first.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang import Plan, compile, simulate
from schedlang.runtime import Pipeline
from schedlang.schedule.actions import is_transfer

RANKS = 4
MICROBATCHES = 8
#: Seconds that an op takes.
UNIT = 0.02
STEPS = 10
#: How often each way has its turn; the first time is a warm-up.
TURNS = 3
WIDTH = 16
#: By way, the limit of norms; the first one waits for all of them.
LIMITS = {"waits": None, "ahead": 1e9, "clipped": 1e-9, "by turns": 1.0}


def plan_of() -> Plan:
    """The plan that all train."""
    return compile("zb_2p", {"ranks": RANKS, "microbatches": MICROBATCHES})


def slowly(call: Callable[[], None]) -> None:
    """An op that takes its time."""
    sleep(UNIT)
    call()


def built(plan: Plan, limit: float | None) -> tuple[Pipeline, Optimizer]:
    """A pipeline whose ops sleep, and the optimizer of this rank's stage."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), 1e-3)
    options = (
        {} if limit is None else {"optimizers": {rank: optimizer}, "max_norm": limit}
    )
    pipeline = Pipeline(plan, {rank: stage}, nn.functional.mse_loss, **options)
    pipeline._training = [
        (index, call if op is None or is_transfer(op[0]) else partial(slowly, call), op)
        for index, call, op in pipeline._training
    ]
    return pipeline, optimizer


def turn(
    pipeline: Pipeline, optimizer: Optimizer, waits: bool, batches: list[Tensor]
) -> float:
    """The time of a step, of some."""
    dist.barrier()
    begin = perf_counter()
    for step in range(STEPS):
        batch = batches[step % len(batches)]
        pipeline.step(batch, batch)
        if waits:
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    pipeline.validate()
    dist.barrier()
    return (perf_counter() - begin) / STEPS


def rank_main(rank: int, folder: str) -> None:
    """One rank, of which the first prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    plan = plan_of()
    batch = torch.rand(MICROBATCHES, WIDTH)
    ways = {way: built(plan, limit) for way, limit in LIMITS.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 + TURNS):
        for way, (pipeline, optimizer) in ways.items():
            # Every other batch has gradients of another size.
            batches = [batch, 1e3 * batch] if way == "by turns" else [batch]
            times[way].append(turn(pipeline, optimizer, LIMITS[way] is None, batches))
    if rank == 0:
        timeline = simulate(plan).timeline
        predicted = {
            "waits": "1.00",
            "ahead": f"{timeline.span / timeline.makespan:.2f}",
        }
        steps = {way: median(each[1:]) for way, each in times.items()}
        print(f"{'':9} {'a step, in ops':>14} {'of waits':>9} {'predicted':>10}")
        for way, step in steps.items():
            share = step / steps["waits"]
            print(
                f"{way:9} {step / UNIT:14.1f} {share:9.2f} {predicted.get(way, ''):>10}"
            )
    dist.barrier()


def main() -> None:
    """Start the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), folder],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(int(sys.argv[1]), sys.argv[2])
    else:
        main()
