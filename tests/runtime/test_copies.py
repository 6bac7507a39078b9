"""Copies of weights that drift apart, as replicas of a stage or as tied weights, are noticed."""

import warnings

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang.runtime import Pipeline
from tests.support.models import batch, program, replicated
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


def told(noise: float) -> list[str]:
    """What a rank is told in three steps, if it adds so much noise of its own to its weights."""
    plan = program("dualpipe", ranks=2, microbatches=4)
    rank = dist.get_rank()
    model = replicated(plan)
    stages = {number: model[number] for number in plan.stages_of(rank)}
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    torch.manual_seed(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            ours.step(*batch(plan, step))
            optimizer.step()
            optimizer.zero_grad()
            for weight in ours.parameters():
                weight.data += noise * torch.randn_like(weight)
    return [str(each.message) for each in caught]


def test_replicas_that_drift_apart_are_told_once(run_ranks: Run) -> None:
    (message,), others = run_ranks(told, 2, 1e-9).results()
    start = "the replicas of stage 0 on rank 0 and on rank 1 are not alike any more: each rank"
    assert message.startswith(start)
    assert not others


def test_replicas_that_are_updated_alike_stay_alike(run_ranks: Run) -> None:
    assert run_ranks(told, 2, 0.0).results() == [[], []]
