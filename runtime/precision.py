"""Messages of fewer bits: tensors that are rounded to bfloat16 or float16 on their way.

The smallest float16 is 6e-8, and gradients are often smaller. So a tensor is multiplied by the
power of two at which its largest number fits, and the exponent goes along as one number more;
WPipe's messages do the same (Yang et al. 2022, "Group-based interleaved pipeline parallelism",
figure 12).
"""

from math import log2

import torch
from attrs import frozen
from torch import Tensor

from schedlang.runtime.errors import PipelineError

#: The exponent of the power of two under which the largest number is brought: float16 ends at
#: 65504.
_LARGEST = 15


@frozen
class Rounding:
    """Rounds tensors of floating point numbers of more bits to a type of 16 bits; leaves all others
    as they are.
    """

    type: torch.dtype

    def pack(self, tensor: Tensor) -> Tensor:
        """What is sent instead of a tensor, contiguous."""
        if not self._rounds(tensor):
            return tensor.contiguous()
        if self.type == torch.bfloat16:
            return tensor.to(self.type).contiguous()
        largest = tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())
        # Where the largest number is tiny, the power of two might be none of the tensor's own type.
        limit = int(-log2(torch.finfo(tensor.dtype).tiny))
        exponent = (
            (_LARGEST - largest.frexp().exponent).clamp(-limit, limit).to(tensor.dtype)
        )
        return torch.cat([(tensor * exponent.exp2()).flatten(), exponent.view(1)]).to(
            self.type
        )

    def room(self, model: Tensor) -> Tensor:
        """A tensor of the shape and type of what is sent instead of the model."""
        if not self._rounds(model):
            return model
        shape = model.shape if self.type == torch.bfloat16 else (model.numel() + 1,)
        return torch.empty((), dtype=self.type).expand(shape)

    def unpack(self, packed: Tensor, model: Tensor) -> Tensor:
        """The tensor, of the shape and type of the model, from what was sent instead."""
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
