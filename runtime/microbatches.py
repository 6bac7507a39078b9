"""Batches that a script has already cut into microbatches, in a list."""

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from schedlang.runtime.values import Value

#: The number of rows or tokens over which the loss of each microbatch is the mean; by the model's
#: name if there are several models.
Counts = Sequence[float] | Mapping[str, Sequence[float]]


@frozen(eq=False)
class Microbatches:
    """Inputs or targets that are already cut: a value for each microbatch, which counts as one row.
    Targets may be of any type that the loss takes.
    """

    values: Sequence[Value]


def as_microbatches(batch: Value) -> Value:
    """Mark a list as one of microbatches; any other value is a whole batch."""
    return Microbatches(batch) if isinstance(batch, list) else batch


def weighted(losses: Tensor, shares: Sequence[float]) -> Tensor:
    """Multiply each loss by its share."""
    # Python numbers go to a GPU as arguments of kernels; to copy a tensor of them, the host would
    # wait.
    return torch.stack(
        [loss * share for loss, share in zip(losses, shares, strict=True)]
    )
