"""The processes that run a plan: all processes, or those of a device mesh, which may have replicas
of the pipeline.

    mesh["dp", "pp"]      pp 0   pp 1   pp 2         ranks of the plan, in one process group
              dp 0         0      1      2           the pipeline
              dp 1         3      4      5           its replica; 1 and 4 have the same weights
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import field, frozen

from schedlang.runtime.errors import PipelineError

#: The dimension of a mesh along which the ranks of a plan lie.
PIPELINE = "pp"


@frozen(eq=False)
class Replicas:
    """Processes with the same weights, by their ranks in the default process group; and their
    process group, if there are several.
    """

    processes: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def are_several(self) -> bool:
        """Whether there is more than one process."""
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
    #: For each process of a mesh, its coordinates in words: ` (dp 1, pp 1)`.
    _coordinates: dict[int, str] = field(factory=dict)

    @property
    def are_of_mesh(self) -> bool:
        """Whether the processes are those of a mesh."""
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
        """The name of a process in messages: `rank 3 (dp 1, pp 1)`, or without a mesh `rank 3`."""
        return f"rank {process}{self._coordinates.get(process, '')}"


def world_group() -> dist.ProcessGroup:
    """The default process group; PipelineError if there is none."""
    if dist.group.WORLD is None:
        raise PipelineError(
            "there is no process group: call torch.distributed.init_process_group first"
        )
    return dist.group.WORLD


def all_processes() -> Processes:
    """The processes of the default process group."""
    world = world_group()
    return Processes(
        dist.get_rank(),
        tuple(range(dist.get_world_size())),
        of_cpus_too(world),
        Replicas((dist.get_rank(),)),
    )


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The library by which a group sends tensors of a device: for `cpu:gloo,cuda:nccl` one of the
    two, and None if the group does not support the device.
    """
    backends = dict(
        each.split(":") for each in dist.get_backend_config(group).split(",")
    )
    return backends.get(device.type)


#: For a group that has only NCCL, the group of the same processes for GPUs and CPUs.
_for_both: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def of_cpus_too(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same processes that can also send CPU tensors, such as shapes: the group
    itself, or a new one if it has only NCCL, as groups by launchers do.
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
    """A separate group of the plan's ranks, which all of them create together. Ranks may come to
    its messages at different places among those of the plan, but all in the same order.
    """
    is_part = len(processes.pipeline) < dist.get_world_size()
    group = dist.new_group([*processes.pipeline], use_local_synchronization=is_part)
    assert isinstance(group, dist.ProcessGroup)
    return group
