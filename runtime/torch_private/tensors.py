"""What a tensor knows about itself."""

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from schedlang.runtime.torch_private import instead, must, private


def _torchs_base() -> Callable[[Tensor], Tensor]:
    tensor = torch.zeros(2, device="cpu")
    must(private(tensor, "_base") is None and private(tensor[:1], "_base") is tensor)
    return lambda tensor: tensor if tensor._base is None else tensor._base


#: The tensor that this one is a view of, or itself; torch only prints it.
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
    # Of what `torch.inference_mode` has made, a weight or a buffer, torch does not count changes.
    return lambda tensor: _content(tensor) if tensor.is_inference() else changes(tensor)


def _content(tensor: Tensor, /) -> int:
    """A number that follows from a tensor's bytes; where it is sharded, from those of this
    process's shard.
    """
    if tensor.is_meta:
        return 0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense = (
        local.detach() if local.layout == torch.strided else local.detach().to_dense()
    )
    return hash(bytes_of(dense))


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a dense tensor."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).numpy().tobytes())


#: How often a tensor has been changed in place; torch's notes on autograd name it `_version`, and
#: have no other way to ask. Any number will do that is another one after a change.
changes_of: Callable[[Tensor], int] = instead(
    "Tensor._version",
    _torchs_changes,
    _content,
    "all numbers of a tensor are compared to see whether it was changed in place",
)
