"""Trainings that torch's distributed checkpoints keep, and that go on under another plan, with
another number of ranks, sharded otherwise, or in one process.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from schedlang.runtime import Pipeline, PipelineError, dcp_state, load_dcp, split
from tests.support.cut_models import ROWS, alone, sequence
from tests.support.models import difference, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

LOSS = nn.functional.mse_loss
MICROBATCHES = 8


def batch(step: int) -> Tensor:
    """The inputs and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, MICROBATCHES * ROWS, 8)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def optimizers_of(stages: Iterable[nn.Module]) -> list[Optimizer]:
    """One for each stage, which keeps a number of steps, and two tensors for each weight."""
    return [
        AdamW(weights, 1e-2) for stage in stages if (weights := [*stage.parameters()])
    ]


def whole(steps: int) -> nn.Module:
    """The model after some steps in one process."""
    model = sequence()
    (optimizer,) = optimizers_of([model])
    for step in range(steps):
        alone(model, LOSS, *batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return model


def apart(stages: Iterable[nn.Module], model: nn.Module) -> float:
    """How far the weights of some stages are from those of the same name in a model."""
    wanted = dict(model.named_parameters())
    return max(
        (
            difference(weight, wanted[name])
            for stage in stages
            for name, weight in stage.named_parameters()
        ),
        # A stage may be a Tanh.
        default=0.0,
    )


class Training:
    """A training of this rank, by a program of the gallery."""

    def __init__(self, name: str, ranks: int) -> None:
        self.plan = program(name, ranks=ranks, microbatches=MICROBATCHES)
        self.stages = split(sequence(), self.plan)
        self.optimizers = optimizers_of(self.stages.values())
        self.pipeline = Pipeline(self.plan, self.stages, LOSS)

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.pipeline.step(*batch(step))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()


def begins(folder: Path, name: str) -> None:
    """Two steps, and a checkpoint."""
    training = Training(name, dist.get_world_size())
    training.train(range(2))
    state = dcp_state(training.plan, training.stages, training.optimizers)
    save(state, checkpoint_id=folder)


def goes_on(folder: Path, name: str) -> float:
    """Two more steps; how far the weights are then from those of one process."""
    training = Training(name, dist.get_world_size())
    load_dcp(folder, training.stages, training.optimizers)
    training.train(range(2, 4))
    return apart(training.stages.values(), whole(4))


@pytest.mark.parametrize(
    ("first", "ranks", "then", "other_ranks"),
    [
        ("1f1b", 4, "zb_v", 2),
        # Two ranks have each stage, and each of them writes it.
        ("dualpipe", 2, "interleaved_1f1b", 4),
    ],
)
def test_another_plan_goes_on(
    run_ranks: Run, tmp_path: Path, first: str, ranks: int, then: str, other_ranks: int
) -> None:
    run_ranks(begins, ranks, tmp_path / "kept", first).results()
    done = run_ranks(goes_on, other_ranks, tmp_path / "kept", then).results()
    assert max(done) < 1e-12
    # One process has the whole model, and no process group.
    model = sequence()
    load_dcp(tmp_path / "kept", {0: model}, optimizers_of([model]))
    assert apart([model], whole(2)) < 1e-12


def sharded(folder: Path) -> float:
    """The stages of a rank as FSDP shards them over the same two ranks, saved and loaded: how far
    the weights are after two more steps from those of one process.
    """
    model = sequence()
    (optimizer,) = optimizers_of([model])
    for step in range(2):
        alone(model, LOSS, *batch(step))
        optimizer.step()
        optimizer.zero_grad()
    plan = program("1f1b", ranks=1, microbatches=MICROBATCHES)
    save(dcp_state(plan, {0: model}, [optimizer]), checkpoint_id=folder)
    shards = sequence()
    fully_shard(shards)
    (its,) = optimizers_of([shards])
    load_dcp(folder, {0: shards}, [its])
    save(dcp_state(plan, {0: shards}, [its]), checkpoint_id=folder / "sharded")
    again = sequence()
    (its,) = optimizers_of([again])
    load_dcp(folder / "sharded", {0: again}, [its])
    for step in range(2, 4):
        alone(again, LOSS, *batch(step))
        its.step()
        its.zero_grad()
    return apart([again], whole(4))


def test_weights_that_fsdp_has_sharded_are_read_by_others(
    run_ranks: Run, tmp_path: Path
) -> None:
    assert max(run_ranks(sharded, 2, tmp_path / "kept").results()) < 1e-12


def does_not_fit(folder: Path, what: str) -> None:
    """A checkpoint that is loaded into something else."""
    rank = dist.get_rank()
    plan = program("1f1b", ranks=2, microbatches=MICROBATCHES)
    stages = split(sequence(), plan)
    optimizers: Sequence[Optimizer] = optimizers_of(stages.values())
    if what == "without optimizers":
        save(dcp_state(plan, stages), checkpoint_id=folder)
    elif what != "nothing":
        optimizers = [SGD(stage.parameters(), 0.1) for stage in stages.values()]
        save(dcp_state(plan, stages, optimizers), checkpoint_id=folder)
    if rank == 1 and what == "another name":
        stages[1].register_parameter("more", nn.Parameter(torch.zeros(1)))
    if rank == 1 and what == "another shape":
        stages[1].get_submodule("12").weight = nn.Parameter(torch.zeros(9))
    load_dcp(folder, stages, optimizers)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another name", "does not fit the stages of rank 1: .*more"),
        ("another shape", "does not fit the stages of rank 1: .*12.weight"),
        ("without optimizers", "has a model without optimizers"),
        ("nothing", "is no checkpoint of torch"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_an_error_on_all_ranks(
    run_ranks: Run, tmp_path: Path, what: str, message: str
) -> None:
    run = run_ranks(does_not_fit, 2, tmp_path / "kept", what)
    assert run.codes == [1, 1]
    for log in run.logs:
        assert PipelineError.__name__ in log
        assert re.search(message, log), log
