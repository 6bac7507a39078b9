"""The norm of all gradients of a pipeline, as `torch.nn.utils.get_total_norm` computes it for one
module.

If the plan has updates, each of them has its own norm. The all-reduce begins as soon as a rank has
its part, and the rank waits for it only when an op needs the update (`schedlang.ranks.norms`):

    U of the last stage ─► all-reduce ─ ─ other ops ─ ─► a forward needs the weights: clip and step
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.ranks.norms import put_off, why_not
from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.gradient_norms import clip_to, norm_of
from schedlang.runtime.part import ExtraCall, Part, When
from schedlang.runtime.processes import group_apart
from schedlang.runtime.shared_weights import SharedWeights, gradient_of
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.wrappers import left_whole
from schedlang.runtime.wire import InFlight, Wire
from schedlang.schedule.kinds import STEPS, Kind


def total_norm(
    shared: Sequence[SharedWeights], norm_type: float, device: torch.device, wire: Wire
) -> Tensor:
    """The norm of all gradients, equal to the bit on all ranks."""
    norm = own_norm(shared, norm_type, device, wire.processes.own)
    if norm_type == inf:
        wire.reduce(norm, dist.ReduceOp.MAX)
        return norm
    # Powers of partial norms add up: the square of the norm is the sum of the ranks' squares.
    powers = norm**norm_type
    wire.reduce(powers, dist.ReduceOp.SUM)
    return powers ** (1 / norm_type)


def clip_by_total(
    shared: Sequence[SharedWeights],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    wire: Wire,
) -> Tensor:
    """Scale the gradients of all ranks to a norm of at most `max_norm`; return the norm before."""
    norm = total_norm(shared, norm_type, device, wire)
    clip_to((weight for each in shared for weight in each.parameters), max_norm, norm)
    return norm


def own_norm(
    shared: Sequence[SharedWeights], norm_type: float, device: torch.device, rank: int
) -> Tensor:
    """The norm of a rank's gradients. A weight that several ranks share counts only on the first of
    them, or at home.
    """
    counted = [
        gradient_of(same[0])
        for each in shared
        if each.counts_on == rank
        for same in each.weights
    ]
    norm = norm_of(
        [gradient for gradient in counted if gradient is not None], norm_type
    )
    # All ranks use the same type, also one without any gradient.
    return norm.to(device, torch.float64)


def check_clipping(
    plan: Plan,
    model: str | None,
    modules: Mapping[int, nn.Module],
    clips_itself: bool,
) -> None:
    """PipelineError unless a step leaves the gradients of one model, which can be clipped then."""
    for stage, module in modules.items():
        if left_whole(module):
            raise PipelineError(
                f"stage {stage} has weights that FSDP has not sharded "
                f"(`{left_whole(module)[0]}`), so each replica has another gradient of them, and "
                "another norm: shard the whole stage, `fully_shard(stage)` after its layers"
            )
    if clips_itself:
        raise PipelineError(
            "the pipeline has `max_norm`, so its steps end with updates that are clipped, and "
            "leave no gradients: `norms` has the norm of the last one"
        )
    names = [pipeline.name for pipeline in plan.layout.pipelines]
    if plan.layout.models and model not in names:
        given = f"there is no `{model}`" if model else "each has a norm of its own"
        raise PipelineError(
            f"the plan has the models {', '.join(names)}, and {given}: clip one after the other, "
            f'`clip_grad_norm_(max_norm, model="{names[0]}")`'
        )
    if model is not None and not plan.layout.models:
        raise PipelineError(f"the plan has one model, and none with the name `{model}`")
    if plan.has_updates:
        raise PipelineError(
            "the plan updates its stages itself (`U`), which leaves no moment for "
            "`clip_grad_norm_`: give the pipeline `max_norm`, or clip each stage in a hook of its "
            "optimizer, `register_step_pre_hook`"
        )


class UpdateClip(Part):
    """The op `U` of all stages of a rank, with gradients that are clipped by the norm of the whole
    pipeline.

    `norms` has the norm of each update in a step, before clipping.
    """

    def __init__(
        self, plan: Plan, max_norm: float, stages: Mapping[int, Stage], wire: Wire
    ) -> None:
        self._max_norm = max_norm
        self._stages = stages
        self._wire = wire
        self._group = group_apart(wire.processes)
        first = next(iter(stages.values()))
        # A first all-reduce creates NCCL's communicator, so that no step waits for that.
        wire.end_reduce(
            wire.begin_reduce(
                torch.zeros(1, device=first.device), dist.ReduceOp.SUM, self._group
            )
        )
        actions = plan.ranks[wire.processes.own]
        ops = zip(actions.kind, actions.microbatch, strict=True)
        #: The number of this rank's stages in each update.
        self._stages_of = Counter(
            max(update, 0) for kind, update in ops if kind in STEPS
        )
        #: By update, the squares of the norms of its stages, and their sum over all ranks.
        self._squares: dict[int, list[Tensor]] = {}
        self._in_flight: dict[int, InFlight] = {}
        self.norms: dict[int, Tensor] = {}
        self.ops = {
            (kind, number): partial(self._begin, stage)
            for number, stage in stages.items()
            for kind in STEPS
        }

    def calls(self, plan: Plan, rank: int) -> Iterator[ExtraCall]:
        """The optimizer's steps, each before the action that needs the new weights."""
        actions = plan.ranks[rank]
        for index, needed in put_off(plan, rank).items():
            number = actions.stage[index]
            update = actions.microbatch[index]
            call = partial(self._end, self._stages[number], max(update, 0))
            yield ExtraCall(
                needed,
                When.BEFORE,
                call,
                op=(Kind(actions.kind[index]), number, update),
            )

    def _begin(self, stage: Stage, update: int) -> None:
        """Add the norm of a stage's gradients; with the last stage of this rank, begin the
        all-reduce.
        """
        stage.begin_update()
        gradients = [
            weight.grad
            for weight in stage.module.parameters()
            if weight.grad is not None
        ]
        squares = self._squares.setdefault(update, [])
        squares.append(norm_of(gradients).to(stage.device, torch.float64) ** 2)
        # This rank's part of the norm is complete; it does not wait for the other ranks here.
        if len(squares) == self._stages_of[update]:
            total = torch.stack(self._squares.pop(update)).sum()
            self._in_flight[update] = self._wire.begin_reduce(
                total, dist.ReduceOp.SUM, self._group
            )

    def _end(self, stage: Stage, update: int) -> None:
        """Wait for the norm, clip, and step, before an op that needs the update of a stage."""
        if update in self._in_flight:
            in_flight = self._in_flight.pop(update)
            self._wire.end_reduce(in_flight)
            ((_, total),) = in_flight
            self.norms[update] = total.sqrt()
        clip_to(stage.module.parameters(), self._max_norm, self.norms[update])
        stage.end_update()


def of_rank(rank: Rank) -> Iterator[UpdateClip]:
    """Make the part for all stages. PipelineError if the plan's updates cannot be clipped; rank 0
    checks the whole plan for all ranks.
    """
    max_norm = rank.site.setup.max_norm
    assert max_norm is not None
    wrong = why_not(rank.site.plan) if rank.site.rank == 0 else None
    if wrong is not None:
        raise PipelineError(
            f"`max_norm` is for the updates of a plan, but {wrong}: clip each stage in a hook of "
            "its optimizer, `register_step_pre_hook`"
        )
    yield UpdateClip(rank.site.plan, max_norm, rank.stages, rank.wire)
