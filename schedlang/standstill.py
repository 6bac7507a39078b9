"""Why an execution stands still: transfers that are never met, or ranks that wait for each other."""

from schedlang.actions import counterpart, is_send, word
from schedlang.findings import Finding, ranks_text
from schedlang.kinds import Kind
from schedlang.schedule import Schedule


def explain_standstill(
    schedule: Schedule, position: list[int], waiting: list[tuple[int, int]], other_findings: bool
) -> list[Finding]:
    """What keeps ranks from going on, given where each stands and which transfers wait for their other side.

    A transfer that is never met explains all that waits behind it, and so may other findings; only a standstill that
    nothing else explains is reported as a deadlock.
    """
    releases = [_release(schedule, position, rank, index) for rank, index in waiting]
    findings = [
        _never_met(schedule, rank, index)
        for (rank, index), release in zip(waiting, releases, strict=True)
        if release is None
    ]
    if findings or other_findings:
        return findings
    return [_deadlock(schedule, dict(zip(waiting, releases, strict=True)))]


def _other_end(schedule: Schedule, rank: int, index: int) -> tuple[int, Kind, int, int]:
    """The other side of a transfer: its rank, kind, stage and microbatch."""
    actions = schedule.ranks[rank]
    peer = schedule.peer(actions.kind[index], actions.stage[index])
    assert peer is not None
    return peer, *counterpart(actions.kind[index], actions.stage[index]), actions.microbatch[index]


def _release(schedule: Schedule, position: list[int], rank: int, index: int) -> tuple[int, int] | None:
    """The later action, as (rank, index), that would meet a waiting transfer."""
    peer, *wanted = _other_end(schedule, rank, index)
    actions = schedule.ranks[peer]
    for later in range(position[peer], len(actions)):
        if [actions.kind[later], actions.stage[later], actions.microbatch[later]] == wanted:
            return peer, later
    return None


def _never_met(schedule: Schedule, rank: int, index: int) -> Finding:
    actions = schedule.ranks[rank]
    peer, kind, stage, microbatch = _other_end(schedule, rank, index)
    sent = is_send(actions.kind[index])
    message = (
        f"`{actions.word(index)}` on rank {rank} is never {'received' if sent else 'sent'}: "
        f"rank {peer} has no `{word(kind, stage, microbatch)}` left"
    )
    return Finding("unmatched-send" if sent else "unmatched-receive", message, rank, actions.source[index])


def _deadlock(schedule: Schedule, releases: dict[tuple[int, int], tuple[int, int] | None]) -> Finding:
    """The ranks that wait for each other: from any that waits, follow who it waits for until a rank comes again."""
    waits = {rank: (index, release) for (rank, index), release in reversed(releases.items())}
    order = [min(waits)]
    while True:
        release = waits[order[-1]][1]
        assert release is not None
        if release[0] in order:
            break
        order.append(release[0])
    cycle = order[order.index(release[0]) :]
    related = []
    for rank in cycle:
        index, release = waits[rank]
        assert release is not None
        actions, peer = schedule.ranks[rank], schedule.ranks[release[0]]
        related.append((actions.source[index], f"rank {rank} waits here, at `{actions.word(index)}`"))
        needs = f"until rank {release[0]} comes here, to `{peer.word(release[1])}`"
        related.append((peer.source[release[1]], needs))
    (place, label), *rest = related
    message = f"{ranks_text(sorted(cycle))} wait for each other"
    if schedule.source.text.startswith(("send", "recv"), schedule.spans[place].start if schedule.spans else 0):
        help = "issue transfers that cross as one batch, `exchange { … }`, or in one order on both ranks"
    else:
        help = "these ops cannot run in this order, whatever the communication: change the order of one rank"
    return Finding("deadlock", message, cycle[0], place, label, tuple(rest), help)
