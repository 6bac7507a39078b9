"""Replicas of the pipeline, each with batches of its own (data parallelism): the gradients of a stage are summed.

That begins as soon as they are whole, and goes on while other stages work; where the plan updates the stage, before its
`U`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from schedlang.runtime.wire import InFlight, Wire


class ReplicaSum:
    """The sum, over all replicas, of the gradients that one stage has when it begins."""

    def __init__(self, trained: Callable[[], Sequence[Tensor]], wire: Wire) -> None:
        self._trained, self._wire = trained, wire
        self._gradients: list[Tensor] = []
        self._in_flight: InFlight = []

    def begin(self) -> None:
        """Begin it. Where a weight has no gradient in this replica, it may have one in others."""
        for each in self._trained():
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            self._gradients.append(each.grad)
        if self._gradients:
            # In one piece: a message for each would take longer.
            self._in_flight = self._wire.begin_sum(torch.cat([each.flatten() for each in self._gradients]))

    def end(self) -> None:
        """Wait for it; then the weights have it."""
        if not self._in_flight:
            return
        self._wire.end_sum(self._in_flight)
        ((_, total),) = self._in_flight
        parts = total.split_with_sizes([each.numel() for each in self._gradients])
        for gradient, part in zip(self._gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        self._gradients, self._in_flight = [], []
