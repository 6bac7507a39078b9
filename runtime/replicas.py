"""Several pipelines over the same ranks have replicas of stages: their gradients are summed at the end of a step."""

from collections.abc import Iterable, Mapping
from functools import reduce

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor, nn

from schedlang.plan import Plan
from schedlang.runtime.watchdog import PipelineError
from schedlang.runtime.wire import Wire


@define(eq=False)
class _Piece:
    """A piece of the model: the modules of this rank that are replicas of it, and the other ranks that have some."""

    number: int
    modules: list[nn.Module]
    others: list[int]
    _kept: list[Tensor | None] = field(factory=list)

    def weights(self) -> list[tuple[nn.Parameter, ...]]:
        """For each weight, the parameters of this rank that are replicas of it."""
        parameters = ([each for each in module.parameters() if each.requires_grad] for module in self.modules)
        return list(zip(*parameters, strict=True))

    def set_aside(self) -> None:
        """Take away the gradients of earlier steps, which are summed already."""
        self._kept = [same[0].grad for same in self.weights()]
        for each in (each for same in self.weights() for each in same):
            each.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients of this step, summed over this rank's replicas."""
        return [
            _total(torch.zeros_like(each) if each.grad is None else each.grad for each in same).contiguous()
            for same in self.weights()
        ]

    def put(self, totals: list[Tensor]) -> None:
        """Add the sums over all replicas to the gradients of earlier steps."""
        for same, total, kept in zip(self.weights(), totals, self._kept, strict=True):
            for each in same:
                each.grad = total.clone() if kept is None else kept + total
        self._kept = []

    def looks(self) -> list[list[tuple[str, torch.Size, float]]]:
        """What all replicas must have alike, for each of this rank's: names, shapes and sums of the weights."""
        return [
            [(name, each.shape, float(each.detach().double().sum())) for name, each in module.named_parameters()]
            for module in self.modules
        ]


class Replicas:
    """The stages of this rank that have replicas; PipelineError if these are not alike."""

    def __init__(self, plan: Plan, modules: Mapping[int, nn.Module], wire: Wire) -> None:
        self._wire, self._rank, self._pieces = wire, dist.get_rank(), list[_Piece]()
        pipelines = plan.layout.pipelines
        for number in range(plan.layout.pieces if len(pipelines) > 1 else 0):
            stages = [pipeline.start + number for pipeline in pipelines]
            # A rank that has two replicas may have them in one module.
            mine = {id(modules[stage]): modules[stage] for stage in stages if stage in modules}
            others = {plan.placement[stage] for stage in stages} - {self._rank}
            if mine and (others or len(mine) > 1):
                self._pieces.append(_Piece(number, list(mine.values()), sorted(others)))
        self._compare()

    def _compare(self) -> None:
        """Compare the weights with those of the other ranks."""
        tag = 1
        sent = [(self._wire.send_object(piece.looks()[0], other, tag), other)
                for piece in self._pieces for other in piece.others]  # fmt: skip
        for piece in self._pieces:
            first, *rest = piece.looks()
            if any(each != first for each in rest):
                raise PipelineError(f"the replicas of stage {piece.number} differ on this rank")
            for other in piece.others:
                if self._wire.receive_object(other, tag) != first:
                    raise PipelineError(f"the replicas of stage {piece.number} differ from those on rank {other}: "
                                        "they must begin with the same weights")  # fmt: skip
        for in_flight, other in sent:
            self._wire.wait(in_flight, other)

    def begin(self) -> None:
        """Begin a step."""
        for piece in self._pieces:
            piece.set_aside()

    def end(self) -> None:
        """Sum the gradients of the step, in the order of the ranks: all replicas get the same, to the bit."""
        own = {piece.number: piece.gradients() for piece in self._pieces}
        found = {(piece.number, other): [torch.empty_like(each) for each in own[piece.number]]
                 for piece in self._pieces for other in piece.others}  # fmt: skip
        operations = [
            dist.P2POp(call, tensor, other)
            for (number, other), buffers in found.items()
            for call, tensors in ((dist.isend, own[number]), (dist.irecv, buffers))
            for tensor in tensors
        ]
        if operations:
            self._wire.wait(self._wire.as_one(operations), operations[-1].peer)
        for piece in self._pieces:
            found[piece.number, self._rank] = own[piece.number]
            parts = (found[piece.number, rank] for rank in sorted({*piece.others, self._rank}))
            piece.put([_total(same) for same in zip(*parts, strict=True)])


def _total(tensors: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)
