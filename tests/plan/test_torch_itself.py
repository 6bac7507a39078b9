"""Torch's action tables with torch itself: it reads and runs what we write, and what it writes is
read and proved.
"""

import itertools
import logging
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="these are torch's tables", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from schedlang import CompileError, Source, compile, read_source
from schedlang.plan.torch_tables import (
    DIALECTS,
    dialect_of,
    export_table,
    plan_of,
    read_table,
)
from tests.plan.test_torch_tables import (
    DEFERRED,
    EXPORTABLE,
    SIZES,
    SIZES_OF,
    computes,
    program,
    texts,
)
from tests.plan.test_torch_waits import EACH_OTHER, RING, RING_RUNS
from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

#: The dialect of the tables of this torch. What has to do with waits is tried where it has them.
DIALECT = dialect_of(torch.__version__)
HAS_WAITS = DIALECT != "2.13"
needs_waits = pytest.mark.skipif(
    not HAS_WAITS, reason=f"torch {torch.__version__} has no waits: they came with 2.15"
)
#: The kinds of cell that stand for no action of a plan.
WAITS = ("WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B")
IMPLIED = ("UNSHARD", "RESHARD", "REDUCE_GRAD", *WAITS)
FORMS = {"torch-csv": "compute_comms", "torch-csv-compute": "compute_only"}
WIDTH = 4
#: Seconds after which a step of a few actions hangs.
HANGS = 10.0


def stages(ranks: int, number: int, local: int) -> list[SimpleNamespace]:
    """What torch's schedules ask of stages while no process runs."""
    modules = SimpleNamespace(modules=lambda: [])
    return [
        SimpleNamespace(
            num_stages=number,
            group_size=ranks,
            group_rank=0,
            submod=modules,
            has_backward=True,
        )
        for _ in range(local)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXPORTABLE)
def test_torch_reads_what_we_write(name: str, form: str, tmp_path: Path) -> None:
    """It writes the very same file again, knows where the stages are, and finds that the table runs
    to its end.
    """
    for ranks, microbatches in SIZES_OF.get(name, SIZES):
        plan = program(name, ranks, microbatches)
        (tmp_path / "table.csv").write_text(
            export_table(plan, form, DIALECT), newline=""
        )
        runtime = schedules._PipelineScheduleRuntime(
            stages(ranks, len(plan.placement), 1), microbatches
        )
        runtime._load_csv(str(tmp_path / "table.csv"), format=FORMS[form])
        runtime._dump_csv(str(tmp_path / "again.csv"), format=FORMS[form])
        assert (tmp_path / "again.csv").read_bytes() == (
            tmp_path / "table.csv"
        ).read_bytes()
        assert runtime.stage_index_to_group_rank == dict(enumerate(plan.placement))
        # The simulation knows neither groups nor what concerns whole stages.
        singles = {
            rank: [
                each for action in actions for each in action.sub_actions or [action]
            ]
            for rank, actions in runtime.pipeline_order_with_comms.items()
        }
        moves = {
            rank: [each for each in row if each.microbatch_index is not None]
            for rank, row in singles.items()
        }
        schedules._simulate_comms_compute(
            moves, plan.placement.__getitem__, len(plan.placement)
        )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_torch_reads_one_dialect(dialect: str, tmp_path: Path) -> None:
    plan = program("1f1b", 2, 4)
    (tmp_path / "table.csv").write_text(
        export_table(plan, "torch-csv", dialect), newline=""
    )
    runtime = schedules._PipelineScheduleRuntime(stages(2, 2, 1), 4)
    refused = pytest.raises((AssertionError, ValueError))
    with nullcontext() if dialect == DIALECT else refused:
        runtime._load_csv(str(tmp_path / "table.csv"), format="compute_comms")


#: Torch's schedules, with 30 sizes or more of each: stages of a rank, ranks, microbatches.
CLASSES = {
    "ScheduleInterleaved1F1B": [
        (local, ranks, ranks * rounds)
        for local, ranks, rounds in itertools.product(
            (1, 2, 3), (1, 2, 3, 4), (1, 2, 3)
        )
    ],
    "ScheduleLoopedBFS": [
        (local, ranks, ranks * rounds)
        for local, ranks, rounds in itertools.product(
            (1, 2, 5), (1, 2, 3, 4), (1, 2, 3)
        )
    ],
    "ScheduleInterleavedZeroBubble": [
        (local, ranks, ranks * rounds)
        for local, ranks, rounds in itertools.product(
            (1, 2, 3), (1, 2, 3, 4), (1, 2, 3)
        )
    ],
    "ScheduleZBVZeroBubble": [
        (2, ranks, microbatches)
        for ranks, microbatches in itertools.product((1, 2, 3, 4), range(1, 9))
    ],
    "ScheduleDualPipeV": [
        (2, ranks, 2 * ranks + more)
        for ranks, more in itertools.product((1, 2, 3, 4), range(8))
    ],
}
#: What torch 2.15 can be asked for: waits for sends earlier, or for reductions later, and weights
#: gathered later.
OPTIONS = [
    {
        "max_outstanding_sends": sends,
        "defer_reduce_grad_wait": defers_waits,
        "unshard_lookahead": lookahead,
    }
    for sends, defers_waits, lookahead in itertools.product(
        (None, 1, 2, 4), (False, True), ("full", "auto")
    )
]


@pytest.mark.parametrize("name", CLASSES)
def test_schedules_of_torch_prove(name: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for number, (local, ranks, microbatches) in enumerate(CLASSES[name]):
        # Each size with some other options: all of them come several times.
        options = OPTIONS[number * 5 % len(OPTIONS)] if HAS_WAITS else {}
        of = stages(ranks, local * ranks, local)
        schedule = getattr(schedules, name)(of, microbatches, **options)
        rows = [
            " ".join(str(action) for action in row if action)
            for row in schedule.pipeline_order.values()
        ]
        rows_with_comms = schedule.pipeline_order_with_comms.values()
        # Torch keeps three stages of a rank gathered: of more, a plan says when.
        gathers = local > 3
        with_comms = [
            " ".join(
                str(action)
                for action in row
                if action.computation_type.value not in (WAITS if gathers else IMPLIED)
            )
            for row in rows_with_comms
        ]
        schedule._dump_csv(str(path), format="compute_only")
        assert computes(plan_of(read_table(read_source(path)))) == rows
        schedule._dump_csv(str(path), format="compute_comms")
        plan = plan_of(read_table(read_source(path)))
        assert texts(plan) == with_comms
        assert plan.microbatches == microbatches


def test_gpipe_of_torch_proves() -> None:
    """It runs without a table, and has one for show: of ops, and of reductions."""
    for ranks, microbatches in itertools.product((1, 2, 3, 4, 5), range(1, 7)):
        (stage,) = stages(ranks, ranks, 1)
        order = schedules.ScheduleGPipe(stage, microbatches)._get_pipeline_order()
        assert order is not None
        rows = [
            [
                str(action)
                for action in row
                if action and action.computation_type.value in "FB"
            ]
            for row in order.values()
        ]
        table = Source("table.csv", "\n".join(map(",".join, rows)))
        assert computes(plan_of(read_table(table))) == list(map(" ".join, rows))


def test_interleaved_zero_bubble_is_that_of_torch() -> None:
    """Op for op."""
    source = read_source(PROGRAMS / "interleaved_zb.sched")
    for chunks, ranks, rounds in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 3)):
        of = stages(ranks, chunks * ranks, chunks)
        theirs = schedules.ScheduleInterleavedZeroBubble(
            of, ranks * rounds
        ).pipeline_order
        plan = compile(
            source, {"ranks": ranks, "microbatches": ranks * rounds, "chunks": chunks}
        )
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
    # Waits aside, which torch 2.13 does not have.
    text = re.sub(r",\d+WAIT_\w+", "", (tmp_path / "table.csv").read_text())
    assert text == path.read_text()


def model(stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()
        for _ in range(stages)
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def gradient_error(
    file: Path, form: str, placement: list[int], microbatches: int
) -> float:
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
    stages = [
        PipelineStage(parts[stage], stage, count, torch.device("cpu")) for stage in mine
    ]
    runtime = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss)
    runtime._load_csv(str(file), format=form)
    runtime.step(
        *([inputs] if 0 in mine else []), target=targets if count - 1 in mine else None
    )
    pairs = [
        (p.grad, q.grad)
        for s in mine
        for p, q in zip(parts[s].parameters(), alone[s].parameters(), strict=True)
    ]
    return max(
        float((mine - right).abs().max() / right.abs().max()) for mine, right in pairs
    )


def gradient_errors(
    cases: dict[str, tuple[Path, str, list[int], int]],
) -> dict[str, float]:
    return {name: gradient_error(*case) for name, case in cases.items()}


@pytest.mark.processes
def test_torch_trains_with_our_tables(run_ranks: Run, tmp_path: Path) -> None:
    """On four processes of torch's own runtime, the gradients of one."""
    cases = {}
    for (name, microbatches), form in itertools.product(
        [
            ("1f1b", 3),
            ("interleaved_1f1b", 8),
            ("hanayo", 3),
            ("zb_v", 8),
            ("dualpipe_v", 9),
            ("v_min", 4),
        ],
        FORMS,
    ):
        plan = program(name, 4, microbatches)
        file = tmp_path / f"{name}.{form}"
        file.write_text(export_table(plan, form, DIALECT), newline="")
        cases[file.name] = file, FORMS[form], plan.placement, microbatches
    for found in run_ranks(gradient_errors, 4, cases).results():
        assert found.keys() == cases.keys()
        for case, error in found.items():
            assert error < 1e-12, case


def dumped(name: str, local: int, ranks: int, microbatches: int, path: Path) -> Path:
    """The table that a schedule of torch has with `defer_pp_recv`."""
    of = stages(ranks, local * ranks, local)
    schedule = getattr(schedules, name)(of, microbatches, defer_pp_recv=True)
    schedule._dump_csv(str(path), format="compute_comms")
    return path


@pytest.mark.parametrize("name", CLASSES)
def test_deferred_receives_are_proved_or_refused_with_cells(
    name: str, tmp_path: Path
) -> None:
    """Refused where messages meet the receives of others, or where a send that holds its rank hangs;
    of the latter the import says where they run.
    """
    codes = set()
    for local, ranks, microbatches in CLASSES[name]:
        path = dumped(name, local, ranks, microbatches, tmp_path / "table.csv")
        try:
            plan_of(read_table(read_source(path)))
        except CompileError as error:
            diagnostic = error.diagnostics[0]
            assert diagnostic.labels
            if diagnostic.code == "deadlock":
                assert "`--transport gloo`" in str(diagnostic.help)
            codes.add(diagnostic.code)
    assert {"deadlock"} <= codes <= {"deadlock", "mismatched-transfer"}


#: Tables with deferred receives, by ranks: the schedule, its placement, how many microbatches, and
#: why the import refuses it.
V_OF_TWO = [0, 1, 1, 0]
V_OF_FOUR = [0, 1, 2, 3, 3, 2, 1, 0]
DEFERS = {
    2: [
        ("ScheduleZBVZeroBubble", V_OF_TWO, 4, "mismatched-transfer"),
        ("ScheduleInterleavedZeroBubble", [0, 1] * 2, 4, "mismatched-transfer"),
        ("ScheduleZBVZeroBubble", V_OF_TWO, 2, "deadlock"),
        ("ScheduleDualPipeV", V_OF_TWO, 4, "deadlock"),
        ("ScheduleInterleaved1F1B", [0, 1] * 2, 4, "deadlock"),
        ("ScheduleLoopedBFS", [0, 1] * 2, 4, "deadlock"),
    ],
    4: [
        ("ScheduleZBVZeroBubble", V_OF_FOUR, 8, "mismatched-transfer"),
        ("ScheduleDualPipeV", V_OF_FOUR, 8, "mismatched-transfer"),
        ("ScheduleZBVZeroBubble", V_OF_FOUR, 4, "deadlock"),
        ("ScheduleInterleavedZeroBubble", [0, 1, 2, 3] * 2, 8, "deadlock"),
        ("ScheduleInterleaved1F1B", [0, 1, 2, 3] * 2, 8, "deadlock"),
        ("ScheduleLoopedBFS", [0, 1, 2, 3] * 2, 8, "deadlock"),
    ],
}


@pytest.mark.processes
@pytest.mark.parametrize("ranks", DEFERS)
def test_what_deferred_receives_do(ranks: int, run_ranks: Run, tmp_path: Path) -> None:
    """In torch itself on gloo: where they come in another order than the sends, gradients are
    wrong; where they only cross with sends, torch trains right, since a send holds nobody there.
    """
    cases = {}
    codes = {}
    for name, placement, microbatches, code in DEFERS[ranks]:
        case = f"{name} {microbatches}"
        path = dumped(name, 2, ranks, microbatches, tmp_path / f"{case}.csv")
        with pytest.raises(CompileError) as caught:
            plan_of(read_table(read_source(path)))
        assert caught.value.diagnostics[0].code == code, case
        cases[case] = path, "compute_comms", placement, microbatches
        codes[case] = code
    errors = run_ranks(gradient_errors, ranks, cases).results()
    for case, code in codes.items():
        worst = max(of_rank[case] for of_rank in errors)
        assert worst > 1e-3 if code == "mismatched-transfer" else worst < 1e-12, case


def train(file: Path, placement: list[int], microbatches: int) -> float:
    """A step with a table, with a line in the log for each action that begins."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger(schedules.__name__).setLevel(logging.DEBUG)
    return gradient_error(file, "compute_comms", placement, microbatches)


@needs_waits
@pytest.mark.processes
def test_torch_hangs_at_the_cells_that_the_import_names(
    run_ranks: Run, tmp_path: Path
) -> None:
    for text, placement in ((EACH_OTHER, [0, 1]), (RING, [0, 1, 2, 0])):
        path = tmp_path / "table.csv"
        path.write_text(text)
        with pytest.raises(CompileError) as caught:
            plan_of(read_table(read_source(path)))
        (diagnostic,) = caught.value.diagnostics
        ranks = len(text.splitlines())
        # A rank that waits for a message stands, in torch, at the op that needs it.
        cells = {
            wait.at.rank: re.sub(r"RECV_(F|B)", r"\1", wait.at.action)
            for wait in diagnostic.waits
        }
        assert len(cells) == ranks
        outcome = run_ranks(train, ranks, path, placement, 2, seconds=HANGS)
        assert outcome.codes == [None] * ranks, outcome.logs
        for rank, cell in cells.items():
            last = re.findall(
                r"running time_step \d+, action (\S+)", outcome.logs[rank]
            )[-1]
            assert last == cell, outcome.logs[rank]


@needs_waits
@pytest.mark.processes
def test_torch_trains_once_the_wait_stands_later(
    run_ranks: Run, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(RING_RUNS)
    plan_of(read_table(read_source(path)), "gloo")
    errors = run_ranks(train, 3, path, [0, 1, 2, 0], 2).results()
    assert max(errors) < 1e-12
