"""Layers whose matrix products take numbers of 8 bits, as those of torchao and Transformer Engine.

Each tensor is scaled so that its largest number fits into 8 bits. The scale is computed from the
tensor itself (dynamic), or from the largest numbers of the last microbatches (delayed), which the
layer keeps from forward to forward, and of gradients from backward to backward.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.model import WIDTH, Does, Model, chain, feature, weight

#: The types of activations and weights, and of gradients.
FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2

#: The number of microbatches whose largest numbers are kept.
HISTORY = 3


def rounded(tensor: Tensor, type: torch.dtype, largest: Tensor) -> Tensor:
    """The tensor, rounded to 8 bits at a scale where `largest` fits; larger numbers are cut off."""
    limit = torch.finfo(type).max
    scale = limit / largest.clamp(min=1e-12)
    return (tensor * scale).clamp(-limit, limit).to(type).to(tensor.dtype) / scale


def noted(history: Tensor, tensor: Tensor) -> Tensor:
    """The largest number that the history has; then note that of the tensor in it."""
    largest = history.max()
    history.copy_(torch.cat([tensor.detach().abs().max()[None], history[:-1]]))
    return largest


class Product(torch.autograd.Function):
    """A matrix product of 8 bits, forward and back. `history` is that of its gradients, if they are
    scaled by earlier ones.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, largest: Tensor, history: Tensor | None
    ) -> Tensor:
        x = rounded(x, FORWARD, largest)
        weight = rounded(weight, FORWARD, weight.abs().max())
        ctx.save_for_backward(x, weight)
        ctx.history = history
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        largest = gradient.abs().max()
        if ctx.history is not None:
            largest = noted(ctx.history, gradient)
        gradient = rounded(gradient, BACKWARD, largest)
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return gradient @ weight, of_weight, None, None


def layer(forward: Any, **buffers: Tensor) -> nn.Module:
    return Does(forward, weight=weight(WIDTH, WIDTH), **buffers)


@feature("float8")
def float8_dynamic(stages: int) -> Model:
    """Products in float8, each tensor scaled by its own largest number"""

    def product(self: Any, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, x.abs().max(), None).tanh()

    return chain(lambda _: layer(product), stages)


@feature("float8")
def float8_delayed(stages: int) -> Model:
    """Products in float8, scaled by the largest numbers of the last microbatches, in two buffers"""

    def product(self: Any, x: Tensor) -> Tensor:
        largest = noted(self.inputs, x)
        return Product.apply(x, self.weight, largest, self.gradients).tanh()

    return chain(
        lambda _: layer(
            product, inputs=torch.ones(HISTORY), gradients=torch.full((HISTORY,), 0.1)
        ),
        stages,
    )


@feature("float8")
def float8_delayed_gradients(stages: int) -> Model:
    """Products in float8, whose gradients alone are scaled by those of the last microbatches"""

    def product(self: Any, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, x.abs().max(), self.gradients).tanh()

    return chain(
        lambda _: layer(product, gradients=torch.full((HISTORY,), 0.1)), stages
    )


@feature("float8")
def float8_delayed_in_one_buffer(stages: int) -> Model:
    """Products in float8, with one buffer for the largest numbers of inputs and of gradients"""

    def product(self: Any, x: Tensor) -> Tensor:
        inputs, gradients = self.histories
        largest = noted(inputs, x)
        return Product.apply(x, self.weight, largest, gradients).tanh()

    return chain(
        lambda _: layer(product, histories=torch.full((2, HISTORY), 0.5)), stages
    )


@feature("float8")
def float8_delayed_in_an_attribute(stages: int) -> Model:
    """Products in float8, with the largest numbers in attributes that are no buffers"""

    def product(self: Any, x: Tensor) -> Tensor:
        inputs, gradients = self.histories
        largest = noted(inputs, x)
        return Product.apply(x, self.weight, largest, gradients).tanh()

    def stage(_: int) -> nn.Module:
        # In a tuple, a tensor is no buffer.
        return layer(product, histories=(torch.ones(HISTORY), torch.ones(HISTORY)))

    return chain(stage, stages)
