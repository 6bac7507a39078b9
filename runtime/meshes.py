"""The processes of a device mesh, along which lie the ranks of a plan and replicas of the pipeline;
and the meshes over which weights are cut.
"""

from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import (
    PIPELINE,
    Processes,
    Replicas,
    of_cpus_too,
    world_group,
)
from schedlang.runtime.torch_private.wrappers import is_sharded


def processes_of(mesh: DeviceMesh) -> Processes:
    """The processes of a mesh; PipelineError if it has other dimensions than those of a pipeline,
    or this process is not in it.
    """
    world_group()
    names = mesh.mesh_dim_names or ()
    if PIPELINE not in names or len(names) > 2:
        raise PipelineError(
            f"the mesh has the dimensions ({', '.join(names)}): it must have `{PIPELINE}`, and at "
            'most one more, along which the replicas are, as in `mesh["dp", "pp"]`'
        )
    if mesh.get_coordinate() is None:
        raise PipelineError(f"rank {dist.get_rank()} is not in the mesh")
    pipeline = mesh[PIPELINE]
    replicas = next((mesh[name] for name in names if name != PIPELINE), None)
    coordinates = {
        process: (
            f" ({', '.join(f'{name} {index}' for name, index in zip(names, at, strict=True))})"
        )
        for at, process in np.ndenumerate(mesh.mesh.numpy())
    }
    return Processes(
        mesh.get_local_rank(PIPELINE),
        tuple(pipeline.mesh.tolist()),
        of_cpus_too(pipeline.get_group()),
        Replicas(tuple(replicas.mesh.tolist()), of_cpus_too(replicas.get_group()))
        if replicas
        else Replicas((dist.get_rank(),)),
        coordinates,
    )


def meshes_of(modules: Iterable[nn.Module]) -> list[DeviceMesh]:
    """The meshes over which weights of some modules are cut (DTensor)."""
    weights = chain.from_iterable(module.parameters() for module in modules)
    return list(
        dict.fromkeys(
            weight.device_mesh for weight in weights if hasattr(weight, "device_mesh")
        )
    )


def counting_together(
    replicas: Replicas, modules: Iterable[nn.Module]
) -> list[Replicas]:
    """The replicas whose losses are averaged together, along each dimension that has any: replicas
    of the pipeline, and processes over which FSDP averages gradients.
    """
    found = [replicas] if replicas.are_several else []
    # Some weights may be sharded over fewer processes than others, such as those of experts.
    meshes = sorted(meshes_of(filter(is_sharded, modules)), key=DeviceMesh.size)
    for mesh in meshes[-1:]:
        for group in mesh.get_all_groups():
            found.append(Replicas(tuple(dist.get_process_group_ranks(group)), group))
    return found
