"""Inputs that a stage may change in place.

The input of a stage is a leaf, so that autograd computes its gradient, and autograd refuses to
change a leaf in place. In one process it is the output of an earlier layer, so the stage may well
begin with a `ReLU(inplace=True)`. Such a stage gets the output of a node that does nothing:

    leaf ──► entry ──► the stage changes this ──► …

So does a stage whose backward is split inside a `FlopCounterMode`: its hooks of the inputs of all
modules (`register_multi_grad_hook`) raise an error on a leaf if B asks only for gradients.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from schedlang.runtime.values import Value, flatten, unflatten


def changeable(value: Value) -> Value:
    """The value with the leaves that require a gradient replaced by outputs of a node."""
    tensors, tree = flatten(value, "the input")
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    if not leaves:
        return value
    entered = iter(_Entry.apply(*leaves))  # type: ignore[no-untyped-call]
    return unflatten([next(entered) if t.requires_grad else t for t in tensors], tree)


class _Entry(Function):
    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # A view could not be changed in place either.
        return tuple(leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients
