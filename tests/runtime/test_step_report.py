"""`Pipeline.report`: speed, FLOPs, idle time and memory of recorded steps, on real processes."""

import time
from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, PipelineError
from tests.support.mesh import mesh
from tests.support.models import ROWS, WIDTH, batch, pipeline, program, replicated
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

#: FLOPs of a linear layer for a row.
OF_A_ROW = 2 * WIDTH * WIDTH
PLANS: dict[str, dict[str, int]] = {
    "1f1b": {"microbatches": 4},
    "zb_v": {"microbatches": 4},
    "1f1b_recompute": {"microbatches": 4},
    "gems": {"microbatches": 4},
    "seq1f1b": {"microbatches": 4, "slices": 2},
    "forward_only": {"microbatches": 4},
}


def flops_of_step(report: dict[str, float], ranks: int) -> float:
    """The FLOPs of a step, of all ranks."""
    return report["tflops_per_rank"] * 1e12 * ranks * report["seconds_per_step"]


def samples_of_step(report: dict[str, float]) -> float:
    return report["samples_per_second"] * report["seconds_per_step"]


def run_step(ours: Pipeline, plan: Plan, seed: int) -> None:
    if plan.is_forward_only:
        ours.evaluate(*batch(plan, seed))
    else:
        ours.step(*batch(plan, seed))


def reports(name: str) -> list[dict[str, float]]:
    """The reports of two steps each, of which the second finds all shapes known."""
    plan = program(name, ranks=2, **PLANS[name])
    ours = pipeline(plan, replicated(plan))
    run_step(ours, plan, 0)
    found = []
    for _ in range(2):
        ours.record = True
        for seed in range(2):
            run_step(ours, plan, seed)
        ours.record = False
        # It belongs to no report.
        run_step(ours, plan, 0)
        found.append(ours.report(peak_flops=1e9))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_report_counts_what_the_stages_compute(name: str, run_ranks: Run) -> None:
    """The FLOPs of the model, whatever the schedule runs again; the same on all ranks."""
    plan = program(name, ranks=2, **PLANS[name])
    one, other = run_ranks(partial(reports, name), 2).results()
    assert one == other
    rows = ROWS * plan.microbatches
    # Sequences have three positions for each slice.
    positions = rows * (3 * plan.layout.slices if plan.layout.slices > 1 else 1)
    passes = 1 if plan.is_forward_only else 3
    for report in one:
        assert report["steps"] == 2
        flops = passes * positions * plan.layout.pieces * OF_A_ROW
        assert flops_of_step(report, 2) == pytest.approx(flops)
        assert report["mfu"] == pytest.approx(report["tflops_per_rank"] * 1e3)
        assert samples_of_step(report) == pytest.approx(rows)
        assert "tokens_per_second" not in report
        assert 0 < report["bubble"] < 1
        assert 0.01 < report["peak_memory_gib/rank1"] <= report["peak_memory_gib"]
        assert all(type(value) in (int, float) for value in report.values())


class Slow(nn.Module):
    """Takes time, and no FLOPs."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


def slow_rank(what: str) -> tuple[dict[str, float], str]:
    """The report of a pipeline in which rank 1 computes for longer than rank 0, and its text."""
    plan = program("1f1b", ranks=2, microbatches=4)
    torch.manual_seed(0)
    layers = [[nn.Linear(600, 600)] for _ in range(2)]
    if what == "work":
        layers[1] = [nn.Linear(600, 600) for _ in range(9)]
    else:
        layers[1].append(Slow())
    ours = pipeline(plan, [nn.Sequential(*each) for each in layers])
    inputs = torch.randn(400, 600)
    ours.step(inputs, inputs)
    ours.record = True
    for _ in range(3):
        ours.step(inputs, inputs)
    report = ours.report()
    return report, str(report)


@pytest.mark.parametrize(
    ("what", "work", "says"),
    [
        ("work", 1.8, "with 1.80 times the mean FLOPs"),
        ("sleep", 1.0, "with 1.00 times the mean FLOPs, so its device is slower"),
    ],
)
def test_the_slowest_rank_and_why(
    run_ranks: Run, what: str, work: float, says: str
) -> None:
    report, text = run_ranks(slow_rank, 2, what).results()[0]
    assert report["slowest_rank"] == 1
    assert report["slowest_rank_time"] > 1.2
    assert report["slowest_rank_work"] == pytest.approx(work)
    # Nothing is known of what this CPU can do.
    assert "mfu" not in report
    assert says in text


class Tokens(nn.Module):
    """Tokens become vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.table(tokens)
        return found


def tokens_of_unequal_lengths() -> dict[str, float]:
    """The report of steps on lists of microbatches, each step with other lengths."""
    plan = program("1f1b", ranks=2, microbatches=2)
    torch.manual_seed(0)
    model = [Tokens(), nn.Linear(WIDTH, 10)]
    rank = dist.get_rank()
    loss_fn = lambda scores, to: nn.functional.cross_entropy(scores.flatten(0, 1), to)  # noqa: E731
    ours = Pipeline(plan, {rank: model[rank]}, loss_fn)
    ours.record = True
    for lengths in ([3, 5], [5, 4]):
        inputs = [torch.ones(2, length).long() for length in lengths]
        targets = [each.flatten() for each in inputs]
        ours.step(inputs, targets, counts=[each.numel() for each in inputs])
    return ours.report()


def test_lists_have_as_many_tokens_as_they_have(run_ranks: Run) -> None:
    report = run_ranks(tokens_of_unequal_lengths, 2).results()[0]
    seconds = report["seconds_per_step"]
    assert report["tokens_per_second"] * seconds == pytest.approx(17)
    assert samples_of_step(report) == pytest.approx(4)
    # On average 17 tokens, of which each costs a row of the last layer.
    assert flops_of_step(report, 2) == pytest.approx(3 * 17 * 2 * WIDTH * 10)


def of_replicas() -> dict[str, float]:
    plan = program("1f1b", ranks=2, microbatches=4)
    of = mesh("dp", "pp")
    rank = of.get_local_rank("pp")
    model = replicated(plan)
    ours = Pipeline(plan, {rank: model[rank]}, nn.functional.mse_loss, mesh=of)
    ours.record = True
    for seed in range(2):
        ours.step(*batch(plan, 2 * seed + of.get_local_rank("dp")))
    return ours.report()


def test_replicas_count_together(run_ranks: Run) -> None:
    found = run_ranks(of_replicas, 4).results()
    assert all(each == found[0] for each in found)
    assert samples_of_step(found[0]) == pytest.approx(2 * ROWS * 4)
    flops = 3 * 2 * ROWS * 4 * 2 * OF_A_ROW
    assert flops_of_step(found[0], 4) == pytest.approx(flops)
    ranks = {name for name in found[0] if name.startswith("peak_memory_gib/")}
    assert ranks == {f"peak_memory_gib/rank{rank}" for rank in range(4)}


def without_a_record() -> list[str]:
    plan = program("1f1b", ranks=2, microbatches=4)
    ours = pipeline(plan, replicated(plan))
    told = []
    # Before anything was recorded, and with nothing since the last report.
    for _ in range(2):
        ours.step(*batch(plan, 0))
        with pytest.raises(PipelineError) as error:
            ours.report()
        told.append(str(error.value))
        ours.record = True
        ours.step(*batch(plan, 1))
        assert ours.report()
        ours.record = False
    return told


def test_a_report_of_nothing_is_an_error_after_which_training_goes_on(
    run_ranks: Run,
) -> None:
    expected = "no step was recorded since the last report: set `pipeline.record = True` before"
    for told in run_ranks(without_a_record, 2).results():
        assert len(told) == 2
        assert all(each.startswith(expected) for each in told)


def attends() -> dict[str, float]:
    """The report of a stage whose attention is an operator of its own on CPUs."""
    plan = program("1f1b", ranks=2, microbatches=2)
    torch.manual_seed(0)

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.scaled_dot_product_attention(x, x, x)

    model = [nn.Sequential(nn.Linear(8, 8), Attends()) for _ in range(2)]
    ours = pipeline(plan, model)
    x = torch.randn(4, 3, 8)
    ours.record = True
    ours.step(x, x)
    return ours.report()


def test_attention_counts(run_ranks: Run) -> None:
    report = run_ranks(attends, 2).results()[0]
    linear = 2 * 12 * 8 * 8
    attention = 2 * 2 * 4 * 3 * 3 * 8
    flops = 3 * 2 * (linear + attention)
    assert flops_of_step(report, 2) == pytest.approx(flops)
