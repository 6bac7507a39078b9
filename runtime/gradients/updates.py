"""Optimizer steps of stages that have replicas in other pipelines of the plan: on gradients summed
over all of them.

Each rank joins the sum for an update when it has done its part, the last backward of its replicas,
and waits for it at the first `U`. Sums of different stages need not come in the same order on all
ranks, so each has a group of its own.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch.distributed as dist

from schedlang.plan.plan import Plan
from schedlang.runtime.gradients.sums import ReplicaSum
from schedlang.runtime.stage.stage import Stage
from schedlang.runtime.transport.ranks import Ranks, Replicas
from schedlang.runtime.transport.wire import Wire
from schedlang.runtime.watch.watchdog import PipelineError
from schedlang.schedule.kinds import Kind


class Updates:
    """The optimizer steps of the replicas of one stage that are on this rank; those with one module
    make one step.
    """

    def __init__(self, stages: Sequence[Stage], wire: Wire, replicas: Replicas) -> None:
        self.stages = stages
        #: One stage of each module.
        self._modules = list({id(stage.module): stage for stage in stages}.values())
        self._sum = ReplicaSum(lambda: [stage.trained() for stage in self._modules], wire, replicas)
        self._updated: list[Stage] = []

    def begin(self) -> None:
        """Join the sum for the next update, whose gradients are whole here."""
        self._sum.begin()

    def update(self, stage: Stage) -> None:
        """The step of a stage."""
        if not self._updated:
            self._sum.end()
        if all(stage.module is not other.module for other in self._updated):
            stage.update()
        self._updated.append(stage)
        if len(self._updated) == len(self.stages):
            self._updated = []

    def lasts(self, plan: Plan, rank: int) -> list[int]:
        """For each update the action that makes the last gradient, by index."""
        last = dict[int, int]()
        numbers = {stage.number for stage in self.stages}
        actions = plan.ranks[rank]
        ops = zip(actions.kind, actions.stage, actions.microbatch, strict=True)
        for index, (kind, number, microbatch) in enumerate(ops):
            if number in numbers and kind in (Kind.B, Kind.W):
                last[plan.layout.update_of(number, microbatch)] = index
        return list(last.values())


def replica_updates(
    plan: Plan, stages: Mapping[int, Stage], ranks: Ranks, wire: Wire
) -> list[Updates]:
    """Those of this rank, if the plan has several pipelines and updates its stages; all ranks make
    all groups.
    """
    if len(plan.layout.pipelines) == 1 or not plan.has_updates:
        return []
    if len(ranks.pipeline) < dist.get_world_size() or any(
        stage.sharded for stage in stages.values()
    ):
        raise PipelineError(
            "a plan that updates replicas runs on all processes, and its stages are not sharded"
        )
    found = []
    for piece in range(plan.layout.pieces):
        replicas = plan.layout.replicas(piece)
        processes = tuple(sorted({ranks.pipeline[plan.placement[number]] for number in replicas}))
        group = dist.new_group(list(processes)) if len(processes) > 1 else None
        own = [stages[number] for number in replicas if number in stages]
        if own:
            _check_optimizers(own)
            found.append(Updates(own, wire, Replicas(processes, group)))
    return found


def _check_optimizers(stages: Sequence[Stage]) -> None:
    for one, other in combinations(stages, 2):
        if one.module is other.module and one.optimizer is not other.optimizer:
            raise PipelineError(
                f"stages {one.number} and {other.number} are one module, give them one optimizer"
            )
