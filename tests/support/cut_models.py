"""Models that `split` cuts, and their gradients in one process."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

LENGTH = 12
ROWS = 2
VOCABULARY = 64


def sequence() -> nn.Sequential:
    """Blocks of several kinds, with a normalisation that counts in its buffers."""
    torch.manual_seed(0)
    shapes = [(8, 32), (32, 8), (8, 8), (8, 64), (64, 8), (8, 8)]
    layers = [
        each
        for shape in shapes
        for each in (nn.Linear(*shape, dtype=torch.float64), nn.Tanh())
    ]
    return nn.Sequential(*layers, nn.LayerNorm(8, dtype=torch.float64))


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def alone(model: nn.Module, loss_fn: object, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of 8 microbatches in one process, and its gradient in the weights."""
    losses = []
    for x, y in zip(inputs.chunk(8), targets.chunk(8), strict=True):
        loss = loss_fn(model(x), y)
        (loss / 8).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def gradients(
    stages: dict[int, nn.Module], model: nn.Module
) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of the weights of a rank, with the whole model's of the same name."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    for stage in stages.values():
        for name, weight in stage.named_parameters():
            yield weight.grad, whole[name].grad
