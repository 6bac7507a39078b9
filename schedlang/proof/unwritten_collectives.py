"""The events of sums and gathers that no program writes, where the costs give them a duration."""

import numpy as np

from schedlang.proof.graph import NOTHING
from schedlang.proof.presence import writes
from schedlang.proof.threads import Threads
from schedlang.ranks.gather_order import shards
from schedlang.schedule.arrays import counts_of
from schedlang.schedule.kinds import STEPS, SUMS
from schedlang.schedule.needed_gradients import gradients_of


def place(threads: Threads) -> None:
    """Put the sums and gathers on streams of their ranks; the ops that need them wait for them."""
    if threads.costs.sum_times:
        _place_sums(threads)
    if threads.costs.gather_times:
        _place_gathers(threads)


def _place_sums(threads: Threads) -> None:
    """Put sums of gradients over replicas on streams of their own. A sum is issued when its rank
    has made the last gradient.
    """
    columns = threads.columns
    layout = threads.schedule.layout
    # Replicas have one sum, which takes the longest time that is given for any of them.
    times = threads.costs.fixed_times.counts(threads.costs.sums(len(layout.placement)))
    pieces = np.array(layout.piece_of)
    longest = np.zeros(layout.pieces, times.dtype)
    np.maximum.at(longest, pieces, times)
    gradients = gradients_of(threads.schedule)
    takes = longest[gradients.piece]
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


def _place_gathers(threads: Threads) -> None:
    """Put gathers of sharded weights on a stream of each rank. A gather is issued when its rank
    comes to the op before the one that waits for it, or to that one
    (`schedlang.ranks.gather_order`); there is a place for all stages of a rank.
    """
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
