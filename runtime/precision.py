"""Messages with fewer bits: tensors that are sent as bfloat16 or float16.

The smallest float16 is 6e-8, and gradients are often smaller. So a tensor is scaled by the largest
power of two at which its values fit, and the exponent is sent with it. WPipe's messages do the same
(Yang et al. 2022, "Group-based interleaved pipeline parallelism", figure 12).
"""

from math import log2

import torch
from attrs import frozen
from torch import Tensor

from schedlang.runtime.errors import PipelineError

#: The exponent of the power of two below which values are scaled: float16 ends at 65504.
_LARGEST = 15


@frozen
class Rounding:
    """Rounds floating-point tensors with more than 16 bits to a type of 16 bits."""

    type: torch.dtype

    def pack(self, tensor: Tensor) -> Tensor:
        """The contiguous tensor that is sent in place of this one."""
        if not self._rounds(tensor):
            return tensor.contiguous()
        if self.type == torch.bfloat16:
            return tensor.to(self.type).contiguous()
        largest = tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())
        # For tiny values, the power of two might exceed the range of the tensor's type.
        limit = int(-log2(torch.finfo(tensor.dtype).tiny))
        exponent = (
            (_LARGEST - largest.frexp().exponent).clamp(-limit, limit).to(tensor.dtype)
        )
        return torch.cat([(tensor * exponent.exp2()).flatten(), exponent.view(1)]).to(
            self.type
        )

    def room(self, model: Tensor) -> Tensor:
        """A tensor with the shape and type of the one that is sent in place of the model."""
        if not self._rounds(model):
            return model
        shape = model.shape if self.type == torch.bfloat16 else (model.numel() + 1,)
        return torch.empty((), dtype=self.type).expand(shape)

    def unpack(self, packed: Tensor, model: Tensor) -> Tensor:
        """Restore the tensor, with the shape and type of the model, from the one that was sent."""
        if not self._rounds(model):
            return packed
        found = packed.to(model.dtype)
        return (
            found
            if self.type == torch.bfloat16
            else found[:-1].view(model.shape) * (-found[-1]).exp2()
        )

    def _rounds(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() > self.type.itemsize


def rounding_to(type: torch.dtype) -> Rounding:
    """The rounding to a type; PipelineError for a type that messages cannot have."""
    if type not in (torch.bfloat16, torch.float16):
        raise PipelineError(
            f"`transfer_dtype` is {type}, it must be torch.bfloat16 or torch.float16"
        )
    return Rounding(type)
