"""Activations that are copied to the host's memory and back (PipeOffload, arXiv 2503.01328), or to
that of another rank (BPipe, Kim et al. 2023).

F ── on the device ──► OFFLOAD ── on the host ──► RELOAD ── on the device ──► B
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part
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
    ) -> None:
        self._stage = stage
        self._module = module
        self._device = device
        self._microbatches = microbatches
        self._streams: Streams | None = None
        if device.type == "cuda":
            self._streams = Streams(device)
        #: Which rank keeps what is away, if not the host.
        self.keeper: Keeper | None = None
        #: From F to RELOAD.
        self._activations: dict[int, Activations] = {}

    def before_forward(self, run: Forward) -> None:
        """Keep hold of what autograd will save."""
        if run.microbatch not in self._microbatches or not run.has_graph:
            return
        weights = [*self._module.parameters(), *run.substitutes.values()]
        held = [
            tensor
            for value in (run.input, *run.held)
            for tensor in flatten(value, "")[0]
        ]
        stays = [*weights, *self._module.buffers(), *held]
        activations = Activations(self._device, stays, self._streams)
        self._activations[run.microbatch] = activations
        run.contexts = [*run.contexts, activations]

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: what the backward needs goes to the host, or to the rank that keeps it."""
        activations = self._activations[microbatch]
        check_unchanged(activations.memories, self._stage, microbatch)
        if self.keeper is None:
            activations.offload()
        else:
            self.keeper.offload(activations.memories, self._stage, microbatch)

    def reload(self, microbatch: int) -> None:
        """RELOAD: it comes back."""
        activations = self._activations.pop(microbatch)
        if self.keeper is None:
            activations.reload()
        else:
            self.keeper.reload(activations.memories)
        # From now on the graph holds them, and lets them go.
        activations.forget()


class Keeper(Protocol):
    """Another rank, which keeps memory for this one."""

    def offload(
        self, memories: "Sequence[Memory]", stage: int, microbatch: int
    ) -> None:
        """Begin to send it the memories of a stage's microbatch."""

    def reload(self, memories: "Sequence[Memory]") -> None:
        """Begin to bring them back."""


class Streams:
    """The streams of a GPU's copies, which run beside its ops: one each way, as its copy engines
    are.
    """

    def __init__(self, device: torch.device) -> None:
        self.to_host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.to_device = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Memory:
    """The memory of saved tensors, as bytes: on the device, or on the host. While another rank
    keeps them, there are `size` bytes, and none here.
    """

    def __init__(self, bytes: Tensor) -> None:
        self.bytes = bytes
        self.size = bytes.numel()
        #: When its last copy is through, on a GPU.
        self.ready: torch.cuda.Event | None = None
        #: Waits until it is back from another rank.
        self.arrive: Callable[[], None] | None = None
        #: The tensors that were saved, and how often each had been changed in place by then.
        self.saved: list[tuple[Tensor, int]] = []

    def there(self) -> torch.UntypedStorage:
        """The memory, once it is there for the ops to come."""
        if self.arrive is not None:
            self.arrive()
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.bytes.device)
            stream.wait_event(self.ready)
            # The ops are of another stream than the one that this memory was asked for on.
            self.bytes.record_stream(stream)
        return self.bytes.untyped_storage()


def check_unchanged(memories: Sequence[Memory], stage: int, microbatch: int) -> None:
    """PipelineError where what a microbatch has saved was changed in place since then.

    Autograd looks for that itself, but not where hooks have put something else in place of it.
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
    """The activations of one microbatch on one stage: what autograd saves in a forward that runs
    inside these hooks.

    The memory of the tensors in `stays`, weights and inputs, is not copied, since others hold it as
    well. On a GPU the copies run on `streams` of their own; a CPU copies within its own memory.
    """

    def __init__(
        self,
        device: torch.device,
        stays: Iterable[Tensor],
        streams: Streams | None,
    ) -> None:
        super().__init__(self._pack, self._unpack)
        self._device = device
        self._streams = streams
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        #: By address; tensors that are views of one another are copied once.
        self._memories: dict[int, Memory] = {}

    @property
    def memories(self) -> list[Memory]:
        """What was saved, until it is forgotten."""
        return [*self._memories.values()]

    def offload(self) -> None:
        """Begin the copies to the host; then the device's memory is free."""
        self._copy(torch.device("cpu"))

    def reload(self) -> None:
        """Begin the copies back; the backward waits for them."""
        self._copy(self._device)

    def forget(self) -> None:
        """Leave what was saved to the graph."""
        self._memories.clear()

    def _copy(self, to: torch.device) -> None:
        for memory in self._memories.values():
            memory.saved = []
        if self._streams is None:
            for memory in self._memories.values():
                memory.bytes = memory.bytes.clone()
            return
        goes_away = to.type == "cpu"
        stream = self._streams.to_host if goes_away else self._streams.to_device
        # The forward's kernels may still write what is to be copied.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for memory in self._memories.values():
                if memory.ready is not None:
                    # It may still be on its way to the host.
                    stream.wait_event(memory.ready)
                old = memory.bytes
                memory.bytes = torch.empty_like(old, device=to, pin_memory=goes_away)
                memory.bytes.copy_(old, non_blocking=True)
                memory.ready = stream.record_event()
                if old.is_cuda:
                    # So that its memory goes to nobody else before the copy is through.
                    old.record_stream(stream)

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
        # Without its graph, which holds this.
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
        return tensor.set_(
            packed.memory.there(), packed.offset, packed.size, packed.stride
        )


def of_stages(site: Site) -> Iterator[tuple[int, Offload]]:
    """Those of stages of which the plan offloads microbatches."""
    for stage, module in site.modules.items():
        microbatches = site.microbatches(stage, AWAY)
        if microbatches:
            yield stage, Offload(stage, module, site.device, microbatches)
