"""Sums of gradients: over the stages and replicas that share a weight, and over replicas of the
pipeline (data parallelism).

The all-reduce of a stage's gradients over replicas of the pipeline begins as soon as they are
complete, and runs while other stages compute:

    rank 1   … B of the stage │ begin ─ ─ ─ other ops ─ ─ ─ end of the step │ end
    replica  … B of the stage     │ begin ─ ─ ─ other ops ─ ─ ─ │ end

If the plan updates the stage, the sum is complete before each `U`. Weights that several stages
share are summed at the end of a step, or if the plan updates them, for each update
(`schedlang.runtime.parts.updates`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime.door import Rank
from schedlang.runtime.part import ExtraCall, Part, When
from schedlang.runtime.processes import Replicas
from schedlang.runtime.shared_weights import (
    SharedWeights,
    add_gradient,
    gradient_of,
    ids_of_tied,
    put_gradient,
    type_of_gradient,
)
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.tensors import local_part
from schedlang.runtime.wire import InFlight, Wire
from schedlang.schedule.kinds import MAKERS, STEPS, Kind, kinds_of
from schedlang.schedule.transports import NCCL

#: The kinds of ops in a plan that sum gradients.
SUMS = kinds_of(lambda op: op.gradients == "sum")


class ReplicaSum:
    """The sum of some weights' gradients over replicas.

    `copies` returns the weights: one list for each replica in this process. Other replicas are in
    other processes of a group.
    """

    def __init__(
        self,
        copies: Callable[[], Sequence[Sequence[Tensor]]],
        wire: Wire,
        replicas: Replicas,
    ) -> None:
        self._copies = copies
        self._wire = wire
        self._replicas = replicas
        self._weights: list[list[Tensor]] = []
        self._total: Tensor | None = None
        self._in_flight: InFlight = []

    def begin(self) -> None:
        """Begin the sum. It also counts the replicas in which each weight has a gradient, since a
        weight without one here may have one elsewhere.
        """
        # The flat tensor for three weights, the second of which has no gradient in this replica:
        #
        # g0 g0 g0 g0 │ 0 0 │ g2 g2 g2 │ 1 0 1      all gradients, then one count for each weight
        #
        # If a count sums up to 0, no replica has a gradient. The weight then gets none instead of
        # zeros, since an optimizer applies weight decay for a gradient of zeros.
        self._weights = [list(copy) for copy in self._copies()]
        if any(self._weights):
            # One flat tensor, since a message for each weight would take longer.
            self._total = _total(map(_in_one_piece, self._weights))
            self._in_flight = self._wire.begin_sum(self._total, self._replicas)

    def end(self) -> None:
        """Wait for the sum, and set it as the gradient of all copies of a weight; without a
        gradient in any replica, a weight gets none.
        """
        if self._total is None:
            return
        self._wire.end_sum(self._in_flight, self._replicas)
        for copy in self._weights:
            sizes = [local_part(weight).numel() for weight in copy]
            *parts, counts = self._total.split_with_sizes([*sizes, len(sizes)])
            have = _have_gradients([(weight,) for weight in copy], counts)
            for weight, part, has_gradient in zip(copy, parts, have, strict=True):
                if has_gradient:
                    put_gradient(weight, part.view(local_part(weight).shape))
        self._weights = []
        self._total = None
        self._in_flight = []


class StageSum(Part):
    """The sum of a stage's gradients over replicas of the pipeline, without those of tied weights.

    All replicas of a rank begin their sums in the same order.
    """

    def __init__(
        self, stage: Stage, shared: Sequence[SharedWeights], wire: Wire
    ) -> None:
        self._stage = stage
        self._tied = ids_of_tied(shared)
        self._sum = ReplicaSum(self._own, wire, wire.processes.replicas)

    def _own(self) -> list[list[nn.Parameter]]:
        weights = _trained(self._stage.module.parameters())
        return [[weight for weight in weights if id(weight) not in self._tied]]

    def calls(self, plan: Plan, rank: int) -> Iterator[ExtraCall]:
        """Begin the sum after the last backward, or where the plan says so, and end it at the end
        of the step. If the plan updates the stage, end it right before the update.
        """
        actions = plan.ranks[rank]
        own = [
            index
            for index, stage in enumerate(actions.stage)
            if stage == self._stage.number
        ]
        updates = [index for index in own if actions.kind[index] in STEPS]
        # If the plan has several sums for an update, the last one has all of its gradients.
        written = [index for index in own if actions.kind[index] in SUMS]
        backwards = [index for index in own if actions.kind[index] in MAKERS[Kind.W]]
        for index in updates:
            begins = max((each for each in written if each < index), default=index)
            yield ExtraCall(begins, When.BEFORE, self._stage.begin_update)
            yield ExtraCall(begins, When.BEFORE, self._sum.begin)
            yield ExtraCall(index, When.BEFORE, self._sum.end)
        if backwards and not updates:
            begins = max(written, default=backwards[-1])
            yield ExtraCall(begins, When.AFTER, self._sum.begin)
            yield ExtraCall(len(actions), When.AFTER, self._sum.end)


class SharedSums(Part):
    """The sums of the gradients of shared weights at the end of a step; they are added to those of
    earlier steps.
    """

    def __init__(self, shared: Sequence[SharedWeights], wire: Wire) -> None:
        self._wire = wire
        self._rank = wire.processes.own
        # The gradients of weights that hop are summed on their way home.
        self._shared = [
            each for each in shared if each.are_shared and each.home is None
        ]
        replicas = wire.processes.replicas
        summed = shared if replicas.are_several else self._shared
        self._parameters = [weight for each in summed for weight in each.parameters]
        #: The sum of tied weights, whose gradients are complete after all of their stages.
        self._over_replicas: ReplicaSum | None = None
        if replicas.are_several:
            tied = _trained(
                weight for each in shared if each.are_tied for weight in each.parameters
            )
            self._over_replicas = ReplicaSum(lambda: [tied], wire, replicas)
        self._earlier: list[Tensor | None] = []

    def begin_step(self) -> None:
        """Set the gradients of earlier steps aside, which are sums already."""
        # To sum them again would multiply them by the number of copies.
        self._earlier = [weight.grad for weight in self._parameters]
        for weight in self._parameters:
            weight.grad = None

    def end_step(self) -> None:
        """Sum the gradients of this step, and add those of earlier ones."""
        if self._over_replicas is not None:
            self._over_replicas.begin()
            self._over_replicas.end()
        self._sum_in_pipeline()
        for weight, earlier in zip(self._parameters, self._earlier, strict=True):
            if weight.grad is None:
                weight.grad = earlier
            else:
                weight.grad = add_gradient(earlier, weight.grad)
        self._earlier = []

    def _sum_in_pipeline(self) -> None:
        """Every rank sends its gradients to all other ranks that share the weights, and adds them
        up in the order of ranks: so all have the same sum, to the bit.
        """
        # Each set of weights belongs to other ranks, so no single collective could sum all of them.
        # Instead all gradients go in one exchange of messages, in batches that NCCL can take:
        #
        #     by_rank    weights of ranks 0, 1    weights of ranks 0, 1, 3      on rank 1
        #     from 0     received                 received
        #     from 1     own                      own, and sent to 0 and 3
        #     from 3                              received
        trained = [
            [same for same in each.weights if same[0].requires_grad]
            for each in self._shared
        ]
        own = [
            [
                *(_total(map(_gradient, same)).contiguous() for same in weights),
                _counts(weights),
            ]
            for weights in trained
        ]
        by_rank = [
            {
                rank: gradients
                if rank == self._rank
                else [torch.empty_like(gradient) for gradient in gradients]
                for rank in shared.ranks
            }
            for shared, gradients in zip(self._shared, own, strict=True)
        ]
        self._wire.exchange(
            [batch for parts in by_rank for batch in self._batches(parts)]
        )
        for weights, parts in zip(trained, by_rank, strict=True):
            *totals, counts = (
                _total(same) for same in zip(*parts.values(), strict=True)
            )
            have = _have_gradients(weights, counts)
            for copies, total, has_gradient in zip(weights, totals, have, strict=True):
                for weight in copies if has_gradient else ():
                    put_gradient(weight, total)

    def _batches(self, parts: Mapping[int, list[Tensor]]) -> Iterator[list[dist.P2POp]]:
        """Send the own tensors to all other ranks and receive theirs, in batches. They are the same
        on all of these ranks, and sets of weights come in one order: so batches meet.
        """
        own = parts[self._rank]
        peers = [rank for rank in parts if rank != self._rank]
        step = max(int(NCCL.most) // max(2 * len(peers), 1), 1)
        for begin in range(0, len(own), step):
            some = slice(begin, begin + step)
            yield [
                self._wire.operation(call, tensor, peer)
                for peer in peers
                for call, tensors in ((dist.isend, own), (dist.irecv, parts[peer]))
                for tensor in tensors[some]
            ]


def _trained(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [weight for weight in weights if weight.requires_grad]


def _in_one_piece(weights: Sequence[Tensor]) -> Tensor:
    """The gradients of some weights as a flat tensor, and for each weight 1 if it has one, or 0."""
    return torch.cat(
        [
            *(_gradient(weight).flatten() for weight in weights),
            _counts([(weight,) for weight in weights]),
        ]
    )


def _counts(weights: Sequence[Sequence[Tensor]]) -> Tensor:
    """For each weight, the number of its copies that have a gradient."""
    counts = [sum(copy.grad is not None for copy in copies) for copies in weights]
    like = weights[0][0] if weights else torch.empty(0)
    numbers = torch.tensor(counts, dtype=like.dtype)
    if like.is_cuda:
        # The host does not wait for the GPU.
        numbers = numbers.pin_memory()
    return numbers.to(like.device, non_blocking=True)


def _have_gradients(weights: Sequence[Sequence[Tensor]], counts: Tensor) -> list[bool]:
    """For each weight, whether any copy in any process has a gradient; `counts` are the numbers of
    these copies.
    """
    own = [any(copy.grad is not None for copy in copies) for copies in weights]
    # Reading values from a GPU synchronises, so the counts are read only if they matter.
    return own if all(own) else [count > 0 for count in counts.tolist()]


def _gradient(weight: Tensor) -> Tensor:
    """The gradient of a weight, or zeros without one. If the weight is sharded, it is this
    process's shard, which has the same rows in all processes that share it.
    """
    gradient = gradient_of(weight)
    if gradient is None:
        return torch.zeros_like(local_part(weight), dtype=type_of_gradient(weight))
    return gradient.to_dense() if gradient.is_sparse else local_part(gradient)


def _total(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of some tensors, in order; 16-bit numbers are added in 32 bits and rounded once."""
    first, *others = tensors
    if not others or first.element_size() > 2:
        return reduce(torch.add, others, first)
    return reduce(torch.add, others, first.float()).to(first.dtype)


def of_rank(rank: Rank) -> Iterator[Part]:
    """Make the sums over replicas of each stage, and those of shared weights."""
    if rank.wire.processes.replicas.are_several:
        for stage in rank.stages.values():
            yield StageSum(stage, rank.site.shared, rank.wire)
    # If the plan updates replicas, their sums are complete before the end of a step.
    if not rank.site.asks_for("updates of replicas"):
        yield SharedSums(rank.site.shared, rank.wire)
