"""Schedule → schedule with communication.

Where a program writes no sends and receives, they are put in the order of one global execution
(`co_issue`), which is right on every transport. The other lowerings start from there and change it
for one that they are faster on.
"""

from collections.abc import Callable

from attrs import evolve

from schedlang.lowering.co_issue import co_issue
from schedlang.lowering.defer import defer
from schedlang.lowering.early import post_early
from schedlang.lowering.fuse import fuse
from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import PORTABLE, transports

Lowering = Callable[[Schedule], Schedule]

CO_ISSUED = "co-issued"
OWN = "the program's own"


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its communication: the program's own, or inserted where the program writes
    none.

    A program's own transfers are to all stages that take what a stage makes, or from all that make
    what it takes. To a stage of the same rank, or past the ends of the pipeline, they become
    nothing.
    """
    if writes_communication(schedule):
        ranks = tuple(_reachable(schedule, actions) for actions in schedule.ranks)
        return evolve(schedule, ranks=ranks)
    return co_issue(schedule)


def writes_communication(schedule: Schedule) -> bool:
    """Whether a schedule has sends or receives."""
    return any(is_transfer(kind) for actions in schedule.ranks for kind in set(actions.kind))


def _reachable(schedule: Schedule, actions: Actions) -> Actions:
    """The actions, with a transfer for each stage on another rank that there is to reach."""
    kept = Actions()
    for kind, stage, *rest in map(actions.row, range(len(actions))):
        if not is_transfer(kind):
            kept.add(kind, stage, *rest)
            continue
        for number in schedule.layout.numbers(kind, stage):
            if schedule.peer(kind, number) is not None:
                kept.add(kind, number, *rest)
    return kept


def alternatives(transport: str) -> dict[str, Lowering]:
    """What may be faster on a transport than co-issued transfers, which it starts from; by name,
    the simpler first.

    Nothing is where transfers are on their own. Where ranks block, a receive posted early only
    makes its rank wait.
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
    return {
        "posted early": post_early,
        "posted early in order": lambda lowered: post_early(lowered, in_order=True),
        "fused": fuse,
        "fused and posted early": lambda lowered: post_early(fuse(lowered)),
        "deferred": defer,
    }
