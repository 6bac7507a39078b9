"""What ranks of first stages must agree on: the batch of a model with several of them, and the plan
and the `counts` of a step of replicas.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from schedlang.plan.plan import Plan
from schedlang.runtime.announcement import Announcement
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import Replicas
from schedlang.runtime.wire import Wire

#: The digits of a plan's digest by which replicas compare their plans, in a sum of doubles.
_DIGITS = 8


def totals_of_replicas(
    plan: Plan,
    own: Sequence[float],
    counting: Sequence[Replicas],
    wire: Wire,
    device: torch.device,
) -> Sequence[float]:
    """The sums over all replicas of this one's totals, one for each update; none if the script
    gives no `counts`. PipelineError where replicas follow other plans.

    The ranks of first stages exchange this in every step, since a replica cannot know whether
    another one was given counts.
    """
    number = int(plan.digest[:_DIGITS], 16)
    told = [number, bool(own), *(own or [0.0] * plan.layout.updates)]
    sums = torch.tensor(told, dtype=torch.float64, device=device)
    for replicas in counting:
        wire.end_sum(wire.begin_sum(sums, replicas), replicas)
    count = prod(len(replicas.processes) for replicas in counting)
    plans, have_counts, *sums_of_updates = sums.tolist()
    if plans != number * count:
        raise PipelineError(
            "the replicas of the pipeline have begun a step of other plans: give all of them the "
            "same `plan`"
        )
    # The first sum is the number of replicas that were given counts.
    if have_counts not in (0.0, count):
        raise PipelineError(
            "`counts` were given to some replicas of the pipeline, and not to others: give them "
            "to all or to none"
        )
    return sums_of_updates if have_counts else ()


def check_same_batch(plan: Plan, announced: Mapping[int, Announcement]) -> None:
    """PipelineError if the first stages of a model have different batches."""
    of_models: dict[str, int] = {}
    for other, another in announced.items():
        first = of_models.setdefault(plan.layout.model_of(other), other)
        one = announced[first]
        ranks = [plan.placement[stage] for stage in (first, other)]
        if another.rows != one.rows:
            raise PipelineError(
                f"rank {ranks[0]} has `inputs` {one.rows}, and rank {ranks[1]} "
                f"{another.rows}: all of them take the same batch"
            )
        pipeline_of = plan.layout.pipeline_of
        is_alike = bool(one.shares.of_microbatches) == bool(
            another.shares.of_microbatches
        )
        if pipeline_of[first] == pipeline_of[other]:
            is_alike = one.shares == another.shares
        if not is_alike:
            raise PipelineError(
                f"rank {ranks[0]} has other `counts` than rank {ranks[1]}: they belong to the "
                "batch, and all ranks of first stages are given them"
            )
