"""Pipelines that run ahead of others: a backward on another rank than the first forward of its
microbatch trains as in one process.
"""

from copy import deepcopy

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang import compile
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, add_loss, added_losses
from tests.support.models import WIDTH, alone, batch, difference, one_model, program
from tests.support.ranks import Run
from tests.support.sizes import STEPS

pytestmark = pytest.mark.processes


def own_of(plan: Plan, model: list[nn.Module]) -> dict[int, nn.Module]:
    """This rank's stages; those of one piece are one module."""
    stages = plan.stages_of(dist.get_rank())
    return {stage: model[plan.layout.piece(stage)] for stage in stages}


def trained(steps: int, backwards: int) -> float:
    """How far weights and losses of this rank are from those of one process."""
    plan = program("roundpipe", backwards=backwards)
    expected = one_model(plan.layout)
    reference = torch.optim.SGD(nn.Sequential(*expected).parameters(), 0.1)
    stages = own_of(plan, one_model(plan.layout))
    optimizer = torch.optim.SGD(nn.ModuleList(set(stages.values())).parameters(), 0.1)
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    pairs = []
    for step in range(steps):
        inputs, targets = batch(plan, step)
        losses = ours.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        chunks = (each.chunk(plan.microbatches) for each in (inputs, targets))
        made = [
            nn.functional.mse_loss(alone(expected, x), y)
            for x, y in zip(*chunks, strict=True)
        ]
        torch.stack(made).mean().backward()
        reference.step()
        reference.zero_grad()
        here = [
            loss
            for pipeline, of_pipeline in zip(
                plan.layout.trained, torch.stack(made).chunk(2), strict=True
            )
            if plan.placement[pipeline.stop - 1] == dist.get_rank()
            for loss in of_pipeline
        ]
        assert (losses is None) == (not here)
        if losses is not None:
            pairs.append((losses, torch.stack(here)))
    for number, stage in stages.items():
        other = expected[plan.layout.piece(number)]
        pairs += zip(stage.parameters(), other.parameters(), strict=True)
    return max(difference(*pair) for pair in pairs)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("backwards", [6, 4, 2])
def test_steps_are_those_of_one_process(
    run_ranks: Run, backwards: int, steps: int
) -> None:
    assert max(run_ranks(trained, 4, steps, backwards).results()) < 1e-12


UPDATED = """
schedule updated {
    param ranks = 2
    param microbatches = 3
    pipeline back  runs microbatches stage s in 0 .. 2 on 1 - s
    pipeline ahead runs microbatches stage s in 0 .. 1 on 0
    edge s in 1 .. 2 from ahead(s - 1) to back(s)
    rank r {
        for m in 0 .. microbatches {
            if r == 0 { F(ahead(0), m)  F(back(1), m)  B(back(1), m) }
            else { F(back(0), m)  B(back(0), m) }
        }
        U
    }
}
"""


def updated() -> float:
    """How far weights are from those of one process, where the plan updates them."""
    plan = compile(UPDATED)
    expected = one_model(plan.layout)
    reference = torch.optim.SGD(nn.Sequential(*expected).parameters(), 0.1)
    stages = own_of(plan, one_model(plan.layout))
    optimizers = {
        number: torch.optim.SGD(stage.parameters(), 0.1)
        for number, stage in stages.items()
    }
    ours = Pipeline(plan, stages, nn.functional.mse_loss, optimizers=optimizers)
    for step in range(2):
        inputs, targets = batch(plan, step)
        ours.step(inputs, targets)
        nn.functional.mse_loss(alone(expected, inputs), targets).backward()
        reference.step()
        reference.zero_grad()
    return max(
        difference(weight, other)
        for number, stage in stages.items()
        for weight, other in zip(
            stage.parameters(),
            expected[plan.layout.piece(number)].parameters(),
            strict=True,
        )
    )


def test_a_stage_that_runs_ahead_makes_the_updates_of_its_replica(
    run_ranks: Run,
) -> None:
    assert max(run_ranks(updated, 2).results()) < 1e-12


class Adding(nn.Module):
    """A stage that adds a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        add_loss("size", x.square().mean(), weight=0.5)
        return self.inner(x)


def with_added_losses() -> tuple[float, list[float]]:
    """How far the added losses are from those of one process, and the gradients."""
    plan = program("roundpipe")
    expected = [*map(Adding, one_model(plan.layout))]
    inputs, targets = batch(plan, 0)
    with added_losses() as added:
        loss = nn.functional.mse_loss(alone(expected, inputs), targets)
    (loss + added.total).backward()
    own = own_of(plan, [*map(Adding, one_model(plan.layout))])
    ours = Pipeline(plan, own, nn.functional.mse_loss)
    ours.step(inputs, targets)
    found = ours.named_losses()
    return abs(float(found["size"] - added["size"])), [
        difference(weight.grad, other.grad)
        for number, stage in own.items()
        for weight, other in zip(
            stage.parameters(),
            expected[plan.layout.piece(number)].parameters(),
            strict=True,
        )
    ]


def test_losses_that_stages_add_count_once(run_ranks: Run) -> None:
    for loss, gradients in run_ranks(with_added_losses, 4).results():
        assert loss < 1e-12
        assert max(gradients) < 1e-12


def refused(behind: nn.Module) -> None:
    """A step of stages, each with a copy of a module behind it."""
    plan = program("roundpipe")
    model = [nn.Sequential(each, deepcopy(behind)) for each in one_model(plan.layout)]
    Pipeline(plan, own_of(plan, model), nn.functional.mse_loss).step(*batch(plan, 0))


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (nn.Dropout(0.5), "draws random numbers, as dropout does"),
        (nn.BatchNorm1d(WIDTH, dtype=torch.double), "changes its buffer"),
    ],
    ids=["dropout", "batch norm"],
)
def test_forwards_that_would_differ_are_refused(
    run_ranks: Run, behind: nn.Module, message: str
) -> None:
    outcome = run_ranks(refused, 4, behind)
    assert any(message in log for log in outcome.logs), outcome.logs
