"""Runs faults of `test_faults.py`, and `test_restarts.py`, on real processes, as
`runtime_worker.py` its scenarios.

A fault is known by what happens, the schedule, the rank and the point: `kill 1f1b 2 7`. When it
happens, the rank leaves the time in `folder/fault.json`.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from schedlang import Kind
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.runtime_worker import (
    LIMIT,
    OPTIMIZERS,
    WIDTH,
    Does,
    batch,
    main,
    pipeline,
    program,
    replicated,
    report,
)

#: Seconds that a rank waits at most: for others than stalls, more than a busy machine lets it wait.
STALL = 5.0
TIMEOUT = 30.0
POINTS = 10
#: A later step, and how many there are: a rank that dies at the end of a step is missed in the next
#: one.
LATER = 2
STEPS = 4
SIZES = {"1f1b": 8, "zb_v": 8, "pipedream_2bw": 4, "dualpipe": 8}


def plan_of(schedule: str, ranks: int) -> Plan:
    return program(schedule, ranks=ranks, microbatches=SIZES[schedule])


def fault(name: str) -> Callable[[], None]:
    """A fault by its name."""
    what, schedule, rank, point = name.split()
    return partial(FAULTS[what], schedule, int(rank), int(point))


def steps(
    plan: Plan,
    model: list[nn.Module],
    change: Callable[[Pipeline], None] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Train for some steps, with a pipeline that is changed before them."""
    mine = plan.stages_of(dist.get_rank())
    updates = any(Kind.U in each.kind for each in plan.ranks)
    optimizers = {each: OPTIMIZERS["momentum"](list(model[each].parameters())) for each in mine}
    ours = pipeline(plan, model, optimizers=optimizers if updates else {}, timeout=timeout)
    if change:
        change(ours)
    dist.barrier()
    for step in range(STEPS):
        ours.step(*batch(plan, step))


def kill(schedule: str, rank: int, point: int) -> None:
    """A rank dies before one of its calls, from the first to the last: in the first step, or at odd
    points later.
    """
    plan = plan_of(schedule, 4)

    def set_trap(ours: Pipeline) -> None:
        if dist.get_rank() == rank:
            place = point * (len(ours._training) - 1) // (POINTS - 1)
            index, call, op = ours._training[place]
            ours._training[place] = index, Trap(call, LATER if point % 2 else 0), op

    steps(plan, replicated(plan), set_trap)


class Trap:
    """Kills the process instead of a call, in some step."""

    def __init__(self, call: Callable[[], None], step: int) -> None:
        self.call = call
        self.step = step

    def __call__(self) -> None:
        if self.step == 0:
            happens()
            os.kill(os.getpid(), signal.SIGKILL)
        self.step -= 1
        self.call()


def happens() -> None:
    report("fault", time.monotonic())


def inside(
    what: Callable[[torch.Tensor], torch.Tensor], schedule: str, rank: int, point: int
) -> None:
    """Something happens in a stage of a rank: in a forward, or at odd points a backward.

    At points 2, 3, 6 and 7 it is the last stage of the rank and not the first; from 4 on a later
    step.
    """
    plan = plan_of(schedule, 4)
    model = replicated(plan)
    mine = [stage for stage, holder in enumerate(plan.placement) if holder == rank]
    stage = mine[-(point // 2 % 2)]
    call = plan.layout.units(stage) * LATER + 2 if point // 4 else 1
    # All stages are wrapped, for replicas are compared by the names of their weights.
    model = [Does(each, math.inf, what) for each in model]
    model[stage] = Does(model[stage].inner, call, partial(backwards, what) if point % 2 else what)
    steps(plan, model, timeout=STALL if what is sleep else TIMEOUT)


def backwards(what: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    output = output * 1
    output.register_hook(what)
    return output


def throw(_: torch.Tensor) -> torch.Tensor:
    happens()
    raise ValueError("boom\nand more")


def sleep(_: torch.Tensor) -> torch.Tensor:
    happens()
    time.sleep(LIMIT)
    raise AssertionError


def shorten(output: torch.Tensor) -> torch.Tensor:
    happens()
    return output[1:]


FAULTS = {
    "kill": kill,
    "throw": partial(inside, throw),
    "stall": partial(inside, sleep),
    "shape": partial(inside, shorten),
}


# Checkpoints, which are in the scenario's folder.


def checkpointed(schedule: str = "1f1b", width: int = WIDTH) -> Pipeline:
    plan = program(schedule, ranks=2, microbatches=4)
    return pipeline(plan, [nn.Linear(WIDTH, width) for _ in range(2)])


def kept() -> Path:
    return Path(os.environ["FOLDER"]) / "kept"


def partial_checkpoint() -> None:
    """Both ranks have steps 1 and 2, rank 0 also step 3, which rank 1 has begun to write, and rank
    1 alone has 4.
    """
    rank = dist.get_rank()
    ours = checkpointed()
    empty = ours.resume(kept())
    dist.barrier()
    for step in (1, 2, 3 + rank):
        ours.save(kept(), step)
    if rank == 1:
        file = kept() / "step-4-rank-1.pt"
        file.with_name("step-3-rank-1.new").write_bytes(file.read_bytes()[:100])
    report(f"found{rank}", [empty, ours.resume(kept())])


def checkpoint_of_another_plan() -> None:
    checkpointed().save(kept(), 2)
    checkpointed("gpipe").resume(kept())


def damaged_checkpoint() -> None:
    checkpointed().save(kept(), 2)
    if dist.get_rank() == 1:
        file = kept() / "step-2-rank-1.pt"
        file.write_bytes(file.read_bytes()[:100])
    checkpointed().resume(kept())


def checkpoint_of_another_model() -> None:
    checkpointed().save(kept(), 2)
    checkpointed(width=WIDTH + 1).resume(kept())


def nowhere_to_write() -> None:
    if dist.get_rank() == 0:
        kept().write_text("")
    dist.barrier()
    checkpointed().save(kept(), 2)


SCENARIOS = {
    each.__name__: each
    for each in (
        partial_checkpoint,
        checkpoint_of_another_plan,
        damaged_checkpoint,
        checkpoint_of_another_model,
        nowhere_to_write,
    )
}

if __name__ == "__main__":
    main(lambda name: SCENARIOS[name] if name in SCENARIOS else fault(name))
