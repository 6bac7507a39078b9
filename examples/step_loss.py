"""A step of a pipeline as a loss, for trainers that call `backward` themselves: Lightning's, and
loops with accelerate.

    loss = step_loss(pipeline, inputs, targets)     runs all forwards and backwards of the plan
    optimizer.zero_grad()
    (loss / 2).backward()                           gives the weights the gradients, divided by 2
"""

from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import Pipeline


class _Made(torch.autograd.Function):
    """A loss whose backward gives weights the gradients that were made for them."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, made: list[Tensor | None], *weights: Tensor
    ) -> Tensor:
        ctx.made = made
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if each is None else each * factor for each in ctx.made)
        return (None, None, *scaled)


def step_loss(pipeline: Pipeline, *batch: Any, **options: Any) -> Tensor:
    """Make a step with a batch; gives the mean of its losses, on all ranks. The weights get its
    gradients in the backward of that mean, which adds them to those that they have.
    """
    weights = [each for each in pipeline.parameters() if each.requires_grad]
    earlier = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    pipeline.step(*batch, **options)
    made = [weight.grad for weight in weights]
    for weight, gradient in zip(weights, earlier, strict=True):
        weight.grad = gradient
    loss = torch.tensor(pipeline.named_losses()["loss"])
    mean: Tensor = _Made.apply(loss, made, *weights)  # type: ignore[no-untyped-call]
    return mean
