"""Lowering: insert sends and receives into a schedule.

If the program writes none, they are inserted in the order of one global execution (`co_issue`),
which is deadlock-free on every transport. The other lowerings start from that schedule, and move
transfers to be faster on a particular transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from schedlang.lowering.co_issue import co_issue
from schedlang.on_demand import on_demand
from schedlang.proof.events import Events
from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.arrays import members
from schedlang.schedule.columns import actions_of, columns_of
from schedlang.schedule.kinds import ROWS
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import PORTABLE, transports

if TYPE_CHECKING:
    from schedlang.lowering.deferral import defer
    from schedlang.lowering.early import post_early
    from schedlang.lowering.fusion import fuse
    from schedlang.schedule.frozen import without_idle
else:
    # For transports on which other lowerings may be faster than co-issued transfers.
    defer = on_demand("schedlang.lowering.deferral.defer")
    post_early = on_demand("schedlang.lowering.early.post_early")
    fuse = on_demand("schedlang.lowering.fusion.fuse")
    # For schedules with frozen stages.
    without_idle = on_demand("schedlang.schedule.frozen.without_idle")

Lowering = Callable[[Schedule], Schedule]

CO_ISSUED = "co-issued"
OWN = "the program's own"


def lower(schedule: Schedule, events: Events | None = None) -> Schedule:
    """The schedule with its communication: the program's own, or inserted transfers if the program
    writes none.

    `events` are the schedule's global events (`schedlang.proof.moments`), if they are known. A
    transfer in a program stands for the transfers to all stages that use a result, or from all
    stages that make an input. Transfers within a rank, or past the ends of the pipeline, vanish.
    Backwards without any work vanish here, too (`schedlang.schedule.frozen`).
    """
    if writes_communication(schedule):
        lowered = evolve(schedule, ranks=_reachable(schedule))
    else:
        lowered = co_issue(schedule, events)
    if not schedule.layout.frozen:
        return lowered
    left = without_idle(lowered.columns, schedule.layout)
    return evolve(lowered, ranks=actions_of(len(schedule.ranks), left))


def writes_communication(schedule: Schedule) -> bool:
    """Whether a program writes sends or receives, also in the updates of one without a flush."""
    stream = schedule.stream
    if not stream:
        return bool(schedule.columns.is_transfer.any())
    parts = (stream.warmup, stream.steady)
    return any(bool(columns_of(ranks).is_transfer.any()) for ranks in parts)


def _reachable(schedule: Schedule) -> Sequence[Actions]:
    """The actions of each rank, where each written transfer becomes one for each stage that it
    reaches on another rank.
    """
    columns = schedule.columns
    stages = range(len(schedule.placement))
    numbers = [
        _numbers(schedule, kind, stage) for kind in range(ROWS) for stage in stages
    ]
    # The numbers of all kinds and stages as one flat array.
    lengths = np.array(list(map(len, numbers)))
    flat = np.array(list(chain.from_iterable(numbers)), np.int32)
    row, place = members(lengths, columns.kind * np.int64(len(stages)) + columns.stage)
    reached = evolve(columns.taken(row), stage=flat[place])
    return actions_of(len(schedule.ranks), reached)


def _numbers(schedule: Schedule, kind: int, stage: int) -> list[int]:
    """The numbers that an action of a stage gets in a plan: a transfer may get several, or none."""
    if not is_transfer(kind):
        return [stage]
    numbers = schedule.layout.numbers(kind, stage)
    return [number for number in numbers if schedule.peer(kind, number) is not None]


def alternatives(transport: str) -> dict[str, Lowering]:
    """Lowerings that may be faster on a transport than co-issued transfers, by name, the simpler
    first. Each takes the co-issued schedule.

    There are none for transports whose transfers never wait for each other. If ranks block, posting
    a receive early only makes its rank wait. If each edge has its own lane, an early receive delays
    no other transfer, and batches gain nothing.
    """
    rules = transports(transport)[0]
    if transport == PORTABLE or rules.lane == "none":
        return {}
    if rules.blocks:
        return {
            "fused": fuse,
            "deferred": defer,
            "deferred and fused": lambda lowered: fuse(defer(lowered)),
        }
    if rules.lane == "edge":
        return {"posted early": lambda lowered: post_early(lowered, rules.lane)}
    return {
        "posted early": post_early,
        "posted early in order": lambda lowered: post_early(lowered, "rank"),
        "fused": fuse,
        "fused and posted early": lambda lowered: post_early(fuse(lowered)),
        "deferred": defer,
    }
