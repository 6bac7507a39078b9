"""Which processes run a plan: all of them, or those of a device mesh, where there may be replicas
of the pipeline.

    mesh["dp", "pp"]      pp 0   pp 1   pp 2         ranks of the plan, in one process group
              dp 0         0      1      2           the pipeline
              dp 1         3      4      5           its replica; 1 and 4 have the same weights
"""

from collections.abc import Iterable
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from schedlang.runtime.torch_private.wrappers import is_sharded

#: The dimension of a mesh along which the ranks of a plan are.
PIPELINE = "pp"


@frozen(eq=False)
class Replicas:
    """Processes with the same weights, by their ranks in the default process group; and if there
    are several, the group that they make up.
    """

    processes: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def are_several(self) -> bool:
        """Whether there is more than this process."""
        return len(self.processes) > 1

    @property
    def others(self) -> tuple[int, ...]:
        """The other processes."""
        return tuple(
            process for process in self.processes if process != dist.get_rank()
        )


@frozen(eq=False)
class Processes:
    """The processes of a pipeline and of its replicas, by their ranks in the default process group.

    `pipeline[r]` is the process that is rank r of the plan, in the `group`; this one is its rank
    `own`. `replicas` are the processes that are this rank of the plan in all replicas of the
    pipeline: one group for all of its stages, whose sums come in the same order in all replicas.
    """

    own: int
    pipeline: tuple[int, ...]
    group: dist.ProcessGroup
    replicas: Replicas
    #: For each process of a mesh, where in the mesh it is: ` (dp 1, pp 1)`.
    _coordinates: dict[int, str] = field(factory=dict)

    @property
    def are_of_mesh(self) -> bool:
        """Whether they are the processes of a mesh."""
        return bool(self._coordinates)

    @property
    def all(self) -> list[int]:
        """The processes of all replicas."""
        return sorted(self._coordinates) or list(self.pipeline)

    @property
    def others(self) -> tuple[int, ...]:
        """The other processes of the pipeline."""
        return tuple(each for each in self.pipeline if each != self.pipeline[self.own])

    def name(self, process: int) -> str:
        """A process in a message: `rank 3 (dp 1, pp 1)`, or without a mesh `rank 3`."""
        return f"rank {process}{self._coordinates.get(process, '')}"


def processes_of(mesh: DeviceMesh | None) -> Processes:
    """The processes of a mesh, which must pass `check_mesh`, or of the default process group."""
    if mesh is None:
        world = dist.group.WORLD
        assert world is not None
        return Processes(
            dist.get_rank(),
            tuple(range(dist.get_world_size())),
            _of_cpus_too(world),
            Replicas((dist.get_rank(),)),
        )
    names = mesh.mesh_dim_names or ()
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
        _of_cpus_too(pipeline.get_group()),
        Replicas(tuple(replicas.mesh.tolist()), _of_cpus_too(replicas.get_group()))
        if replicas
        else Replicas((dist.get_rank(),)),
        coordinates,
    )


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The library that a group sends tensors of a device by: for `cpu:gloo,cuda:nccl` one of the
    two, and None for devices that the group does not know.
    """
    backends = dict(
        each.split(":") for each in dist.get_backend_config(group).split(",")
    )
    return backends.get(device.type)


#: For a group of NCCL alone, the group for GPUs and CPUs that was made of its processes.
_for_both: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _of_cpus_too(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same processes that also sends tensors of CPUs, as shapes are: the group
    itself, or where it has NCCL alone, as launchers make it, one beside it.
    """
    if backend_of(group, torch.device("cpu")) is not None:
        return group
    if group not in _for_both:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(
            ranks,
            backend="cpu:gloo,cuda:nccl",
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        assert isinstance(made, dist.ProcessGroup)
        _for_both[group] = made
    return _for_both[group]


def group_apart(processes: Processes) -> dist.ProcessGroup:
    """A group of the ranks of the plan by itself, which all of them make together: what goes there
    comes at other places among the messages of each rank, but everywhere in one order.
    """
    is_part = len(processes.pipeline) < dist.get_world_size()
    group = dist.new_group([*processes.pipeline], use_local_synchronization=is_part)
    assert isinstance(group, dist.ProcessGroup)
    return group


def counting_together(
    replicas: Replicas, modules: Iterable[nn.Module]
) -> list[Replicas]:
    """The replicas whose losses count together, along each dimension in which there are some: those
    of the pipeline, and those among which FSDP takes the mean of gradients.
    """
    found = [replicas] if replicas.are_several else []
    weights = chain.from_iterable(
        module.parameters() for module in modules if is_sharded(module)
    )
    mesh = next(
        (weight.device_mesh for weight in weights if hasattr(weight, "device_mesh")),
        None,
    )
    if mesh is not None:
        for group in mesh.get_all_groups():
            found.append(Replicas(tuple(dist.get_process_group_ranks(group)), group))
    return found
