"""Torch's action tables with torch itself: it reads and runs what we write, and what it writes is
read and proved.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="these are torch's tables", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from schedlang import compile, read_source
from schedlang.plan.torch_tables import export_table, plan_of, read_table
from tests.plan.test_torch_tables import DEFERRED, EXPORTABLE, SIZES, computes, program, texts
from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

MARKERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
FORMS = {"torch-csv": "compute_comms", "torch-csv-compute": "compute_only"}
WIDTH = 4


def stages(ranks: int, number: int, local: int) -> list[SimpleNamespace]:
    """What torch's schedules ask of stages while no process runs."""
    modules = SimpleNamespace(modules=lambda: [])
    return [
        SimpleNamespace(num_stages=number, group_size=ranks, group_rank=0, submod=modules)
        for _ in range(local)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXPORTABLE)
def test_torch_reads_what_we_write(name: str, form: str, tmp_path: Path) -> None:
    """It writes the very same file again, knows where the stages are, and finds that the table runs
    to its end.
    """
    for ranks, microbatches in SIZES:
        plan = program(name, ranks, microbatches)
        (tmp_path / "table.csv").write_text(export_table(plan, form), newline="")
        runtime = schedules._PipelineScheduleRuntime(
            stages(ranks, len(plan.placement), 1), microbatches
        )
        runtime._load_csv(str(tmp_path / "table.csv"), format=FORMS[form])
        runtime._dump_csv(str(tmp_path / "again.csv"), format=FORMS[form])
        assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "table.csv").read_bytes()
        assert runtime.stage_index_to_group_rank == dict(enumerate(plan.placement))
        # The simulation knows neither groups nor what concerns whole stages.
        singles = {
            rank: [each for action in actions for each in action.sub_actions or [action]]
            for rank, actions in runtime.pipeline_order_with_comms.items()
        }
        moves = {
            rank: [each for each in row if each.microbatch_index is not None]
            for rank, row in singles.items()
        }
        schedules._simulate_comms_compute(moves, plan.placement.__getitem__, len(plan.placement))


CLASSES = {
    "ScheduleInterleaved1F1B": (1, 2, 3),
    "ScheduleLoopedBFS": (1, 2, 5),
    "ScheduleInterleavedZeroBubble": (1, 2, 3),
    "ScheduleZBVZeroBubble": (2,),
    "ScheduleDualPipeV": (2,),
}


@pytest.mark.parametrize("name", CLASSES)
def test_schedules_of_torch_prove(name: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for local, ranks, rounds in itertools.product(CLASSES[name], (1, 2, 3, 4), (1, 2, 3)):
        microbatches = ranks * rounds * (2 if name == "ScheduleDualPipeV" else 1)
        schedule = getattr(schedules, name)(stages(ranks, local * ranks, local), microbatches)
        rows = [
            " ".join(str(action) for action in row if action)
            for row in schedule.pipeline_order.values()
        ]
        with_comms = [
            " ".join(str(action) for action in row if action.computation_type.value not in MARKERS)
            for row in schedule.pipeline_order_with_comms.values()
        ]
        schedule._dump_csv(str(path), format="compute_only")
        assert computes(plan_of(read_table(read_source(path)))) == rows
        schedule._dump_csv(str(path), format="compute_comms")
        plan = plan_of(read_table(read_source(path)))
        assert texts(plan) == with_comms
        assert plan.microbatches == microbatches


def test_interleaved_zero_bubble_is_that_of_torch() -> None:
    """Op for op."""
    source = read_source(PROGRAMS / "interleaved_zb.sched")
    for chunks, ranks, rounds in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 3)):
        of = stages(ranks, chunks * ranks, chunks)
        theirs = schedules.ScheduleInterleavedZeroBubble(of, ranks * rounds).pipeline_order
        plan = compile(source, {"ranks": ranks, "microbatches": ranks * rounds, "chunks": chunks})
        assert computes(plan) == [
            " ".join(str(action) for action in row if action) for row in theirs.values()
        ]


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.stem)
def test_torch_still_defers_receives_so(path: Path, tmp_path: Path) -> None:
    name, ranks, microbatches = path.stem.split("_")
    schedule = getattr(schedules, name)(
        stages(int(ranks), 2 * int(ranks), 2), int(microbatches), defer_pp_recv=True
    )
    schedule._dump_csv(str(tmp_path / "table.csv"))
    assert (tmp_path / "table.csv").read_bytes() == path.read_bytes()


def model(stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()
        for _ in range(stages)
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def gradient_error(file: Path, form: str, placement: list[int], microbatches: int) -> float:
    """Train one step with a table in torch's own pipelining, and in one process: the largest
    difference of a gradient on this rank, relative to the largest gradient.
    """
    rank = dist.get_rank()
    alone = model(len(placement))
    parts = model(len(placement))
    count = len(placement)
    inputs, targets = torch.randn(2, 2 * microbatches, WIDTH, dtype=torch.double)
    loss(torch.nn.Sequential(*alone)(inputs), targets).backward()
    mine = [stage for stage, holder in enumerate(placement) if holder == rank]
    stages = [PipelineStage(parts[stage], stage, count, torch.device("cpu")) for stage in mine]
    runtime = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss)
    runtime._load_csv(str(file), format=form)
    runtime.step(*([inputs] if 0 in mine else []), target=targets if count - 1 in mine else None)
    pairs = [
        (p.grad, q.grad)
        for s in mine
        for p, q in zip(parts[s].parameters(), alone[s].parameters(), strict=True)
    ]
    return max(float((mine - right).abs().max() / right.abs().max()) for mine, right in pairs)


def gradient_errors(cases: dict[str, tuple[Path, str, list[int], int]]) -> dict[str, float]:
    return {name: gradient_error(*case) for name, case in cases.items()}


@pytest.mark.processes
def test_torch_trains_with_our_tables(run_ranks: Run, tmp_path: Path) -> None:
    """On two processes of torch's own runtime, the gradients of one."""
    cases = {}
    for (name, microbatches), form in itertools.product(
        [
            ("1f1b", 3),
            ("interleaved_1f1b", 4),
            ("hanayo", 3),
            ("zb_v", 4),
            ("dualpipe_v", 5),
            ("v_min", 4),
        ],
        FORMS,
    ):
        plan = program(name, 2, microbatches)
        file = tmp_path / f"{name}.{form}"
        file.write_text(export_table(plan, form), newline="")
        cases[file.name] = file, FORMS[form], plan.placement, microbatches
    for found in run_ranks(gradient_errors, 2, cases).results():
        assert found.keys() == cases.keys()
        for case, error in found.items():
            assert error < 1e-12, case
