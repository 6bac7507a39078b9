"""Exchanges between two stages of a rank, by functions that one process can repeat: steps and
evaluations are those of one process.
"""

import logging

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, add_loss
from tests.support.models import WIDTH, batch, difference, program_with
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


class Exchanging(nn.Module):
    """A stage that takes rows in another order, with a number of each beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def exchange(self, x: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(len(x)).flip(0)
        return 2 * x[order], order

    def forward(self, x: Tensor, order: Tensor | None = None) -> Tensor:
        if order is not None:
            x = x[order.argsort()] + order[:, None]
        return self.linear(x).tanh()


class Plain(nn.Module):
    """A stage that takes what the one before it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


#: Stages of a rank: the first takes what another rank sends, the last one has no method.
KINDS = (Plain, Exchanging, Exchanging, Exchanging, Plain)


def modules(plan: Plan) -> list[nn.Module]:
    torch.default_generator.manual_seed(0)
    return [KINDS[stage % 5]() for stage in range(plan.layout.pieces)]


def alone(model: list[nn.Module], x: Tensor) -> Tensor:
    """What a process makes that has all stages."""
    for stage in model:
        exchange = getattr(stage, "exchange", None)
        x = stage(x) if exchange is None else stage(*exchange(x))
    return x


def compared(lines: str) -> tuple[float, float]:
    """How far the gradients of a step, and the outputs of an evaluation, are from one process."""
    plan = program_with("experts_1f1b", lines, ranks=2, microbatches=3, layers=2)
    own = modules(plan)
    reference = modules(plan)
    stages = {stage: own[stage] for stage in plan.stages_of(dist.get_rank())}
    for stage in plan.layout.frozen:
        for weight in (*own[stage].parameters(), *reference[stage].parameters()):
            weight.requires_grad_(False)
    pipeline = Pipeline(plan, stages, nn.functional.mse_loss)
    inputs, targets = batch(plan, 0)
    pipeline.step(inputs, targets)
    for x, y in zip(inputs.chunk(3), targets.chunk(3), strict=True):
        (nn.functional.mse_loss(alone(reference, x), y) / 3).backward()
    worst = 0.0
    for number, stage in stages.items():
        wanted = reference[number].get_parameter("linear.weight").grad
        found = stage.get_parameter("linear.weight").grad
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            worst = max(worst, difference(found, wanted))
    outputs = pipeline.evaluate(inputs)
    if outputs is None:
        return worst, 0.0
    with torch.no_grad():
        expected = [alone(reference, x) for x in inputs.chunk(3)]
    pairs = zip(outputs, expected, strict=True)
    return worst, max(difference(*pair) for pair in pairs)


@pytest.mark.parametrize(
    "lines", ["", "recompute 0 .. 4", "frozen 0 .. 1", "frozen 0 .. 3"]
)
def test_they_train_and_evaluate_as_in_one_process(lines: str, run_ranks: Run) -> None:
    for gradients, outputs in run_ranks(compared, 2, lines).results():
        assert gradients < 1e-12
        assert outputs < 1e-12


class Learned(Exchanging):
    """An exchange with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def exchange(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().exchange(self.scale * x)


class Adding(Exchanging):
    """An exchange that adds a loss."""

    def exchange(self, x: Tensor) -> tuple[Tensor, Tensor]:
        add_loss("size", x.square().mean())
        return super().exchange(x)


def refused(kind: type[Exchanging], lines: str) -> None:
    """A step of stages whose exchange would have to be trained."""
    plan = program_with("experts_1f1b", lines, ranks=1, microbatches=2)
    stages = dict(enumerate([Plain(), kind(), Plain()]))
    for stage in plan.layout.frozen:
        stages[stage].requires_grad_(False)
    Pipeline(plan, stages, nn.functional.mse_loss).step(*batch(plan, 0))


@pytest.mark.parametrize("lines", ["", "frozen 0 .. 1"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Learned, "`exchange` of stage 1 computes with weights of shape []"),
        (Adding, "`exchange` of stage 1 adds the loss `size`"),
    ],
)
def test_an_exchange_that_would_have_to_be_trained_is_refused(
    kind: type[Exchanging], message: str, lines: str, run_ranks: Run
) -> None:
    outcome = run_ranks(refused, 1, kind, lines)
    assert outcome.codes == [1]
    assert message in outcome.logs[0], outcome.logs


def with_a_method_too_many() -> None:
    """The attention of the program, which takes what another rank sends, has the method."""
    plan = program_with("experts_1f1b", "", ranks=1, microbatches=2)
    stages = dict(enumerate([Exchanging(), Exchanging(), Plain()]))
    Pipeline(plan, stages, nn.functional.mse_loss)


def test_a_method_that_the_plan_never_calls_is_refused(run_ranks: Run) -> None:
    outcome = run_ranks(with_a_method_too_many, 1)
    assert outcome.codes == [1]
    assert "stage 0 has a method `exchange`" in outcome.logs[0], outcome.logs


def warned() -> list[str]:
    """What is logged of stages whose module has no method."""
    plan = program_with("experts_1f1b", "", ranks=1, microbatches=2, layers=2)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("schedlang.runtime").addHandler(handler)
    Pipeline(plan, dict(enumerate(modules(plan))), nn.functional.mse_loss)
    return told


def test_a_stage_without_the_method_is_told(run_ranks: Run) -> None:
    (told,) = run_ranks(warned, 1).results()
    assert any("stage 4 on rank 0: the plan exchanges" in each for each in told)
