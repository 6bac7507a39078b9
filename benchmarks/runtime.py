"""The runtime against torch's own pipelining, in one run: `make bench-runtime`.

Both train the same model in the same processes, by turns of a few steps; the figures are medians over the turns, on the
rank that takes most. Other work on the machine hits both alike. `cpu` is the processor time of all threads of a rank,
per action of the plan; `step` is the time of the clock. Torch runs the plan itself, as the table that `schedc export`
writes, or its own schedule where one is named. `bare` is the least that it can cost: `benchmarks/bare.py`.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
from schedlang.runtime import Pipeline
from schedlang.torch_tables import export_table

PROGRAMS = Path(__file__).parent.parent / "programs"
LIMIT, TURNS = 280, 9

#: Ranks, model, program, microbatches, and torch's own schedule, or none for its interpreter of tables.
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
    return [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(stages)], torch.randn(1, 8)


def medium(stages: int) -> tuple[list[nn.Module], Tensor]:
    """A transformer of eight layers of width 256, and 64 tokens a microbatch."""
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(8)]
    each = 8 // stages
    return [nn.Sequential(*layers[at : at + each]) for at in range(0, 8, each)], torch.randn(1, 64, 256)


class Contender:
    """One of the three."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        self.cpu: list[float] = []
        self.clock: list[float] = []

    def turn(self, steps: int) -> None:
        """Take some steps, all ranks together."""
        dist.barrier()
        cpu, clock = process_time(), perf_counter()
        for _ in range(steps):
            self.step()
        self.cpu.append((process_time() - cpu) / steps)
        self.clock.append((perf_counter() - clock) / steps)


def ours(plan: Plan, model: list[nn.Module], batch: Tensor) -> Contender:
    """This project's runtime."""
    stages = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    return Contender(partial(Pipeline(plan, stages, nn.functional.mse_loss).step, batch, batch))


def torchs(plan: Plan, model: list[nn.Module], batch: Tensor, name: str | None) -> Contender:
    """Torch's pipelining."""
    mine, count = plan.stages_of(dist.get_rank()), len(plan.placement)
    stages = [PipelineStage(model[stage], stage, count, torch.device("cpu")) for stage in mine]
    if name is None:
        schedule = schedules._PipelineScheduleRuntime(stages, plan.microbatches, loss_fn=nn.functional.mse_loss)
        with tempfile.NamedTemporaryFile("w", suffix=".csv", newline="") as file:
            file.write(export_table(plan, "torch-csv"))
            file.flush()
            schedule._load_csv(file.name, format="compute_comms")
    else:
        of = stages[0] if len(stages) == 1 else stages
        schedule = getattr(schedules, name)(of, plan.microbatches, loss_fn=nn.functional.mse_loss)
    inputs = [batch] if 0 in mine else []
    return Contender(partial(schedule.step, *inputs, target=batch if count - 1 in mine else None))


def measure(ranks: int, kind: str, program: str, microbatches: int, name: str | None) -> dict[str, float]:
    """The figures of a case on this rank."""
    plan = compile(read_source(PROGRAMS / f"{program}.sched"), {"ranks": ranks, "microbatches": microbatches})
    torch.manual_seed(0)
    model, row = (tiny if kind == "tiny" else medium)(len(plan.placement))
    batch = row.repeat(microbatches, *[1] * (row.ndim - 1))
    contenders = {
        "bare": Contender(Bare(plan, copy.deepcopy(model), batch, nn.functional.mse_loss).step),
        "torch": torchs(plan, copy.deepcopy(model), batch, name),
        "ours": ours(plan, model, batch),
    }
    for each in contenders.values():
        each.turn(2)
    for _ in range(TURNS):
        for each in contenders.values():
            each.turn(5 if kind == "tiny" else 1)
    actions, figures = len(plan.ranks[dist.get_rank()]), dict[str, float]()
    for which, each in contenders.items():
        figures[f"{which} cpu"] = median(each.cpu[1:]) / actions * 1e6
        figures[f"{which} step"] = median(each.clock[1:]) * 1e3
    return figures


def rank_main(place: int, rank: int, folder: Path) -> None:
    """One rank of a case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=CASES[place][0])
    (folder / f"found{rank}.json").write_text(json.dumps(measure(*CASES[place])))
    dist.barrier()
    os._exit(0)


def launch(place: int) -> dict[str, float]:
    """The figures of a case, each of the rank that takes most."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = range(CASES[place][0])
        commands = [[sys.executable, __file__, str(place), str(rank), folder] for rank in ranks]
        processes = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) for command in commands]
        try:
            codes = [process.wait(LIMIT) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        found = [json.loads((Path(folder) / f"found{rank}.json").read_text()) for rank in ranks]
    return {figure: max(each[figure] for each in found) for figure in found[0]}


def main() -> None:
    """Print the table."""
    print(f"{'':42} | cpu, us/action           | step, ms")
    print("ranks model  program          microbatches |  bare  ours torch  ratio |", end="")
    print("    bare    ours   torch  ratio | torch runs")
    for place, (ranks, kind, program, microbatches, name) in enumerate(CASES):
        figures = launch(place)
        cpu, step = ([figures[f"{which} {what}"] for which in ("bare", "ours", "torch")] for what in ("cpu", "step"))
        print(
            f"{ranks:>5} {kind:<6} {program:<16} {microbatches:>12} | {''.join(f'{each:>5.0f} ' for each in cpu)}"
            f" {cpu[1] / cpu[2]:>5.2f} | {''.join(f'{each:>7.1f} ' for each in step)} {step[1] / step[2]:>5.2f} | "
            f"{name or 'the table'}",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
