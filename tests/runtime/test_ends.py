"""What a pipeline leaves behind, on two processes."""

import gc
import warnings

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang.runtime import Pipeline
from tests.support.models import program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


def told() -> list[str]:
    """What Python tells of files and sockets that a pipeline leaves open."""
    plan = program("1f1b", ranks=2, microbatches=2)
    stages = {dist.get_rank(): nn.Linear(4, 4)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipeline(plan, stages, nn.functional.mse_loss).step(*torch.rand(2, 4, 4))
        gc.collect()
    return [str(each.message) for each in caught if each.category is ResourceWarning]


def test_no_socket_is_left_open(run_ranks: Run) -> None:
    assert run_ranks(told, 2).results() == [[], []]
