"""Ways in which a training run may go wrong, on 4 real processes: all end, and say why. `make
faults` tries all.

A fault is known by what happens, the schedule, the rank and the point: `kill 1f1b 2 7`.
"""

import math
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang import Kind
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.models import OPTIMIZERS, Does, batch, pipeline, program, replicated
from tests.support.ranks import LIMIT, Run

pytestmark = pytest.mark.processes

RANKS = 4
#: Seconds that a rank waits at most, and in which all end: for others than stalls, more than a busy
#: machine lets it wait. They take about one, and six for a stall.
STALL = 5.0
TIMEOUT = 30.0
#: At so many points a rank is killed.
KILLS = 10
#: A later step, and how many there are: a rank that dies at the end of a step is missed in the next
#: one.
LATER = 2
STEPS = 4
SIZES = {"1f1b": 8, "zb_v": 8, "pipedream_2bw": 4, "dualpipe": 8, "bpipe": 8}


def plan_of(schedule: str, ranks: int) -> Plan:
    return program(schedule, ranks=ranks, microbatches=SIZES[schedule])


def steps(
    plan: Plan,
    model: list[nn.Module],
    change: Callable[[Pipeline], None] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Train for some steps, with a pipeline that is changed before them."""
    mine = plan.stages_of(dist.get_rank())
    updates = any(Kind.U in each.kind for each in plan.ranks)
    optimizers = {
        each: OPTIMIZERS["momentum"](list(model[each].parameters())) for each in mine
    }
    ours = pipeline(
        plan, model, optimizers=optimizers if updates else {}, timeout=timeout
    )
    if change:
        change(ours)
    dist.barrier()
    for step in range(STEPS):
        ours.step(*batch(plan, step))


def kill(folder: Path, schedule: str, rank: int, point: int) -> None:
    """A rank dies before one of its calls, from the first to the last: in the first step, or at odd
    points later.
    """
    plan = plan_of(schedule, 4)

    def set_trap(ours: Pipeline) -> None:
        if dist.get_rank() == rank:
            # Ten points, evenly from the first call of a step to its last.
            place = point * (len(ours._training) - 1) // (KILLS - 1)
            index, call, op = ours._training[place]
            ours._training[place] = (
                index,
                Trap(call, LATER if point % 2 else 0, folder),
                op,
            )

    steps(plan, replicated(plan), set_trap)


class Trap:
    """Kills the process instead of a call, in some step."""

    def __init__(self, call: Callable[[], None], step: int, folder: Path) -> None:
        self.call = call
        self.step = step
        self.folder = folder

    def __call__(self) -> None:
        if self.step == 0:
            happens(self.folder)
            os.kill(os.getpid(), signal.SIGKILL)
        self.step -= 1
        self.call()


def happens(folder: Path) -> None:
    """Leave the time."""
    (folder / "fault").write_text(str(time.monotonic()))


def inside(
    what: Callable[[Path, torch.Tensor], torch.Tensor],
    folder: Path,
    schedule: str,
    rank: int,
    point: int,
) -> None:
    """Something happens in a stage of a rank: in a forward, or at odd points a backward.

    At points 2, 3, 6 and 7 it is the last stage of the rank and not the first; from 4 on a later
    step.
    """
    plan = plan_of(schedule, 4)
    fault = partial(what, folder)
    model = replicated(plan)
    mine = [stage for stage, holder in enumerate(plan.placement) if holder == rank]
    stage = mine[-(point // 2 % 2)]
    # The second forward of the first step, or the third one of step `LATER`.
    call = plan.layout.units(stage) * LATER + 2 if point // 4 else 1
    # All stages are wrapped, for replicas are compared by the names of their weights.
    model = [Does(each, math.inf, fault) for each in model]
    model[stage] = Does(
        model[stage].inner, call, partial(backwards, fault) if point % 2 else fault
    )
    steps(plan, model, timeout=STALL if what is sleep else TIMEOUT)


def backwards(
    what: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    # Another tensor, so that the hook is no hook of what the stage makes.
    output = output * 1
    output.register_hook(what)
    return output


def throw(folder: Path, _: torch.Tensor) -> torch.Tensor:
    happens(folder)
    raise ValueError("boom\nand more")


def sleep(folder: Path, _: torch.Tensor) -> torch.Tensor:
    happens(folder)
    time.sleep(LIMIT)
    raise AssertionError


def shorten(folder: Path, output: torch.Tensor) -> torch.Tensor:
    happens(folder)
    return output[1:]


FAULTS = {
    "kill": kill,
    "throw": partial(inside, throw),
    "stall": partial(inside, sleep),
    "shape": partial(inside, shorten),
}
SCHEDULES = ("1f1b", "zb_v", "pipedream_2bw", "dualpipe", "bpipe")
#: For each fault, at which points.
POINTS = {"kill": range(KILLS), "throw": (0, 3, 4, 7), "stall": (0, 7), "shape": (0, 6)}
#: Those of `make test`.
FEW = {
    "kill zb_v 0 3",
    "kill dualpipe 2 7",
    "kill bpipe 3 4",
    "throw zb_v 2 7",
    "stall pipedream_2bw 1 0",
    "shape dualpipe 3 6",
}
NAMES = [
    f"{what} {schedule} {rank} {point}"
    for what, points in POINTS.items()
    for schedule, rank, point in product(SCHEDULES, range(RANKS), points)
]
CASES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.faults)
    for name in NAMES
]
#: At the end of a step a rank waits for all that it has sent, perhaps to several ranks.
_OTHERS = r"(?:rank \d or )*rank {rank}(?: or rank \d)*"
#: The cause that all ranks give: `{rank}` has the fault. Two words of torch's own for shapes, by
#: the loss.
CAUSES = {
    "kill": _OTHERS
    + r" is gone: rank \d lost (?:its connection|the store of the process group) at {place}",
    "throw": r"rank {rank} failed at {place}: ValueError: boom$",
    "stall": r"rank {rank} has made no progress for \d+\.\d s at {place}(?:: rank \d has waited 5 s at {place})?$",
    "shape": r"rank {rank} failed at {place}: (?:the output of stage \d is float64 \[2, 8\] .* but float64 \[3, 8\]"
    r"|RuntimeError: The size of tensor a \(2\) must match .* b \(3\))",
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_at_once_and_say_why(
    run_ranks: Run, tmp_path: Path, case: str
) -> None:
    what, schedule, rank, point = case.split()
    outcome = run_ranks(FAULTS[what], RANKS, tmp_path, schedule, int(rank), int(point))
    happened = tmp_path / "fault"
    assert happened.exists(), outcome.logs
    assert time.monotonic() - float(happened.read_text()) < TIMEOUT, outcome.logs
    died = {int(rank)} if what == "kill" else set()
    assert outcome.codes == [-9 if each in died else 1 for each in range(RANKS)], (
        outcome.logs
    )
    place = rf"\S+ \((?:{places_of(plan_of(schedule, RANKS))})\)"
    cause = re.compile(
        rf"(?:^|stopped: |Error: ){CAUSES[what].format(rank=rank, place=place)}", re.M
    )
    living = [log for each, log in enumerate(outcome.logs) if each not in died]
    assert all(cause.search(log) for log in living), outcome.logs
    assert ("ValueError: boom\nand more\n" in outcome.logs[int(rank)]) == (
        what == "throw"
    )
    check_standings(living, died, place)


def places_of(plan: Plan) -> str:
    """Where the actions of a plan stand, as a pattern: in the program, or in what it imports."""
    found = {
        plan.where(rank, index)
        for rank, actions in enumerate(plan.ranks)
        for index in range(len(actions))
    }
    return "|".join(map(re.escape, sorted(found)))


def check_standings(living: list[str], died: set[int], place: str) -> None:
    """One rank says where each rank stood, and for whom it waited; where the store died with rank
    0, each its own.
    """
    others = _OTHERS.format(rank=r"\d")
    line = rf"^  rank (\d) (has waited \d+\.\d s for {others} at {place}|has been |was last seen )"
    found = [re.findall(line, log, re.M) for log in living]
    assert sorted(int(rank) for each in found for rank, _ in each) == [
        each for each in range(RANKS) if each not in died & {0}
    ], living
    assert sum(map(bool, found)) == (len(living) if 0 in died else 1), living
    assert any(what.startswith("has waited") for each in found for _, what in each), (
        living
    )
    assert {
        int(rank)
        for each in found
        for rank, what in each
        if what.startswith("was last")
    } == died - {0}, living
