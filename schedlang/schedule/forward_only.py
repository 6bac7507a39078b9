"""Keep the forwards: the inference plan that stands in a training program."""

from collections.abc import Sequence
from typing import TypeVar

from attrs import evolve

from schedlang.schedule.kinds import FORWARD, GATHERS, OF_HOPS
from schedlang.schedule.schedule import Schedule

S = TypeVar("S", bound=Schedule)


def forward_only(schedule: S, counts: Sequence[int] | None = None) -> S:
    """The schedule's forwards and their transfers, in each rank's order; slots are forgotten. Of
    each pipeline those of all microbatches, or of the first `counts[pipeline]`.

    They need nothing but each other, and those of one microbatch nothing of another's, so they run
    to the end wherever the whole schedule does. All read the newest weights: no rule says which of
    its versions a training reads.
    """
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        kept = set(forwards(schedule, rank, counts))
        batches = actions.batches()
        ranks.append(
            actions.issued_as(
                [index for index in batch if index in kept] for batch in batches
            )
        )
    return evolve(schedule, ranks=tuple(ranks), slots=None, weights=())


def forwards(
    schedule: Schedule, rank: int, counts: Sequence[int] | None = None
) -> list[int]:
    """The indices of a rank's forwards and their transfers that `forward_only` keeps, in order; and
    of stages whose weights hop from replica to replica, all that brings and drops these.
    """
    layout = schedule.layout
    if counts is None:
        counts = [pipeline.microbatches for pipeline in layout.pipelines]
    # By the numbers of stages and skips, how many microbatches or slices of them there are.
    units = [
        counts[layout.pipelines.index(layout.pipeline_of[stage])] * layout.slices
        for stage in range(len(layout.placement))
    ]
    # An edge joins stages that run as many microbatches, so either end says how many pass along it.
    units += [units[earlier] for _, (earlier, _) in sorted(layout.far_edges.items())]
    actions = schedule.ranks[rank]
    columns = [*actions.each()]
    hopping = {number for kind, number, _ in columns if kind in OF_HOPS}
    return [
        index
        for index, (kind, number, microbatch) in enumerate(columns)
        if (kind in FORWARD and microbatch < units[number])
        or (kind in GATHERS and number in hopping)
    ]
