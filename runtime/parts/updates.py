"""Optimizer steps of stages with replicas in other pipelines of the plan, on the sums of all
replicas' gradients.

Each rank begins the sum for an update after the last backward of its replicas, and waits for it at
the first `U`. Ranks may begin the sums of different stages in different orders, so each sum has its
own process group.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations

import torch.distributed as dist
from torch import nn

from schedlang.plan.plan import Plan
from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import ExtraCall, Part, When
from schedlang.runtime.parts.sums import SUMS, ReplicaSum
from schedlang.runtime.processes import Replicas
from schedlang.runtime.stage import Stage
from schedlang.runtime.wire import Wire
from schedlang.schedule.kinds import MAKERS, STEPS, Kind


class ReplicaUpdates(Part):
    """The op `U` of the replicas of one stage on this rank. Replicas that are one module make one
    optimizer step.
    """

    def __init__(self, stages: Sequence[Stage], wire: Wire, replicas: Replicas) -> None:
        self._stages = stages
        #: One stage of each module.
        self._modules = list({id(stage.module): stage for stage in stages}.values())
        self._sum = ReplicaSum(self._weights, wire, replicas)
        self._updated: list[Stage] = []
        self.ops = {
            (kind, stage.number): partial(self._update, stage)
            for stage in stages
            for kind in STEPS
        }

    def calls(self, plan: Plan, rank: int) -> Iterator[ExtraCall]:
        """Begin the sum for an update after the last backward of all replicas on this rank, or
        where the plan says so; without a backward, before their first `U`.
        """
        last = dict[int, int]()
        numbers = {stage.number for stage in self._stages}
        actions = plan.ranks[rank]
        ops = [*zip(actions.kind, actions.stage, actions.microbatch, strict=True)]
        is_written = any(kind in SUMS and number in numbers for kind, number, _ in ops)
        begins = SUMS if is_written else MAKERS[Kind.W]
        for index, (kind, number, microbatch) in enumerate(ops):
            if number in numbers and kind in begins:
                last[plan.layout.update_of(number, max(microbatch, 0))] = index
        for index in last.values():
            yield ExtraCall(index, When.AFTER, self._begin)
        if not last:
            # The backwards of these replicas, which run ahead of others, are on other ranks.
            steps = [
                index
                for index, (kind, number, _) in enumerate(ops)
                if number in numbers and kind in STEPS
            ]
            for index in steps[:: len(numbers)]:
                yield ExtraCall(index, When.BEFORE, self._begin)

    def _weights(self) -> list[list[nn.Parameter]]:
        return [
            [weight for weight in stage.module.parameters() if weight.requires_grad]
            for stage in self._modules
        ]

    def _begin(self) -> None:
        for stage in self._modules:
            stage.begin_update()
        self._sum.begin()

    def _update(self, stage: Stage, _: int) -> None:
        if not self._updated:
            self._sum.end()
        # Replicas that are one module share their weights, which one step updates.
        if all(stage.module is not other.module for other in self._updated):
            stage.end_update()
        self._updated.append(stage)
        if len(self._updated) == len(self._stages):
            self._updated = []


def of_rank(rank: Rank) -> Iterator[ReplicaUpdates]:
    """Make the parts for this rank; all ranks create all process groups."""
    layout = rank.site.plan.layout
    processes = rank.wire.processes.pipeline
    if len(processes) < dist.get_world_size():
        raise PipelineError(
            "a plan that updates replicas runs on all processes, and its stages are not sharded"
        )
    for piece in range(layout.pieces):
        replicas = layout.replicas(piece)
        members = tuple(
            sorted({processes[layout.placement[number]] for number in replicas})
        )
        group = dist.new_group(list(members)) if len(members) > 1 else None
        own = [rank.stages[number] for number in replicas if number in rank.stages]
        if own:
            _check_optimizers(own)
            yield ReplicaUpdates(own, rank.wire, Replicas(members, group))


def _check_optimizers(stages: Sequence[Stage]) -> None:
    for one, other in combinations(stages, 2):
        if one.module is other.module and one.optimizer is not other.optimizer:
            raise PipelineError(
                f"stages {one.number} and {other.number} are one module, give them one optimizer"
            )
