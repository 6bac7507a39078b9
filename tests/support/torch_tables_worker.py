"""One rank that trains one step with each table of a folder in torch's own pipelining, against one
process.

`torch_tables_worker.py FOLDER RANK`: FOLDER/tables.json has the tables, as [file, form, placement,
microbatches].
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage, schedules

FOLDER = Path(sys.argv[1])
RANK = int(sys.argv[2])
WIDTH = 4


def model(stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()
        for _ in range(stages)
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def difference(file: str, form: str, placement: list[int], microbatches: int) -> float:
    """The largest difference of a gradient on this rank from that of one process, relative to the
    largest gradient.
    """
    alone = model(len(placement))
    parts = model(len(placement))
    count = len(placement)
    inputs, targets = torch.randn(2, 2 * microbatches, WIDTH, dtype=torch.double)
    loss(torch.nn.Sequential(*alone)(inputs), targets).backward()
    mine = [stage for stage, rank in enumerate(placement) if rank == RANK]
    stages = [PipelineStage(parts[stage], stage, count, torch.device("cpu")) for stage in mine]
    runtime = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss)
    runtime._load_csv(str(FOLDER / file), format=form)
    runtime.step(*([inputs] if 0 in mine else []), target=targets if count - 1 in mine else None)
    pairs = [
        (p.grad, q.grad)
        for s in mine
        for p, q in zip(parts[s].parameters(), alone[s].parameters(), strict=True)
    ]
    return max(float((mine - right).abs().max() / right.abs().max()) for mine, right in pairs)


torch.distributed.init_process_group(
    "gloo", f"file://{FOLDER}/store", timedelta(seconds=20), rank=RANK, world_size=2
)
found = {
    f"{case[0]}": difference(*case) for case in json.loads((FOLDER / "tables.json").read_text())
}
(FOLDER / f"found{RANK}.json").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
