"""The first use of communicators: with torch on NCCL, a rank's host waits there until all ranks of it have come."""

from schedlang.actions import is_transfer
from schedlang.diagnostics import CompileError
from schedlang.findings import Finding, diagnose
from schedlang.schedule import Schedule

#: A communicator: its ranks, and whether it is for batches. Two ranks that are all have one for each.
Communicator = tuple[tuple[int, ...], bool]
Uses = list[list[tuple[Communicator, int]]]


def check_first_use(schedule: Schedule) -> None:
    """CompileError if ranks wait for each other, or for one that never comes, when communicators are made.

    Hosts run ahead of the ops, so nothing but the order of first uses counts here.
    """
    uses = [_first_uses(schedule, rank) for rank in range(len(schedule.ranks))]
    position, ready = [0] * len(uses), list(range(len(uses)))
    while ready:
        communicator = _stands_at(uses, position, ready.pop())
        if communicator and all(_stands_at(uses, position, each) == communicator for each in communicator[0]):
            for each in communicator[0]:
                position[each] += 1
            ready += communicator[0]
    stuck = [rank for rank in range(len(uses)) if position[rank] < len(uses[rank])]
    if stuck:
        raise CompileError(diagnose(schedule, [_finding(schedule, uses, position, stuck[0])]))


def _first_uses(schedule: Schedule, rank: int) -> list[tuple[Communicator, int]]:
    """The communicators of a rank in the order of their first use, each with the action there."""
    actions, everyone = schedule.ranks[rank], tuple(range(len(schedule.ranks)))
    found: dict[Communicator, int] = {}
    for batch in actions.batches():
        if is_transfer(actions.kind[batch.start]):
            peer = schedule.peer(actions.kind[batch.start], actions.stage[batch.start])
            assert peer is not None
            pair = (min(rank, peer), max(rank, peer))
            found.setdefault((everyone, True) if len(batch) > 1 else (pair, False), batch.start)
    return list(found.items())


def _stands_at(uses: Uses, position: list[int], rank: int) -> Communicator | None:
    return uses[rank][position[rank]][0] if position[rank] < len(uses[rank]) else None


def _finding(schedule: Schedule, uses: Uses, position: list[int], rank: int) -> Finding:
    """A rank that waits, and one that it waits for."""
    communicator, index = uses[rank][position[rank]]
    members, batched = communicator
    missing = next(each for each in members if _stands_at(uses, position, each) != communicator)
    what = "first batch" if batched else f"first transfer alone with rank {missing}"
    related: tuple[tuple[int, str], ...] = ()
    if _stands_at(uses, position, missing):
        why = "waits at the first use of another communicator"
        other = uses[missing][position[missing]][1]
        related = ((schedule.ranks[missing].source[other], f"rank {missing} waits here"),)
    else:
        why = "never comes to one"
    message = f"rank {rank} waits at its {what} for rank {missing}, which {why}"
    help = "let all ranks use all communicators once before the step, or open them with `device_id` (nccl-eager)"
    place = schedule.ranks[rank].source[index]
    return Finding("first-use", message, rank, place, f"rank {rank} waits here", related, help)
