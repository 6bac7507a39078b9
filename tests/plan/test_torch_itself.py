"""Torch's action tables with torch itself: it reads and runs what we write, and what it writes is
read and proved.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlang import CompileError, compile, read_source
from schedlang.plan.torch_tables import export_table, plan_of, read_table
from tests.plan.test_torch_tables import EXPORTABLE, SIZES, computes, program, texts
from tests.support.paths import CASES, PROGRAMS, TESTS

MARKERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
FORMS = {"torch-csv": "compute_comms", "torch-csv-compute": "compute_only"}


@pytest.fixture(scope="module")
def torch_schedules() -> SimpleNamespace:
    pytest.importorskip("torch", reason="these are torch's tables", exc_type=ImportError)
    from torch.distributed.pipelining import schedules

    return schedules


def stages(ranks: int, number: int, local: int) -> list[SimpleNamespace]:
    """What torch's schedules ask of stages while no process runs."""
    modules = SimpleNamespace(modules=lambda: [])
    return [
        SimpleNamespace(num_stages=number, group_size=ranks, group_rank=0, submod=modules)
        for _ in range(local)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXPORTABLE)
def test_torch_reads_what_we_write(
    torch_schedules: SimpleNamespace, name: str, form: str, tmp_path: Path
) -> None:
    """It writes the very same file again, knows where the stages are, and finds that the table runs
    to its end.
    """
    for ranks, microbatches in SIZES:
        plan = program(name, ranks, microbatches)
        (tmp_path / "table.csv").write_text(export_table(plan, form), newline="")
        runtime = torch_schedules._PipelineScheduleRuntime(
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
        torch_schedules._simulate_comms_compute(
            moves, plan.placement.__getitem__, len(plan.placement)
        )


CLASSES = {
    "ScheduleInterleaved1F1B": (1, 2, 3),
    "ScheduleLoopedBFS": (1, 2, 5),
    "ScheduleInterleavedZeroBubble": (1, 2, 3),
    "ScheduleZBVZeroBubble": (2,),
    "ScheduleDualPipeV": (2,),
}


@pytest.mark.parametrize("name", CLASSES)
def test_schedules_of_torch_prove(
    torch_schedules: SimpleNamespace, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    for local, ranks, rounds in itertools.product(CLASSES[name], (1, 2, 3, 4), (1, 2, 3)):
        microbatches = ranks * rounds * (2 if name == "ScheduleDualPipeV" else 1)
        schedule = getattr(torch_schedules, name)(stages(ranks, local * ranks, local), microbatches)
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


def test_interleaved_zero_bubble_is_that_of_torch(torch_schedules: SimpleNamespace) -> None:
    """Op for op."""
    source = read_source(PROGRAMS / "interleaved_zb.sched")
    for chunks, ranks, rounds in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 3)):
        of = stages(ranks, chunks * ranks, chunks)
        theirs = torch_schedules.ScheduleInterleavedZeroBubble(of, ranks * rounds).pipeline_order
        plan = compile(source, {"ranks": ranks, "microbatches": ranks * rounds, "chunks": chunks})
        assert computes(plan) == [
            " ".join(str(action) for action in row if action) for row in theirs.values()
        ]


#: What torch 2.13 writes for `defer_pp_recv=True`: named by schedule, ranks and microbatches.
DEFERRED = sorted((CASES / "torch_deferred").glob("*.csv"))


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.stem)
def test_deferred_receives_of_torch_train_wrong(path: Path) -> None:
    """It puts them in another order than the sends: seen to give wrong gradients, without an error."""
    with pytest.raises(CompileError) as caught:
        plan_of(read_table(read_source(path)))
    assert caught.value.diagnostics[0].code in ("deadlock", "mismatched-transfer")


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.stem)
def test_torch_still_defers_receives_so(
    torch_schedules: SimpleNamespace, path: Path, tmp_path: Path
) -> None:
    name, ranks, microbatches = path.stem.split("_")
    schedule = getattr(torch_schedules, name)(
        stages(int(ranks), 2 * int(ranks), 2), int(microbatches), defer_pp_recv=True
    )
    schedule._dump_csv(str(tmp_path / "table.csv"))
    assert (tmp_path / "table.csv").read_bytes() == path.read_bytes()


@pytest.mark.processes
def test_torch_trains_with_our_tables(torch_schedules: SimpleNamespace, tmp_path: Path) -> None:
    """On two processes of torch's own runtime, the gradients of one."""
    cases = []
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
        cases.append([f"{name}.{form}", FORMS[form], plan.placement, microbatches])
        (tmp_path / f"{name}.{form}").write_text(export_table(plan, form), newline="")
    (tmp_path / "tables.json").write_text(json.dumps(cases))
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                str(TESTS / "support" / "torch_tables_worker.py"),
                str(tmp_path),
                str(rank),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert len(found) == len(cases)
        for case, difference in found.items():
            assert difference < 1e-12, case
