"""Weights of which there are copies: in replicas of the pipeline, or of a stage where two pipelines share the ranks.

All copies begin alike. The gradients of those in one pipeline are summed at the end of a step; before that,
`schedlang.runtime.replicas` sums them over the replicas of the pipeline.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from schedlang.plan import Plan
from schedlang.runtime.ranks import Ranks
from schedlang.runtime.watchdog import PipelineError, Watchdog
from schedlang.runtime.wire import Wire


@frozen(eq=False)
class Weights:
    """Some weights: for each the parameters of this rank that are its copies; and the ranks of the plan with copies."""

    name: str
    copies: list[tuple[nn.Parameter, ...]]
    ranks: list[int]

    @property
    def are_shared(self) -> bool:
        """Whether there are several copies in one pipeline."""
        return len(self.ranks) > 1 or any(len(same) > 1 for same in self.copies)

    @property
    def trained(self) -> list[tuple[nn.Parameter, ...]]:
        """The copies of those that have gradients."""
        return [same for same in self.copies if same[0].requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All copies of this rank."""
        return [each for same in self.copies for each in same]

    def gradients(self) -> list[Tensor]:
        """The gradients of this step, summed over this rank's copies."""
        return [
            _total(torch.zeros_like(each) if each.grad is None else each.grad for each in same).contiguous()
            for same in self.trained
        ]

    def put(self, totals: list[Tensor]) -> None:
        """Give all copies the sums."""
        for same, total in zip(self.trained, totals, strict=True):
            for each in same:
                each.grad = total.clone()

    def looks(self) -> list[list[object]]:
        """What all copies have alike, for each of this rank's: their shapes, and the sums of their bits."""
        copies = zip(*self.copies, strict=True)
        return [[[list(each.shape), _bits(each)] for each in copy] for copy in copies]


def find_copies(plan: Plan, rank: int, modules: Mapping[int, nn.Module]) -> list[Weights]:
    """The weights of the stages of a rank, by the pieces of the model that these are replicas of."""
    pipelines, found = plan.layout.pipelines, []
    for number in range(plan.layout.pieces):
        stages = [pipeline.start + number for pipeline in pipelines]
        # A rank that has two replicas may have them in one module.
        mine = {id(modules[stage]): list(modules[stage].parameters()) for stage in stages if stage in modules}
        if len({len(each) for each in mine.values()}) > 1:
            raise PipelineError(f"the replicas of stage {number} on rank {rank} have different weights")
        if mine:
            ranks = sorted({plan.placement[stage] for stage in stages})
            found.append(Weights(f"stage {number}", list(zip(*mine.values(), strict=True)), ranks))
    return found


def check_copies(weights: Sequence[Weights], ranks: Ranks, watchdog: Watchdog) -> None:
    """Compare all copies of weights, on all ranks; PipelineError if some are not alike."""
    several = [each for each in weights if each.are_shared or len(ranks.replicas) > 1]
    found = watchdog.gather(json.dumps({each.name: each.looks() for each in several}), "compared no weights")
    first: dict[str, tuple[int, object]] = {}
    for rank, theirs in found.items():
        for name, look in ((name, look) for name, looks in json.loads(theirs).items() for look in looks):
            other, expected = first.setdefault(name, (rank, look))
            if look != expected:
                where = " and on ".join(dict.fromkeys([ranks.name(other), ranks.name(rank)]))
                raise PipelineError(f"the replicas of {name} on {where} differ: they must begin with the same weights")


class Sums:
    """Sums the gradients of a step over all copies of a weight, and adds them to those of earlier steps."""

    def __init__(self, weights: Sequence[Weights], ranks: Ranks, wire: Wire) -> None:
        self._wire, self._rank = wire, ranks.own
        self._shared = [each for each in weights if each.are_shared]
        summed = weights if len(ranks.replicas) > 1 else self._shared
        self._parameters = [weight for each in summed for weight in each.parameters]
        self._earlier: list[Tensor | None] = []

    def begin(self) -> None:
        """Begin a step: the gradients of earlier ones are summed already."""
        self._earlier = [each.grad for each in self._parameters]
        for each in self._parameters:
            each.grad = None

    def end(self) -> None:
        """End a step, in the order of the ranks: all copies get the same, to the bit."""
        self._sum()
        for each, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                each.grad = earlier if each.grad is None else earlier + each.grad
        self._earlier = []

    def _sum(self) -> None:
        own = [each.gradients() for each in self._shared]
        found = [
            {rank: gradients if rank == self._rank else [torch.empty_like(each) for each in gradients]
             for rank in weights.ranks}
            for weights, gradients in zip(self._shared, own, strict=True)
        ]  # fmt: skip
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
        for weights, parts in zip(self._shared, found, strict=True):
            weights.put([_total(same) for same in zip(*parts.values(), strict=True)])


def _total(tensors: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)


def _bits(tensor: Tensor) -> int:
    """The sum of its bits, as integers: another order of additions does not change it."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().reshape(-1).view(whole).sum(dtype=torch.int64))
