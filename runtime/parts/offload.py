"""Activations that are copied to the host's memory and back (PipeOffload, arXiv 2503.01328), or to
another rank's (BPipe, Kim et al. 2023).

F ── on the device ──► OFFLOAD ── on the host ──► RELOAD ── on the device ──► B
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedlang.runtime.door import Site, load
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import flatten
from schedlang.schedule.kinds import AWAY


class Offload(Part):
    """The ops OFFLOAD and RELOAD of a stage, for some of its microbatches."""

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        device: torch.device,
        microbatches: Container[int],
        copies: "Copies",
    ) -> None:
        self._stage = stage
        self._module = module
        self._device = device
        self._microbatches = microbatches
        self.copies = copies
        #: The activations of each microbatch, from F to RELOAD.
        self._activations: dict[int, Activations] = {}
        #: From RELOAD to the backward: functions that wait until activations are back.
        self._arrivals: dict[int, Callable[[], None]] = {}

    def before_forward(self, run: Forward) -> None:
        """Record the tensors that autograd will save."""
        if run.microbatch not in self._microbatches or not run.has_graph:
            return
        weights = [*self._module.parameters(), *run.substitutes.values()]
        held = [
            tensor
            for value in (run.input, *run.held)
            for tensor in flatten(value, "")[0]
        ]
        stays = [*weights, *self._module.buffers(), *held]
        activations = Activations(self._device, stays)
        self._activations[run.microbatch] = activations
        run.contexts = [*run.contexts, activations]

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: copy the activations to the host, or to the rank that keeps them."""
        memories = self._activations[microbatch].memories
        check_unchanged(memories, self._stage, microbatch)
        self.copies.offload(memories, self._stage, microbatch)

    def reload(self, microbatch: int) -> None:
        """RELOAD: copy the activations back."""
        activations = self._activations.pop(microbatch)
        self._arrivals[microbatch] = self.copies.reload(
            activations.memories, self._stage, microbatch
        )
        # From now on only the graph holds them, and frees them after the backward.
        activations.forget()

    def before_backward(self, run: Backward) -> None:
        """Wait until the activations are back."""
        if run.microbatch in self._arrivals:
            self._arrivals.pop(run.microbatch)()


class Memory:
    """The memory of saved tensors, as bytes: on the device, or on the host. While another rank
    keeps them, there are `size` bytes, and none here.
    """

    def __init__(self, bytes: Tensor) -> None:
        self.bytes = bytes
        self.size = bytes.numel()
        #: The saved tensors, each with its count of changes in place at that time.
        self.saved: list[tuple[Tensor, int]] = []


class Copies(Protocol):
    """Copies the activations of a rank to where they are kept, and back."""

    def offload(self, memories: Sequence[Memory], stage: int, microbatch: int) -> None:
        """Begin to copy the memories of a stage's microbatch away."""

    def reload(
        self, memories: Sequence[Memory], stage: int, microbatch: int
    ) -> Callable[[], None]:
        """Begin to copy them back; gives a function that waits until they are there."""


class CopiesOfCpu:
    """Copies within the memory of a CPU, which are over at once."""

    def offload(self, memories: Sequence[Memory], stage: int, microbatch: int) -> None:
        """Copy the memories of a stage's microbatch, so that the first ones are free."""
        for memory in memories:
            memory.saved = []
            memory.bytes = memory.bytes.clone()

    def reload(
        self, memories: Sequence[Memory], stage: int, microbatch: int
    ) -> Callable[[], None]:
        """Copy them once more; then they are there."""
        self.offload(memories, stage, microbatch)
        return lambda: None


def check_unchanged(memories: Sequence[Memory], stage: int, microbatch: int) -> None:
    """PipelineError if a saved tensor of a microbatch was changed in place.

    Autograd checks that by itself, but not for tensors that hooks have packed.
    """
    for memory in memories:
        if any(changes_of(tensor) != changes for tensor, changes in memory.saved):
            raise PipelineError(
                f"what stage {stage} has saved of microbatch {microbatch} for its backward was "
                "changed in place before it was away (offload), perhaps by the stage that takes "
                "its output: let that change a copy, `x = x.clone()`"
            )


@frozen
class _View:
    """A saved tensor, as a view of its memory."""

    memory: Memory
    type: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Activations(saved_tensors_hooks):
    """The activations of one microbatch on one stage: the tensors that autograd saves in a forward
    that runs inside these hooks.

    The memory of the tensors in `stays`, which are weights and inputs, is not copied, since it is
    held elsewhere anyway.
    """

    def __init__(self, device: torch.device, stays: Iterable[Tensor]) -> None:
        super().__init__(self._pack, self._unpack)
        self._device = device
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        #: By address, so that the memory of several views is copied once.
        self._memories: dict[int, Memory] = {}

    @property
    def memories(self) -> list[Memory]:
        """The memories of saved tensors; none after `forget`."""
        return [*self._memories.values()]

    def forget(self) -> None:
        """Drop the references to saved tensors, which the graph still holds."""
        self._memories.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:
            # Inside a transform of `torch.func`, a tensor has no memory of its own.
            return tensor
        if tensor.device != self._device or not address or address in self._stays:
            return tensor
        if address not in self._memories:
            self._memories[address] = Memory(
                torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            )
        memory = self._memories[address]
        # Detached, since the tensor's graph holds this object.
        memory.saved.append((tensor.detach(), changes_of(tensor)))
        return _View(
            memory,
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.size(),
            tensor.stride(),
        )

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = torch.empty(0, dtype=packed.type, device=self._device)
        storage = packed.memory.bytes.untyped_storage()
        return tensor.set_(storage, packed.offset, packed.size, packed.stride)


def of_stages(site: Site) -> Iterator[tuple[int, Offload]]:
    """Make the part for stages whose microbatches the plan offloads; they share one `copies`."""
    copies: Copies = CopiesOfCpu()
    if site.device.type == "cuda":
        copies = load("gpu_copies").of_device(site.device)
    for stage, module in site.modules.items():
        microbatches = site.microbatches_with(AWAY, stage)
        if microbatches:
            yield stage, Offload(stage, module, site.device, microbatches, copies)
