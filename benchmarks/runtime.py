"""The runtime against torch's own pipelining, in one run: `make bench WHAT=runtime`.

Both train the same model, each in processes of its own, by turns of a few steps; the figures are
medians over the turns, on the rank that takes most. Other work on the machine hits both alike.
`cpu` is the processor time of all threads of a rank, per action of the plan; `step` is the time of
the clock. Torch runs the plan itself, as the table that `schedc export` writes, or its own schedule
where one is named. `bare` is the least that it can cost: `benchmarks/bare.py`.
"""

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from bare import Bare
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from schedlang import Plan, compile, read_source
from schedlang.plan.torch_tables import dialect_of, export_table
from schedlang.runtime import Pipeline

PROGRAMS = Path(__file__).parent.parent / "programs"
#: Seconds that a turn may take at most; turns of each, of which the first is a warm-up.
LIMIT = 60
TURNS = 9

#: Ranks, model, program, microbatches, and torch's own schedule, or none for its interpreter of
#: tables.
CASES = [
    (2, "tiny", "1f1b", 32, None),
    (2, "tiny", "interleaved_1f1b", 32, None),
    (2, "tiny", "zb_v", 32, None),
    (4, "tiny", "1f1b", 32, None),
    (4, "tiny", "interleaved_1f1b", 32, None),
    (2, "medium", "1f1b", 8, "Schedule1F1B"),
    (2, "medium", "interleaved_1f1b", 8, "ScheduleInterleaved1F1B"),
    (2, "medium", "zb_v", 8, "ScheduleZBVZeroBubble"),
]


def tiny(stages: int) -> tuple[list[nn.Module], Tensor]:
    """Two layers of width 8 a stage, and one row a microbatch: overhead is all there is."""
    return [
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        for _ in range(stages)
    ], torch.randn(1, 8)


def medium(stages: int) -> tuple[list[nn.Module], Tensor]:
    """A transformer of eight layers of width 256, and 64 tokens a microbatch."""
    layers = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        for _ in range(8)
    ]
    each = 8 // stages
    return [
        nn.Sequential(*layers[at : at + each]) for at in range(0, 8, each)
    ], torch.randn(1, 64, 256)


def ours(
    plan: Plan, model: list[nn.Module], batch: Tensor, _: str | None
) -> Callable[[], object]:
    """A step of this project's runtime."""
    stages = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    return partial(Pipeline(plan, stages, nn.functional.mse_loss).step, batch, batch)


def torchs(
    plan: Plan, model: list[nn.Module], batch: Tensor, name: str | None
) -> Callable[[], object]:
    """A step of torch's pipelining."""
    mine = plan.stages_of(dist.get_rank())
    count = len(plan.placement)
    stages = [
        PipelineStage(model[stage], stage, count, torch.device("cpu")) for stage in mine
    ]
    if name is None:
        schedule = schedules._PipelineScheduleRuntime(
            stages, plan.microbatches, loss_fn=nn.functional.mse_loss
        )
        with tempfile.NamedTemporaryFile("w", suffix=".csv", newline="") as file:
            file.write(export_table(plan, "torch-csv", dialect_of(torch.__version__)))
            file.flush()
            schedule._load_csv(file.name, format="compute_comms")
    else:
        of = stages[0] if len(stages) == 1 else stages
        schedule = getattr(schedules, name)(
            of, plan.microbatches, loss_fn=nn.functional.mse_loss
        )
    inputs = [batch] if 0 in mine else []
    return partial(schedule.step, *inputs, target=batch if count - 1 in mine else None)


def bare(
    plan: Plan, model: list[nn.Module], batch: Tensor, _: str | None
) -> Callable[[], object]:
    """A step of the bare loop."""
    return Bare(plan, model, batch, nn.functional.mse_loss).step


CONTENDERS = {"bare": bare, "ours": ours, "torch": torchs}


def rank_main(which: str, place: int, rank: int, folder: str) -> None:
    """One rank of a contender: for each line that comes, it takes a turn with the other ranks and
    prints its times.
    """
    ranks, kind, program, microbatches, name = CASES[place]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/{which}", rank=rank, world_size=ranks
    )
    plan = compile(
        read_source(PROGRAMS / f"{program}.sched"),
        {"ranks": ranks, "microbatches": microbatches},
    )
    torch.manual_seed(0)
    model, row = (tiny if kind == "tiny" else medium)(len(plan.placement))
    step = CONTENDERS[which](
        plan, model, row.repeat(microbatches, *[1] * (row.ndim - 1)), name
    )
    steps = 5 if kind == "tiny" else 1
    actions = len(plan.ranks[rank])
    for _ in sys.stdin:
        dist.barrier()
        cpu = process_time()
        clock = perf_counter()
        for _ in range(steps):
            step()
        cpu = (process_time() - cpu) / steps / actions
        clock = (perf_counter() - clock) / steps
        print(cpu * 1e6, clock * 1e3, flush=True)
    dist.barrier()
    os._exit(0)


@contextmanager
def launched(
    which: str, place: int, folder: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a contender, which wait for their turns."""
    pipe = subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [
        [sys.executable, __file__, which, str(place), str(rank), folder]
        for rank in range(CASES[place][0])
    ]
    ranks = [
        subprocess.Popen(each, stdin=pipe, stdout=pipe, text=True, env=environment)
        for each in commands
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def turn(ranks: list[subprocess.Popen[str]]) -> list[float]:
    """The times of a turn, each of the rank that takes most; an exit if a rank does not answer in
    time.
    """
    for rank in ranks:
        print(file=rank.stdin, flush=True)
    for rank in ranks:
        # It waits until there is an answer or an end; which of the two it is, the next lines find
        # out.
        select.select([rank.stdout], [], [], LIMIT)
        if rank.poll() is not None or not select.select([rank.stdout], [], [], 0)[0]:
            sys.exit(
                "a rank has ended"
                if rank.poll() is not None
                else f"no answer within {LIMIT} s"
            )
    return [
        max(times)
        for times in zip(
            *(map(float, rank.stdout.readline().split()) for rank in ranks), strict=True
        )
    ]


def measure(place: int) -> dict[str, list[float]]:
    """The median times of a case, of each contender."""
    found: dict[str, list[list[float]]] = {which: [] for which in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        groups = {
            which: stack.enter_context(launched(which, place, folder))
            for which in CONTENDERS
        }
        for _ in range(1 + TURNS):
            for which, ranks in groups.items():
                found[which].append(turn(ranks))
    return {
        # Without the first turn, in which memory is taken and shapes are agreed on.
        which: [median(times) for times in zip(*turns[1:], strict=True)]
        for which, turns in found.items()
    }


def main() -> None:
    """Print the table."""
    print(f"{'':42} | cpu, us/action           | step, ms")
    print(
        "ranks model  program          microbatches |  bare  ours torch  ratio |",
        end="",
    )
    print("    bare    ours   torch  ratio | torch runs")
    for place, (ranks, kind, program, microbatches, name) in enumerate(CASES):
        cpu, step = zip(*measure(place).values(), strict=True)
        print(
            f"{ranks:>5} {kind:<6} {program:<16} {microbatches:>12} | "
            f"{''.join(f'{each:>5.0f} ' for each in cpu)}"
            f" {cpu[1] / cpu[2]:>5.2f} | {''.join(f'{each:>7.1f} ' for each in step)} "
            f"{step[1] / step[2]:>5.2f} | "
            f"{name or 'the table'}",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
