"""Private attributes of tensors: the base of a view, and the count of changes in place."""

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from schedlang.runtime.torch_private import instead, must, private


def _torchs_base() -> Callable[[Tensor], Tensor]:
    tensor = torch.zeros(2, device="cpu")
    must(private(tensor, "_base") is None and private(tensor[:1], "_base") is tensor)
    return lambda tensor: tensor if tensor._base is None else tensor._base


#: The tensor of which this one is a view, or itself.
base_of: Callable[[Tensor], Tensor] = instead(
    "Tensor._base",
    _torchs_base,
    lambda tensor: tensor,
    "B computes the gradients of weights that are read by way of a view",
)


def _torchs_changes() -> Callable[[Tensor], int]:
    changes = attrgetter("_version")
    tensor = torch.zeros(2, device="cpu")
    before = changes(tensor)
    tensor[0] = 1
    after = changes(tensor)
    must(changes(tensor) == after != before)
    # Torch does not count changes of tensors from `torch.inference_mode`, such as weights or
    # buffers.
    return lambda tensor: _content(tensor) if tensor.is_inference() else changes(tensor)


def _content(tensor: Tensor, /) -> int:
    """A hash of a tensor's bytes; of a sharded tensor, of this process's shard."""
    if tensor.is_meta:
        return 0
    local = local_part(tensor)
    dense = (
        local.detach() if local.layout == torch.strided else local.detach().to_dense()
    )
    return hash(bytes_of(dense))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process has; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def give_memory(tensor: Tensor, memory: Tensor) -> None:
    """Let a tensor have other memory, which does not count as a change in place; a sharded tensor,
    for the part that this process has.
    """
    if not hasattr(tensor, "to_local"):
        tensor.data = memory
        return
    # To set `data` of a sharded tensor leaves this part where it is.
    tensor._local_tensor = memory  # type: ignore[attr-defined]
    must(local_part(tensor).data_ptr() == memory.data_ptr())


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a dense tensor."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).numpy().tobytes())


#: A number that differs after each change of a tensor in place. Torch's notes on autograd call it
#: `_version`, and there is no public way to get it.
changes_of: Callable[[Tensor], int] = instead(
    "Tensor._version",
    _torchs_changes,
    _content,
    "all numbers of a tensor are compared to see whether it was changed in place",
)
