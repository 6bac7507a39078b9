"""The edges of copies and collectives, which go on beside the ops of a rank: the same on every
transport.
"""

import numpy as np

from schedlang.proof.collectives import MEETING, sides_of
from schedlang.proof.graph import NOTHING
from schedlang.proof.presence import presence, writes
from schedlang.proof.threads import Threads
from schedlang.ranks.shards import shards
from schedlang.schedule.columns import counts_of, is_any
from schedlang.schedule.kinds import OPS, ROWS, STEPS, SUMS, op_of
from schedlang.schedule.needs import gradients_of, needs_of, sums_of

#: The number of the stream on which a rank runs ops of each kind.
_NAMES = [*dict.fromkeys(op.stream for op in OPS.values())]
_STREAM = np.array([_NAMES.index(op_of(kind).stream) for kind in range(ROWS)])


def place_beside(threads: Threads) -> None:
    """Put on streams what goes on beside ops: of the program, and what the runtime adds to it."""
    place_alone(threads)
    wait_for_gradients(threads)
    place_unwritten_sums(threads)
    place_unwritten_gathers(threads)
    if threads.columns.is_collective.any():
        place_collectives(threads)


def place_alone(threads: Threads) -> None:
    """Put copies, and what else meets nothing, on streams; ops wait for what that makes."""
    columns = threads.columns
    is_alone = columns.is_beside & ~is_any(columns.kind, *MEETING)
    # Where a rank waits at the end of weights that hop, it stands on the rank's own thread.
    is_alone[threads.awaited[0]] = False
    rows = np.flatnonzero(is_alone)
    if not len(rows):
        return
    # Each rank has a link of its own, where its copies go in its order; or they take turns.
    turn = rows.copy()
    owner = columns.rank[rows]
    if threads.turns is not None:
        is_copy = columns.is_copy[rows]
        link = np.unique(threads.schedule.layout.links, return_inverse=True)[1]
        turn[is_copy] = threads.turns
        owner[is_copy] = link[owner[is_copy]]
    kind = columns.kind[rows]
    stream = _STREAM[kind] * len(threads.schedule.ranks) + owner
    takes = threads.durations.of(kind, columns.stage[rows], columns.microbatch[rows])
    behind = threads.on_ranks.before(rows)
    threads.item[rows] = threads.issue(stream, turn, behind, rows, takes)
    needs = needs_of(threads.schedule)
    is_before = (needs.maker >= 0) & (needs.maker < columns.batch[needs.user])
    is_op = columns.is_computed[needs.user]
    wanted = np.flatnonzero(is_before & is_op & is_alone[needs.maker])
    users = needs.user[wanted]
    threads.wait(threads.item[users], threads.item[needs.maker[wanted]], users)


def place_collectives(threads: Threads) -> None:
    """Put the collectives that the program writes on streams of their ranks, by kind."""
    # A rank begins one after the other, whatever its kind, each once all ranks have come to
    # those before it: so they stand on a stream without duration first. An all-gather to which
    # rank 1 comes later:
    #
    #     rank 0            ── 0B3 ── … ────────────── 0F4
    #                           ╰╌╌╮                  │
    #     begun by rank 0   ─────── ● ─ ●             │
    #                                   ╎╰╌╌╮         │
    #     its stream        ────────────╎── gather ───╯
    #     begun by rank 1   ────────── ● ─ ●
    columns = threads.columns
    sides = sides_of(threads.schedule)
    rows = sides.row
    rank = columns.rank[rows]
    kind = columns.kind[rows]
    items = threads.issue(rank, rows, threads.on_ranks.before(rows), rows, meets=True)
    threads.meet(items, sides.event, rows)
    # Replicas have one event, which takes the longest time that is given for any of them.
    each = threads.durations.of(kind, columns.stage[rows], columns.microbatch[rows])
    takes = np.zeros(int(sides.event.max(initial=-1)) + 1)
    np.maximum.at(takes, sides.event, each)
    takes = takes[sides.event]
    # Where none takes any time, each is over as soon as all its ranks have begun it.
    if takes.any():
        stream = _STREAM[kind] * len(threads.schedule.ranks) + rank
        items = threads.issue(stream, rows, items, rows, takes, meets=True)
        threads.meet(items, sides.event, rows)
    threads.item[rows] = items
    waiters, awaited = threads.awaited
    threads.wait(threads.on_ranks.at(waiters), threads.item[awaited], awaited)
    # What is shown of those that take time: the op that waits, and the last gradient of a sum.
    user = np.full(len(columns), NOTHING)
    is_op = ~columns.is_collective[waiters]
    user[awaited[is_op]] = waiters[is_op]
    timed = rows[takes > 0]
    last = presence(threads.schedule).last
    threads.beside.append(np.stack([threads.item[timed], last[timed], user[timed]]))


def wait_for_gradients(threads: Threads) -> None:
    """Optimizer steps wait for the last gradient of each rank with replicas of the stage."""
    sums = sums_of(threads.schedule)
    there = np.flatnonzero(sums.is_far & (sums.last >= 0))
    if not len(there):
        return
    # One edge for each step and other rank: where its last gradient is, the others are.
    makers = sums.last[there]
    ranks = len(threads.schedule.ranks)
    pairs, which = np.unique(
        sums.step[there] * np.int64(ranks) + threads.columns.rank[makers],
        return_inverse=True,
    )
    last = np.full(len(pairs), NOTHING, np.int64)
    np.maximum.at(last, which, makers)
    users = pairs // ranks
    threads.wait(threads.item[users], threads.item[last], users)


def place_unwritten_sums(threads: Threads) -> None:
    """Put sums of gradients over replicas, where they take time and no program writes them, on
    streams of their own. A sum is issued when its rank has made the last gradient.
    """
    if not threads.costs.sum_times:
        return
    columns = threads.columns
    layout = threads.schedule.layout
    # Replicas have one sum, which takes the longest time that is given for any of them.
    times = threads.costs.fixed_times.counts(threads.costs.sums(len(layout.placement)))
    times = np.reshape(times, (-1, layout.pieces))
    gradients = gradients_of(threads.schedule)
    takes = times.max(axis=0)[gradients.piece]
    pieces = np.array(layout.piece_of)
    written = np.unique(pieces[writes(threads.schedule, SUMS)])
    is_placed = (takes > 0) & ~np.isin(gradients.piece, written)
    gradients = gradients.taken(is_placed)
    last = gradients.last
    event = gradients.piece * layout.updates + gradients.update
    # Sums over replicas outside of the plan go one after the other on each rank. Those within
    # have a stream for each piece, so that all ranks can have them in one order.
    is_alone = counts_of(event)[event] == 1
    ranks = len(threads.schedule.ranks)
    stream = gradients.rank + np.where(is_alone, 0, gradients.piece + 1) * ranks
    turn = np.where(is_alone, last, gradients.update)
    sums = threads.issue(
        stream, turn, threads.item[last], last, takes[is_placed], meets=True
    )
    threads.meet(sums, event, last)
    # Steps wait for them; one that stands before its gradients is found to be wrong elsewhere.
    steps = columns.where(*STEPS)
    piece = pieces[columns.stage[steps]]
    update = np.maximum(columns.microbatch[steps], 0)
    of_step = gradients.of(columns.rank[steps], piece, update)
    is_there = of_step >= 0
    is_there[is_there] = last[of_step[is_there]] < columns.batch[steps[is_there]]
    steps = steps[is_there]
    of_step = of_step[is_there]
    threads.wait(threads.item[steps], sums[of_step], steps)
    # Of several steps on one rank, the first one waits.
    before = np.full(len(sums), NOTHING)
    before[of_step[::-1]] = steps[::-1]
    threads.beside.append(np.stack([sums, last, before]))


def place_unwritten_gathers(threads: Threads) -> None:
    """Put gathers of sharded weights, where they take time and no program writes them, on a
    stream of each rank. A gather is issued when its rank comes to the op before the one that
    waits for it, or to that one (`schedlang.ranks.shards`); there is a place for all stages of
    a rank.
    """
    if not threads.costs.gather_times:
        return
    columns = threads.columns
    times = threads.costs.fixed_times.counts(
        threads.costs.gathers(len(threads.schedule.placement))
    )
    found = []
    for rank, actions in enumerate(threads.schedule.ranks):
        held = [stage for stage in threads.schedule.stages_of(rank) if times[stage]]
        first = int(columns.first[rank])
        policy = shards(actions, held, max(len(held), 1))
        for index, stage, user in policy.gathers:
            found.append((first + index, first + user, stage))
    rows, users, stages = np.array(found, np.int64).reshape(-1, 3).T
    items = threads.issue(
        columns.rank[rows],
        np.arange(len(rows)),
        threads.on_ranks.before(rows),
        rows,
        times[stages],
    )
    threads.wait(threads.item[users], items, users)
    threads.beside.append(np.stack([items, np.full(len(items), NOTHING), users]))
