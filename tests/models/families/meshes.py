"""Stages that torch cuts over a device mesh, or has replicas of."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.models.model import WIDTH, Model, chain, feature, linear


@feature("meshes", mesh="dp")
def replicas_of_the_pipeline(stages: int) -> Model:
    """Two replicas of the pipeline, with batches of their own"""
    return chain(lambda _: nn.Sequential(nn.LayerNorm(WIDTH), linear()), stages)


@feature("meshes", mesh="dp")
def replicas_and_a_norm(stages: int) -> Model:
    """Two replicas of the pipeline, and clipped gradients"""
    return chain(lambda _: linear(), stages, max_norm=0.01)


@feature("meshes", mesh="dp")
def fully_sharded(stages: int) -> Model:
    """fully_shard of every stage (FSDP2)"""

    def shard(module: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(module, mesh=mesh)

    return chain(
        lambda _: nn.Sequential(nn.LayerNorm(WIDTH), linear()), stages, spread=shard
    )


@feature("meshes", mesh="dp")
def sharded_in_layers(stages: int) -> Model:
    """fully_shard of every layer and of the stage, gathered again for the backward"""

    def shard(module: nn.Module, mesh: DeviceMesh) -> None:
        for part in list(module.modules()):
            if isinstance(part, nn.Linear):
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
        fully_shard(module, mesh=mesh)

    return chain(lambda _: nn.Sequential(linear(), linear()), stages, spread=shard)


@feature("meshes", mesh="tp", not_for={"slices", "skips"})
def tensor_parallel(stages: int) -> Model:
    """Two layers that are cut by columns and by rows (DTensor)"""

    def cut(module: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(
            module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )

    def stage(_: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )

    return chain(stage, stages, spread=cut)
