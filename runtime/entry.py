"""Inputs that a stage may change in place.

What comes into a stage is a leaf, so that its gradient can be asked for, and autograd lets nothing
change a leaf in place. Alone, the value came from a layer before, and the first layer of the stage
may well be a `ReLU(inplace=True)`. So such a stage is given the output of a node that does nothing:

    leaf ──► entry ──► the stage changes this ──► …

So is one whose backward is split inside of a `FlopCounterMode`, whose hooks of the inputs of all
modules (`register_multi_grad_hook`) raise an error on a leaf, where B asks for gradients alone.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from schedlang.runtime.values import Value, flatten, unflatten


def works_in_place(module: nn.Module) -> bool:
    """Whether any part of a module says that it works in place."""
    return any(getattr(part, "inplace", False) is True for part in module.modules())


def changeable(value: Value) -> Value:
    """A value, of whose tensors those that want a gradient are no leaves."""
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
        # A view would be no better than the leaf.
        return tuple(leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients
