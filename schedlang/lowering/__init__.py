"""Schedule → schedule with communication.

Where a program writes no sends and receives, they are put in the order of one global execution
(`co_issue`), which is right on every transport. The other lowerings start from there and change it
for one that they are faster on.
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
from schedlang.schedule.columns import actions_of, columns_of, members
from schedlang.schedule.kinds import ROWS
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import PORTABLE, transports

if TYPE_CHECKING:
    from schedlang.lowering.deferral import defer
    from schedlang.lowering.early import post_early
    from schedlang.lowering.fusion import fuse
    from schedlang.schedule.frozen import without_idle
else:
    # For transports on which something may be faster than co-issued transfers.
    defer = on_demand("schedlang.lowering.deferral.defer")
    post_early = on_demand("schedlang.lowering.early.post_early")
    fuse = on_demand("schedlang.lowering.fusion.fuse")
    # For schedules with frozen stages.
    without_idle = on_demand("schedlang.schedule.frozen.without_idle")

Lowering = Callable[[Schedule], Schedule]

CO_ISSUED = "co-issued"
OWN = "the program's own"


def lower(schedule: Schedule, events: Events | None = None) -> Schedule:
    """The schedule with its communication: the program's own, or inserted where the program writes
    none.

    `events` are its global ones (`schedlang.proof.moments`), if somebody has made them.
    A program's own transfers are to all stages that take what a stage makes, or from all that make
    what it takes. To a stage of the same rank, or past the ends of the pipeline, they become
    nothing. Backwards that do nothing are left out now (`schedlang.schedule.frozen`).
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
    """Whether a schedule has sends or receives, or its updates, where it has no flush."""
    stream = schedule.stream
    if not stream:
        return bool(schedule.columns.is_transfer.any())
    parts = (stream.warmup, stream.steady)
    return any(bool(columns_of(ranks).is_transfer.any()) for ranks in parts)


def _reachable(schedule: Schedule) -> Sequence[Actions]:
    """The actions of each rank, with a transfer for each stage on another rank that there is to
    reach.
    """
    columns = schedule.columns
    stages = range(len(schedule.placement))
    numbers = [
        _numbers(schedule, kind, stage) for kind in range(ROWS) for stage in stages
    ]
    # For each kind and stage the numbers that its actions get, one list after the other.
    lengths = np.array(list(map(len, numbers)))
    flat = np.array(list(chain.from_iterable(numbers)), np.int32)
    row, place = members(lengths, columns.kind * np.int64(len(stages)) + columns.stage)
    reached = evolve(columns.taken(row), stage=flat[place])
    return actions_of(len(schedule.ranks), reached)


def _numbers(schedule: Schedule, kind: int, stage: int) -> list[int]:
    """The numbers that an action of a stage has in a plan: a transfer may become several, or
    none.
    """
    if not is_transfer(kind):
        return [stage]
    numbers = schedule.layout.numbers(kind, stage)
    return [number for number in numbers if schedule.peer(kind, number) is not None]


def alternatives(transport: str) -> dict[str, Lowering]:
    """What may be faster on a transport than co-issued transfers, which it starts from; by name,
    the simpler first.

    Nothing is where transfers are on their own. Where ranks block, a receive posted early only
    makes its rank wait. By lanes for each edge, it keeps nothing waiting, and batches are nothing.
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
