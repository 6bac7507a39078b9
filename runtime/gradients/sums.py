"""Sums of gradients: over the copies of a weight, and over replicas of the pipeline (data
parallelism).

The sum of a stage over replicas of the pipeline begins as soon as its gradients are whole, and goes
on while other stages work; where the plan updates the stage, it is made before each `U`. What
several stages have is summed at the end of a step, or where the plan updates them, for each update
(`schedlang.runtime.gradients.updates`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.runtime.gradients.copies import Copies
from schedlang.runtime.stage.stage import Stage
from schedlang.runtime.transport.ranks import Ranks, Replicas
from schedlang.runtime.transport.wire import InFlight, Wire


class ReplicaSum:
    """The sum over some replicas of the gradients that weights have when it begins.

    `copies` gives the weights of all copies that this process has; the others are those of other
    processes, in a group.
    """

    def __init__(
        self, copies: Callable[[], Sequence[Sequence[Tensor]]], wire: Wire, replicas: Replicas
    ) -> None:
        self._copies = copies
        self._wire = wire
        self._replicas = replicas
        self._gradients: list[list[Tensor]] = []
        self._total: Tensor | None = None
        self._in_flight: InFlight = []

    def begin(self) -> None:
        """Begin it. Where a weight has no gradient in this replica, it may have one in others."""
        self._gradients = [[_gradient(each) for each in copy] for copy in self._copies()]
        if any(self._gradients):
            # In one piece: a message for each would take longer.
            self._total = _total(
                torch.cat([each.flatten() for each in copy]) for copy in self._gradients
            )
            self._in_flight = self._wire.begin_sum(self._total, self._replicas)

    def end(self) -> None:
        """Wait for it; then the weights have it."""
        if self._total is None:
            return
        self._wire.end_sum(self._in_flight, self._replicas)
        for copy in self._gradients:
            parts = self._total.split_with_sizes([each.numel() for each in copy])
            for gradient, part in zip(copy, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._gradients = []
        self._total = None
        self._in_flight = []


def replica_sums(
    stages: Mapping[int, Stage], copies: Sequence[Copies], ranks: Ranks, wire: Wire
) -> dict[int, ReplicaSum]:
    """For each stage of this rank the sum of its own weights, if there are replicas."""
    tied = {id(weight) for each in copies if each.are_tied for weight in each.parameters}

    def own(stage: Stage) -> list[list[Tensor]]:
        return [[each for each in stage.trained() if id(each) not in tied]]

    several = stages if ranks.replicas.are_several else {}
    return {
        number: ReplicaSum(partial(own, stage), wire, ranks.replicas)
        for number, stage in several.items()
    }


class Sums:
    """Sums the gradients of a step over all copies of a weight, and adds them to those of earlier
    steps.
    """

    def __init__(self, copies: Sequence[Copies], ranks: Ranks, wire: Wire) -> None:
        self._wire = wire
        self._rank = ranks.own
        self._shared = [each for each in copies if each.are_shared]
        has_replicas = ranks.replicas.are_several
        self._parameters = [
            weight
            for each in (copies if has_replicas else self._shared)
            for weight in each.parameters
        ]
        tied = [
            weight
            for each in copies
            if each.are_tied
            for weight in each.parameters
            if weight.requires_grad
        ]
        #: Of tied weights, which are whole when all of their stages are through.
        self._over_replicas = (
            ReplicaSum(lambda: [tied], wire, ranks.replicas) if has_replicas else None
        )
        self._earlier: list[Tensor | None] = []

    def begin(self) -> None:
        """Begin a step: the gradients of earlier ones are summed already."""
        self._earlier = [each.grad for each in self._parameters]
        for each in self._parameters:
            each.grad = None

    def end(self) -> None:
        """End a step."""
        if self._over_replicas is not None:
            self._over_replicas.begin()
            self._over_replicas.end()
        self._over_copies()
        for each, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                each.grad = earlier if each.grad is None else earlier + each.grad
        self._earlier = []

    def _over_copies(self) -> None:
        """In the order of the ranks: all copies get the same, to the bit."""
        trained = [
            [same for same in each.weights if same[0].requires_grad] for each in self._shared
        ]
        own = [[_total(map(_part, same)).contiguous() for same in each] for each in trained]
        found = [
            {
                rank: gradients
                if rank == self._rank
                else [torch.empty_like(each) for each in gradients]
                for rank in copies.ranks
            }
            for copies, gradients in zip(self._shared, own, strict=True)
        ]
        self._wire.exchange(
            [
                self._wire.operation(call, tensor, rank)
                for parts, gradients in zip(found, own, strict=True)
                for rank in parts
                if rank != self._rank
                for call, tensors in ((dist.isend, gradients), (dist.irecv, parts[rank]))
                for tensor in tensors
            ]
        )
        for weights, parts in zip(trained, found, strict=True):
            _put(weights, [_total(same) for same in zip(*parts.values(), strict=True)])


def _put(weights: Sequence[tuple[nn.Parameter, ...]], totals: Sequence[Tensor]) -> None:
    for same, total in zip(weights, totals, strict=True):
        for each in same:
            _part(each).copy_(total)


def _gradient(weight: Tensor) -> Tensor:
    """The gradient of a weight, zeros where nothing depended on it."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _part(weight: Tensor) -> Tensor:
    """The gradient of a weight; where the weight is sharded, this process's part, which is that of
    the same place.
    """
    gradient = _gradient(weight)
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _total(tensors: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)
