"""Warnings beside a verdict: what is proved for its transport, and yet a trap on the way to another
or to its start.

What the compiler places is received in order, and its batches have their mirror images; so it can
only mix batches with single transfers, where that is fastest. A program's own communication can
have any of them.
"""

from collections.abc import Iterator

from attrs import evolve

from schedlang.diagnostics.diagnostic import Diagnostic
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
    elif schedule.columns.has_batches:
        if schedule.transport in ("nccl", "nccl-eager"):
            findings += _asymmetric(schedule)
        if schedule.transport == "nccl":
            findings += _mixed(schedule)
    warnings = diagnose(schedule, findings)
    return [evolve(warning, severity="warning") for warning in warnings]


def _asymmetric(schedule: Schedule) -> Iterator[Finding]:
    """Batches whose other side is not one batch too; `portable` allows none, since batches are
    atomic there.
    """
    batched = _parts(schedule, batched=True)
    batches = {pair: {words for _, words in parts} for pair, parts in batched.items()}
    help = (
        "on both ranks, put the same transfers into one `overlap`: some libraries end a batch "
        "only as a whole"
    )
    for (rank, peer), parts in batched.items():
        actions = schedule.ranks[rank]
        for start, _ in parts:
            mirror = frozenset(
                word(*schedule.other_end(rank, index))
                for index in actions.batch(start)
                if schedule.peer_of(rank, index) == peer
            )
            if mirror not in batches.get((peer, rank), ()):
                message = (
                    f"what rank {rank} issues as one batch with rank {peer}, "
                    f"rank {peer} does not"
                )
                yield Finding(
                    "asymmetric-batch", message, rank, actions.source[start], help=help
                )


def _mixed(schedule: Schedule) -> Iterator[Finding]:
    """Ranks that exchange batches as well as single transfers, from the lower rank's side."""
    batched = _parts(schedule, batched=True)
    alone = _parts(schedule, batched=False)
    help = (
        "on nccl these take two communicators: use both once before the step, or issue all "
        "transfers alike"
    )
    for rank, peer in sorted(batched.keys() & alone.keys()):
        if rank > peer:
            continue
        source = schedule.ranks[rank].source
        first_batch, _ = batched[rank, peer][0]
        first_alone, _ = alone[rank, peer][0]
        message = (
            f"ranks {rank} and {peer} exchange batches as well as single transfers"
        )
        related = ((source[first_alone], "alone here"),)
        place = source[first_batch]
        yield Finding(
            "mixed-transfers", message, rank, place, "in a batch here", related, help
        )


def _parts(schedule: Schedule, batched: bool) -> dict[Pair, list[Part]]:
    """For each rank and other rank, the transfers between them, as parts of batches or alone."""
    parts: dict[Pair, list[Part]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for batch in actions.batches():
            if (
                not is_transfer(actions.kind[batch.start])
                or (len(batch) > 1) != batched
            ):
                continue
            words_with: dict[int, set[str]] = {}
            for index in batch:
                peer = schedule.peer_of(rank, index)
                assert peer is not None
                words_with.setdefault(peer, set()).add(actions.word(index))
            for peer, words in words_with.items():
                parts.setdefault((rank, peer), []).append(
                    (batch.start, frozenset(words))
                )
    return parts


def _needs_tags(schedule: Schedule) -> Iterator[Finding]:
    """Receives that are not in the order of their sends, the first of each two ranks."""
    # By sender and receiver, the receive of each send in the order of the sends, by its kind,
    # number and microbatch; and the receives in their own order, by their indices.
    sent: dict[Pair, list[tuple[int, int, int]]] = {}
    received: dict[Pair, list[int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for index, kind in enumerate(actions.kind):
            if not is_transfer(kind):
                continue
            peer = schedule.peer_of(rank, index)
            assert peer is not None
            if is_send(kind):
                sent.setdefault((rank, peer), []).append(
                    schedule.other_end(rank, index)
                )
            else:
                received.setdefault((peer, rank), []).append(index)
    help = "receive in the order of the sends: other transports match messages by it"
    for (sender, receiver), receives in sent.items():
        actions = schedule.ranks[receiver]
        for sent_here, index in zip(receives, received[sender, receiver], strict=True):
            if actions.at(index) != sent_here:
                message = (
                    f"rank {receiver} receives `{schedule.name_of(receiver, index)}` before "
                    f"`{schedule.names.action(*sent_here)}`, which rank {sender} sends first"
                )
                numbers = (actions.stage[index], sent_here[1])
                place = actions.source[index]
                yield Finding(
                    "needs-tags", message, receiver, place, help=help, numbers=numbers
                )
                break
