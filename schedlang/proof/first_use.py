"""The first use of communicators: with torch on NCCL, a rank's host waits there until all ranks of
it have come.
"""

import numpy as np

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.proof.graph import NEVER, Items
from schedlang.proof.waits import Edge, describe
from schedlang.schedule.findings import Finding, diagnose, ranks_text
from schedlang.schedule.schedule import Schedule

#: A communicator: its ranks, and whether it is for batches. Where there are two ranks in all, they
#: have one for batches and one for single transfers.
Communicator = tuple[tuple[int, ...], bool]
#: For each rank its communicators in the order of their first use, with the action of that use.
Uses = list[list[tuple[Communicator, int]]]


def check_first_use(schedule: Schedule) -> None:
    """CompileError if ranks wait for each other when communicators are made, or for a rank that
    never uses one.

    The host runs ahead of the ops, so only the order of first uses matters.
    """
    uses = _first_uses(schedule)
    position = _positions(uses)
    stuck = [rank for rank in range(len(uses)) if position[rank] < len(uses[rank])]
    if stuck:
        raise CompileError(
            diagnose(schedule, [_finding(schedule, uses, position, stuck[0])])
        )


def _positions(uses: Uses) -> list[int]:
    """How many communicators each rank has made when it stops, or when all are made.

    A first use is over once all ranks of the communicator have reached theirs.
    """
    # An event graph again: a thread for each rank, with its first uses; each waits for the begin of
    # the same communicator's on the other ranks.
    items = Items()
    numbers: dict[tuple[int, Communicator], int] = {}
    for rank, of_rank in enumerate(uses):
        order = np.arange(len(of_rank))
        added = items.add(np.full(len(order), rank), order).tolist()
        keys = ((rank, communicator) for communicator, _ in of_rank)
        numbers |= dict(zip(keys, added, strict=True))
    edges = [
        (number, numbers.get((member, communicator), NEVER))
        for (rank, communicator), number in numbers.items()
        for member in communicator[0]
        if member != rank
    ]
    waiters, targets = np.array(edges, np.int64).reshape(-1, 2).T
    items.wait(waiters, targets, at_begin=True)
    is_made = np.isfinite(items.graph().ends)
    counts = [0] * len(uses)
    for (rank, _), number in numbers.items():
        counts[rank] += int(is_made[number])
    return counts


def _first_uses(schedule: Schedule) -> Uses:
    """For each rank its communicators in the order of their first use, each with the action of that
    use.
    """
    columns = schedule.columns
    ranks = len(schedule.ranks)
    rows = np.flatnonzero(
        columns.is_transfer & (columns.batch == np.arange(len(columns)))
    )
    numbers = columns.kind[rows].astype(np.int64) * len(schedule.layout.all_numbers)
    transfers, of_row = np.unique(numbers + columns.stage[rows], return_inverse=True)
    peers = [
        schedule.peer(*divmod(transfer, len(schedule.layout.all_numbers)))
        for transfer in transfers.tolist()
    ]
    # A batch uses the communicator of all, which here has the number behind those of the ranks.
    with_whom = np.where(
        columns.sizes[rows] > 1, ranks, np.array(peers, np.int64)[of_row]
    )
    _, first = np.unique(
        columns.rank[rows] * np.int64(ranks + 1) + with_whom, return_index=True
    )
    uses: Uses = [[] for _ in range(ranks)]
    everyone = tuple(range(ranks))
    for index in np.sort(first).tolist():
        rank, place = columns.place(int(rows[index]))
        peer = int(with_whom[index])
        is_batch = peer == ranks
        members = everyone if is_batch else (min(rank, peer), max(rank, peer))
        uses[rank].append(((members, is_batch), place))
    return uses


def _stands_at(uses: Uses, position: list[int], rank: int) -> Communicator | None:
    return uses[rank][position[rank]][0] if position[rank] < len(uses[rank]) else None


def _finding(schedule: Schedule, uses: Uses, position: list[int], rank: int) -> Finding:
    """The finding for a rank that waits: follow the waits until a rank comes again, or one that
    never uses the communicator.
    """
    edges: dict[int, Edge] = {}
    while rank not in edges:
        edges[rank], missing = _edge(uses, position, rank)
        if edges[rank].until is None:
            edges = {rank: edges[rank]}
            message = (
                f"rank {rank} waits at its first {edges[rank].what} for rank {missing}, "
                "which never comes to one"
            )
            break
        rank = missing
    else:
        # The way that led into the circle is left out.
        edges = dict(list(edges.items())[list(edges).index(rank) :])
        message = (
            f"{ranks_text(sorted(edges))} wait for each other, each at the first use of a "
            "communicator"
        )
    help = (
        "let all ranks use all communicators once before the step, or open them with "
        "`device_id` (nccl-eager)"
    )
    return Finding(
        "first-use",
        message,
        rank,
        help=help,
        waits=describe(schedule, list(edges.values())),
    )


def _edge(uses: Uses, position: list[int], rank: int) -> tuple[Edge, int]:
    """The wait of a rank, and a rank that it waits for; preferably one that never comes."""
    communicator, index = uses[rank][position[rank]]
    members, batched = communicator
    missing = [
        other for other in members if _stands_at(uses, position, other) != communicator
    ]
    comes_at = {other: dict(uses[other]).get(communicator) for other in missing}
    never = [other for other in missing if comes_at[other] is None]
    chosen = (never or missing)[0]
    later = comes_at[chosen]
    until = None if later is None else (chosen, later)
    what = "batch" if batched else f"transfer alone with rank {chosen}"
    return Edge((rank, index), "first use", until, what=what), chosen
