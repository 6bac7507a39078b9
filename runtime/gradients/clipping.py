"""The norm of the gradients of a whole pipeline, as `torch.nn.utils.get_total_norm` has it of one
module.

Where the plan updates its stages itself, that of each update: the sum over all ranks begins as soon
as a rank has its part, and is waited for only when something needs the update
(`schedlang.ranks.norms`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from schedlang.plan.plan import Plan
from schedlang.runtime.gradients.copies import Copies
from schedlang.runtime.stage.stage import Stage
from schedlang.runtime.transport.ranks import Ranks
from schedlang.runtime.transport.wire import InFlight, Wire
from schedlang.schedule.kinds import Kind


def total_norm(
    copies: Sequence[Copies], rank: int, norm_type: float, device: torch.device, wire: Wire
) -> Tensor:
    """The norm of all gradients, on all ranks the same to the bit.

    A weight that has copies counts once, on the first rank that has one.
    """
    counted = [same[0].grad for each in copies if each.ranks[0] == rank for same in each.weights]
    norm = get_total_norm([each for each in counted if each is not None], norm_type)
    # Of FSDP's parts of a stage.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    # All ranks alike, also one that counts nothing.
    norm = norm.to(device, torch.float64)
    if norm_type == inf:
        wire.reduce(norm, dist.ReduceOp.MAX)
        return norm
    powers = norm**norm_type
    wire.reduce(powers, dist.ReduceOp.SUM)
    return powers ** (1 / norm_type)


class UpdateClip:
    """Clips the updates of a plan to a norm of all gradients, each in two halves: `take` at its
    `U`, `apply` later.

    `norms` are those of the updates in a step, before they are clipped.
    """

    def __init__(
        self, plan: Plan, ranks: Ranks, max_norm: float, stages: Mapping[int, Stage], wire: Wire
    ) -> None:
        self._max_norm = max_norm
        self._stages = stages
        self._wire = wire
        # One of its own: sums come at other places among the messages of each rank, but everywhere
        # in this order.
        is_part = len(ranks.pipeline) < dist.get_world_size()
        self._group = dist.new_group([*ranks.pipeline], use_local_synchronization=is_part)
        first = next(iter(stages.values()))
        # NCCL makes its communicator in the first one, for which a rank waits.
        wire.end_reduce(
            wire.begin_reduce(torch.zeros(1, device=first.device), dist.ReduceOp.SUM, self._group)
        )
        actions = plan.ranks[ranks.own]
        ops = zip(actions.kind, actions.microbatch, strict=True)
        #: How many stages an update has on this rank.
        self._parts = Counter(max(update, 0) for kind, update in ops if kind == Kind.U)
        self._taken: dict[int, list[Tensor]] = {}
        self._in_flight: dict[int, InFlight] = {}
        self.norms: dict[int, Tensor] = {}

    def take(self, number: int, update: int) -> None:
        """The gradient of a stage is whole; with the last one of this rank, the sum over all ranks
        begins.
        """
        stage = self._stages[number]
        stage.take()
        gradients = [each.grad for each in stage.module.parameters() if each.grad is not None]
        taken = self._taken.setdefault(update, [])
        taken.append(get_total_norm(gradients).to(stage.device, torch.float64) ** 2)
        if len(taken) == self._parts[update]:
            total = torch.stack(self._taken.pop(update)).sum()
            self._in_flight[update] = self._wire.begin_reduce(total, dist.ReduceOp.SUM, self._group)

    def apply(self, number: int, update: int) -> None:
        """Something needs the update of a stage: wait for the norm, clip, and step."""
        if update in self._in_flight:
            in_flight = self._in_flight.pop(update)
            self._wire.end_reduce(in_flight)
            ((_, total),) = in_flight
            self.norms[update] = total.sqrt()
        stage = self._stages[number]
        clip_grads_with_norm_(stage.module.parameters(), self._max_norm, self.norms[update])
        stage.apply()
