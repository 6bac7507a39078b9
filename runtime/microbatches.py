"""Batches that a script has cut itself: a list has a value for each microbatch."""

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from schedlang.runtime.values import Value

#: How many rows or tokens the loss of each microbatch is the mean of; of several models, by name.
Counts = Sequence[float] | Mapping[str, Sequence[float]]


@frozen(eq=False)
class Microbatches:
    """Inputs or targets that were cut before: a value for each microbatch, which counts as a row.
    Targets may be anything that the loss takes.
    """

    values: Sequence[Value]


def as_microbatches(batch: Value) -> Value:
    """A list is one of microbatches; all else is a batch."""
    return Microbatches(batch) if isinstance(batch, list) else batch


def weighted(losses: Tensor, shares: Sequence[float]) -> Tensor:
    """Losses, each times its share."""
    # Numbers go to a GPU with its kernels. For a copy of a tensor of them the host would wait.
    return torch.stack(
        [loss * share for loss, share in zip(losses, shares, strict=True)]
    )
