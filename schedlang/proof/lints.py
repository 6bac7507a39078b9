"""Warnings beside a verdict: what is proved for its transport, and yet a trap on the way to another
or to its start.

What the compiler places is received in order, and its batches have their mirror images; so it can
only mix batches with single transfers, where that is fastest. A program's own communication can
have any of them.
"""

from collections.abc import Iterator

from attrs import evolve

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.proof.prove import has_batches
from schedlang.schedule.actions import is_send, is_transfer, word
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Schedule

#: A rank and another one.
Pair = tuple[int, int]
#: Transfers of one batch with one other rank: where the batch starts, and what they are.
Part = tuple[int, frozenset[str]]


def lint(schedule: Schedule) -> list[Diagnostic]:
    """What to beware of in a schedule with communication that is proved for its transport."""
    findings: list[Finding] = []
    if schedule.transport == "gloo":
        findings += _needs_tags(schedule)
    elif has_batches(schedule.columns):
        if schedule.transport in ("nccl", "nccl-eager"):
            findings += _asymmetric(schedule)
        if schedule.transport == "nccl":
            findings += _mixed(schedule)
    return [evolve(each, severity="warning") for each in diagnose(schedule, findings)]


def _asymmetric(schedule: Schedule) -> Iterator[Finding]:
    """Batches whose other side is not one batch too; `portable` allows none, since batches are
    atomic there.
    """
    parts = _parts(schedule, batched=True)
    mirrors = {pair: {transfers for _, transfers in found} for pair, found in parts.items()}
    help = (
        "on both ranks, put the same transfers into one `exchange`: some libraries end a batch "
        "only as a whole"
    )
    for (rank, peer), found in parts.items():
        actions = schedule.ranks[rank]
        for start, _ in found:
            batch = [
                i
                for i in actions.batch(start)
                if schedule.peer(actions.kind[i], actions.stage[i]) == peer
            ]
            ends = [
                (*schedule.layout.counterpart(*actions.row(i)[:2]), actions.microbatch[i])
                for i in batch
            ]
            if frozenset(word(*end) for end in ends) not in mirrors.get((peer, rank), ()):
                message = (
                    f"what rank {rank} issues as one batch with rank {peer}, rank {peer} does not"
                )
                yield Finding("asymmetric-batch", message, rank, actions.source[start], help=help)


def _mixed(schedule: Schedule) -> Iterator[Finding]:
    """Ranks that exchange batches as well as single transfers, from the lower rank's side."""
    batched = _parts(schedule, batched=True)
    alone = _parts(schedule, batched=False)
    for rank, peer in sorted(pair for pair in batched.keys() & alone.keys() if pair[0] < pair[1]):
        source = schedule.ranks[rank].source
        message = f"ranks {rank} and {peer} exchange batches as well as single transfers"
        related = (source[alone[rank, peer][0][0]], "alone here")
        help = (
            "on nccl these take two communicators: use both once before the step, or issue all "
            "transfers alike"
        )
        place = source[batched[rank, peer][0][0]]
        yield Finding("mixed-transfers", message, rank, place, "in a batch here", (related,), help)


def _parts(schedule: Schedule, batched: bool) -> dict[Pair, list[Part]]:
    """For each rank and other rank, the transfers between them, as parts of batches or alone."""
    parts: dict[Pair, list[Part]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for batch in actions.batches():
            if is_transfer(actions.kind[batch.start]) and (len(batch) > 1) == batched:
                peers: dict[int, set[str]] = {}
                for index in batch:
                    peer = schedule.peer(actions.kind[index], actions.stage[index])
                    assert peer is not None
                    peers.setdefault(peer, set()).add(actions.word(index))
                for peer, words in peers.items():
                    parts.setdefault((rank, peer), []).append((batch.start, frozenset(words)))
    return parts


def _needs_tags(schedule: Schedule) -> Iterator[Finding]:
    """Receives that are not in the order of their sends, the first of each two ranks."""
    sent: dict[Pair, list[tuple[str, int]]] = {}
    received: dict[Pair, list[tuple[str, int, int]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for index in filter(lambda index: is_transfer(actions.kind[index]), range(len(actions))):
            op = actions.kind[index], actions.stage[index]
            peer = schedule.peer(*op)
            assert peer is not None
            if is_send(op[0]):
                end = schedule.layout.counterpart(*op)
                receive = word(*end, actions.microbatch[index])
                sent.setdefault((rank, peer), []).append((receive, end[1]))
            else:
                received.setdefault((peer, rank), []).append(
                    (actions.word(index), actions.source[index], op[1])
                )
    help = "receive in the order of the sends: other transports match messages by it"
    for (sender, receiver), wanted in sent.items():
        arrived = received[sender, receiver]
        for (first, number), (got, place, own) in zip(wanted, arrived, strict=True):
            if got != first:
                message = (
                    f"rank {receiver} receives `{got}` before `{first}`, which rank "
                    f"{sender} sends first"
                )
                numbers = (own, number)
                yield Finding("needs-tags", message, receiver, place, help=help, numbers=numbers)
                break
