"""Plans in torch's own runtime: what it trains, and what is refused before anything runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the schedules are torch's", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

import schedlang.torch
from schedlang import CompileError, compile, write_plan
from schedlang.torch import private
from tests.support.ranks import Run
from tests.torch.models import (
    MICROBATCHES,
    RANKS,
    Block,
    arguments,
    batch,
    distance,
    gradients,
    mean,
    stages,
    stages_of,
)

#: Programs of the gallery that torch's tables can express, each given in another way.
PROGRAMS = ("1f1b", "hanayo", "zb_v", "interleaved_1f1b", "v_min")


def trained(folder: Path) -> dict[str, float]:
    """For each program the largest difference of gradients and losses from those of one process."""
    found = {}
    for name in PROGRAMS:
        params = {"ranks": RANKS, "microbatches": MICROBATCHES}
        plan = compile(name, params)
        count = len(plan.placement)
        own = stages(plan.stages_of(dist.get_rank()), count)
        if name == "zb_v":
            file = folder / f"{dist.get_rank()}.json"
            write_plan(plan, file)
            schedule = schedlang.torch.schedule(file, own, mean)
        elif name == "1f1b":
            schedule = schedlang.torch.schedule(name, own[0], mean, params=params)
        else:
            schedule = schedlang.torch.schedule(plan, own, mean, scale_grads=True)
        assert isinstance(schedule, schedules._PipelineScheduleRuntime)
        inputs, target = arguments(schedule)
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, target=target, losses=losses)
        blocks = [Block(number) for number in range(count)]
        whole, targets = batch()
        outputs = torch.nn.Sequential(*blocks)(whole)
        mean(outputs, targets).backward()
        alone = [
            weight.grad
            for stage in stages_of(schedule)
            for weight in blocks[stage.stage_index].parameters()
        ]
        parts = zip(
            outputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True
        )
        expected = [mean(*part) for part in parts] if target is not None else []
        found[name] = max(
            distance(gradients(schedule), alone), distance(losses, expected)
        )
    return found


@pytest.mark.processes
def test_torch_trains_under_our_plans(run_ranks: Run, tmp_path: Path) -> None:
    for found in run_ranks(trained, RANKS, tmp_path).results():
        assert tuple(found) == PROGRAMS
        assert max(found.values()) < 1e-12


def told(call: Callable[[], object]) -> str:
    """What a wrong call is told."""
    try:
        call()
    except (CompileError, ImportError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused() -> dict[str, str]:
    """Mistakes, on each of two ranks, and what is said of them."""
    rank = dist.get_rank()
    to_torch = schedlang.torch.schedule
    from_torch = schedlang.torch.pipeline
    params = {"ranks": 2, "microbatches": 4}
    plan = compile("1f1b", params)
    own = stages([rank], 2)
    empty = schedules._PipelineScheduleRuntime(own, 4, loss_fn=mean)
    with_function = schedules.ScheduleInterleaved1F1B(
        stages([rank, rank + 2], 4), 4, loss_fn=mean
    )
    with_function.register_custom_function(
        schedules.OVERLAP_F_B, lambda action, context: None
    )
    built = from_torch(schedules.ScheduleGPipe(own[0], 4, loss_fn=mean))
    rows = torch.ones(4, 6)
    calls: dict[str, Callable[[], object]] = {
        "ranks": lambda: to_torch(compile("1f1b", {"ranks": 4}), own),
        "stages": lambda: to_torch(plan, stages([rank], 4)),
        "others": lambda: to_torch(plan, stages([1 - rank], 2)),
        "no stages": lambda: to_torch(plan, []),
        "modules": lambda: to_torch(plan, [torch.nn.Linear(1, 1)]),  # type: ignore[list-item]
        "params": lambda: to_torch(plan, own, params=params),
        "no plan": lambda: to_torch(5, own),  # type: ignore[arg-type]
        "not in tables": lambda: to_torch("1f1b_recompute", own, params=params),
        "no schedule": lambda: from_torch(own[0]),
        "single": lambda: from_torch(schedules._ScheduleForwardOnly(own[0], 4)),
        "no table": lambda: from_torch(empty),
        "functions": lambda: from_torch(with_function),
        "timeout": lambda: from_torch(empty, timeout=0),
        "in loops": lambda: from_torch(
            schedules.ScheduleZBVZeroBubble(
                stages([rank, rank + 2], 4), 4, loss_fn=mean
            )
        ),
        "both ways": lambda: built.step(rows, arg_mbs=[(rows,)] * 4),
        "number": lambda: built.step(arg_mbs=[(rows,)] * 3),
        "no target": lambda: built.step() if rank else None,
        "deferred": lambda: to_torch(
            "zb_v", stages([rank, 3 - rank], 4), mean, params=params, defer_pp_recv=True
        ),
        "private": lambda: private._part(schedules, "_PipelineScheduleOfTomorrow"),
    }
    return {name: told(call) for name, call in calls.items()}


MESSAGES = {
    "ranks": "ValueError: the plan has 4 ranks, the process group of the stages has 2 ranks",
    "stages": "ValueError: the plan has 2 stages, the stages were built as 4",
    "others": "ValueError: the plan gives rank 0 the stages [0], `stages` are [1]: build the stages "
    "where the plan has them, `plan.stages_of(rank)`",
    "no stages": "TypeError: `stages` is []: it must be a list of PipelineStages, as "
    "`torch.distributed.pipelining.PipelineStage(module, 0, 4, device)`",
    "modules": "TypeError: `stages[0]` is a Linear: it must be one of PipelineStages",
    "params": "ValueError: `params` are those of a program, `plan` is one that was compiled",
    "no plan": "TypeError: `plan` is 5: it must be a path, the text of a program, or a Source",
    "not in tables": "torch's action tables have no recomputation",
    "no schedule": "TypeError: `schedule` is a PipelineStage: it must be a schedule of "
    "torch.distributed.pipelining, such as ScheduleInterleaved1F1B",
    "single": "TypeError: `schedule` is a _ScheduleForwardOnly: it must be a ScheduleGPipe, a "
    "Schedule1F1B, or one with several stages for each rank",
    "no table": "ValueError: `schedule` has no table yet: `_load_csv` gives it one",
    "functions": "ValueError: `schedule` has functions of its own for OVERLAP_F_B, which only "
    "torch's runtime calls",
    "timeout": "ValueError: `timeout` is 0: it must be a finite number above 0",
    "in loops": "ValueError: the plan gives rank 0 the stages [0, 3], `stages` are [0, 2]",
    "both ways": "ValueError: the batch is given by microbatch (`arg_mbs`, `kwarg_mbs`, "
    "`target_mbs`), and as a whole: it must be one of the two",
    "number": "ValueError: `arg_mbs` are 3, and the schedule has 4 microbatches",
    "deferred": " --> zb_v.csv:",
    "private": "ImportError: schedlang.torch needs `_PipelineScheduleOfTomorrow`, a private part of "
    f"torch.distributed.pipelining that torch {torch.__version__} does not have",
}


@pytest.mark.processes
def test_what_is_wrong_is_said_before_anything_runs(run_ranks: Run) -> None:
    first, last = run_ranks(refused, 2).results()
    for name, message in MESSAGES.items():
        assert message in first[name], (name, first[name])
    assert first["no target"] == "nothing"
    needs = "ValueError: this rank has the last stage, so it needs `target`, or `target_mbs`"
    assert last["no target"] == needs
