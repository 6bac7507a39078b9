"""Checkpoints of stages that FSDP has sharded, in all forms: trainings go on from them under another
plan, sharded otherwise or not at all, as one process would.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from schedlang.runtime import (
    Pipeline,
    dcp_state,
    load_dcp,
    load_model,
    load_optimizers,
    split,
)
from tests.runtime.test_distributed_checkpoint import (
    LOSS,
    MICROBATCHES,
    apart,
    batch,
    optimizers_of,
    whole,
)
from tests.support.cut_models import sequence
from tests.support.models import difference, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

RANKS = 2


class Training:
    """A training by a program of the gallery, of as many replicas as there are processes for: FSDP
    shards the stages over them.
    """

    def __init__(self, name: str) -> None:
        self.replicas = dist.get_world_size() // RANKS
        shape = (RANKS, self.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
        self.replica = mesh.get_local_rank("dp")
        each = MICROBATCHES // self.replicas
        self.plan = program(name, ranks=RANKS, microbatches=each)
        self.stages = split(sequence(), self.plan, rank=mesh.get_local_rank("pp"))
        for stage in self.stages.values() if self.replicas > 1 else ():
            fully_shard(stage, mesh=mesh["dp"])
        self.optimizers = optimizers_of(self.stages.values())
        self.pipeline = Pipeline(self.plan, self.stages, LOSS, mesh=mesh["pp"])

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            parts = (each.chunk(self.replicas)[self.replica] for each in batch(step))
            self.pipeline.step(*parts)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights, in one piece each."""
        return {
            name: _whole(weight).detach().clone()
            for stage in self.stages.values()
            for name, weight in stage.named_parameters()
        }


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def begins(folder: Path, form: str) -> None:
    """Two steps, and a checkpoint."""
    training = Training("1f1b")
    training.train(range(2))
    if form == "dcp":
        state = dcp_state(training.plan, training.stages, training.optimizers)
        save(state, checkpoint_id=folder)
    else:
        training.pipeline.save_model(folder, 2, training.optimizers)


def load(
    folder: Path, form: str, stages: dict[int, nn.Module], optimizers: list
) -> None:
    if form == "dcp":
        load_dcp(folder, stages, optimizers)
    else:
        assert load_model(folder, stages) == 2
        load_optimizers(folder, stages, optimizers)


def goes_on(folder: Path, form: str, name: str) -> float:
    """Two more steps; how far the weights are then from those of one process."""
    training = Training(name)
    load(folder, form, training.stages, training.optimizers)
    training.train(range(2, 4))
    expected = dict(whole(4).named_parameters())
    return max(
        difference(weight, expected[key]) for key, weight in training.weights().items()
    )


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_trainings_with_shards_go_on_from_files(
    run_ranks: Run, tmp_path: Path, form: str
) -> None:
    folder = tmp_path / "kept"
    run_ranks(begins, 4, folder, form).results()
    for processes in (4, 2):
        done = run_ranks(goes_on, processes, folder, form, "zb_v").results()
        assert max(done) < 1e-12, processes
    model = sequence()
    load(folder, form, {0: model}, optimizers_of([model]))
    assert apart([model], whole(2)) < 1e-12


def resumes(folder: Path) -> tuple[int, float]:
    """One of two pipelines has a newer checkpoint than the other, which has other shards."""
    training = Training("1f1b")
    training.train([0])
    training.pipeline.save(folder, 1, training.optimizers)
    kept = training.weights()
    training.train([1])
    if training.replica == 1:
        training.pipeline.save(folder, 2, training.optimizers)
    dist.barrier()
    step = training.pipeline.resume(folder, training.optimizers)
    now = training.weights()
    return step, max(difference(now[name], kept[name]) for name in kept)


def test_all_shards_go_on_from_the_same_step(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(resumes, 4, tmp_path / "kept").results() == [(1, 0.0)] * 4
