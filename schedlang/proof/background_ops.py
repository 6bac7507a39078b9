"""Ops on a stream of their rank that meet no other rank, such as copies to the host: is each one
needed, and when does it run?
"""

import numpy as np

from schedlang.proof.structure import unit_slots
from schedlang.proof.threads import Threads
from schedlang.schedule.arrays import is_any
from schedlang.schedule.columns import STREAMS
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import AWAY, BACK, MEETS, OF_STAGE, REPEATS
from schedlang.schedule.schedule import Schedule


def wrong_structure(schedule: Schedule) -> list[Finding]:
    """The first activations that are offloaded but not there, or never brought back; or that their
    own rank would keep.
    """
    columns = schedule.columns
    away = columns.where(*AWAY)
    back = columns.where(*BACK)
    if not len(away) and not len(back):
        return []
    # What may become of the activations of a microbatch on a stage:
    #
    #     F ──── OFFLOAD ──── RELOAD ──── B        right
    #     F ──── OFFLOAD ──────────────── B        never back
    #     F ───────────────── RELOAD ──── B        never away
    #     F ──── OFFLOAD ── … ──── R ──── B        dropped: there was nothing to offload
    away_slots = unit_slots(columns, away)
    back_slots = unit_slots(columns, back)
    again_slots = unit_slots(columns, columns.where(*REPEATS))
    dropped = away[np.isin(away_slots, again_slots)]
    never_back = away[~np.isin(away_slots, back_slots)]
    own = [
        rank for rank, keeper in enumerate(schedule.layout.keepers) if keeper == rank
    ]
    to_itself = away[np.isin(columns.rank[away], own)]
    never_away = back[~np.isin(back_slots, away_slots)]
    wrong = (
        (dropped, "offloaded, but dropped after the forward: `R` makes them again"),
        (never_back, "offloaded, and never reloaded"),
        (never_away, "reloaded, and never offloaded"),
        (
            to_itself,
            "offloaded, and the rank keeps its own: `keeper` must name another one",
        ),
    )
    # The first is that of the stage and microbatch whose ops begin first.
    ops = np.flatnonzero(~columns.is_transfer & ~is_any(columns.kind, *OF_STAGE))
    slots, first = np.unique(unit_slots(columns, ops), return_index=True)
    candidates = []
    for rows, what in wrong:
        begins = ops[first[np.searchsorted(slots, unit_slots(columns, rows))]]
        for begin, row in zip(begins.tolist(), rows.tolist(), strict=True):
            candidates.append((begin, row, what))
    if not candidates:
        return []
    _, row, what = min(candidates, key=lambda candidate: candidate[0])
    microbatch = int(columns.microbatch[row])
    stage = int(columns.stage[row])
    names = schedule.names
    which = f"{names.noun} {names.microbatch(microbatch)}"
    message = f"the activations of {which} on stage {names.stage(stage)} are {what}"
    return [
        Finding("offload", message, int(columns.rank[row]), int(columns.source[row]))
    ]


def place(threads: Threads) -> None:
    """Put each op on its stream."""
    columns = threads.columns
    is_alone = columns.is_beside & ~is_any(columns.kind, *MEETS)
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
    # The two streams of copies, out and in, share the link.
    of_stream = np.where(columns.is_copy[rows], AWAY[0], kind)
    stream = STREAMS[of_stream] * len(threads.schedule.ranks) + owner
    takes = threads.durations.of(kind, columns.stage[rows], columns.microbatch[rows])
    behind = threads.on_ranks.before(rows)
    threads.item[rows] = threads.issue(stream, turn, behind, rows, takes)
