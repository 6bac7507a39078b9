"""Messages with fewer bits: tensors that are sent as bfloat16 or float16.

The smallest float16 is 6e-8, and gradients are often smaller. So a tensor is scaled by the largest
power of two at which its values fit, and the exponent is sent with it. WPipe's messages do the same
(Yang et al. 2022, "Group-based interleaved pipeline parallelism", figure 12).
"""

from math import log2
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from schedlang.plan.plan import Plan
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

    def sent(self, tensor: Tensor) -> Tensor:
        """The tensor as it arrives at another rank; its gradient is rounded, too, as it comes back.
        For one process that trains as ranks do.
        """
        arrived: Tensor = _Sent.apply(tensor, self)  # type: ignore[no-untyped-call]
        return arrived

    def _rounds(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() > self.type.itemsize


class _Sent(torch.autograd.Function):
    """A message to another rank, and the message with its gradient that comes back."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, rounding: Rounding) -> Tensor:
        context.rounding = rounding
        return rounding.unpack(rounding.pack(tensor), tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        rounding = context.rounding
        return rounding.unpack(rounding.pack(gradient), gradient), None


#: The types that a program may name.
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rounding_of(plan: Plan, type: torch.dtype | None) -> Rounding:
    """The rounding of messages to the type that a plan's program names, or that a script gives.
    PipelineError for a type that messages cannot have, and for another one than the program's.
    """
    named = _TYPES.get(plan.message_type)
    if type is not None and type not in _TYPES.values():
        raise PipelineError(
            f"`transfer_dtype` is {type}, it must be torch.bfloat16 or torch.float16"
        )
    if named is not None and type not in (None, named):
        raise PipelineError(
            f"`transfer_dtype` is {type}, and the plan says `send {plan.message_type}`: leave "
            "`transfer_dtype` out"
        )
    chosen = named or type
    assert chosen is not None
    return Rounding(chosen)
