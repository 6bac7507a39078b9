"""How long ops and messages take, by the costs: of all actions at once."""

import numpy as np

from schedlang.schedule.arrays import Floats, Ints
from schedlang.schedule.columns import Columns
from schedlang.schedule.costs import Durations, Transfers
from schedlang.schedule.kinds import RECEIVES
from schedlang.schedule.layout import Layout


def latencies(layout: Layout, transfers: Transfers) -> Floats:
    """How long each message takes, by what it brings, and the number of its receive."""
    table = np.zeros((max(RECEIVES) + 1, len(layout.all_numbers)))
    for made, receive in RECEIVES.items():
        for number in layout.all_numbers:
            stage, other = layout.ends(receive, number)
            sender = layout.peer(receive, number)
            if sender is not None:
                earlier = min(stage, other)
                receiver = layout.placement[stage]
                table[made, number] = transfers.time(made, earlier, sender, receiver)
    return table


def op_ends(columns: Columns, ops: Ints, durations: Durations) -> Floats:
    """For each op, its end after the start of the ops that it overlaps with."""
    kind = columns.kind[ops]
    stage = columns.stage[ops]
    microbatch = columns.microbatch[ops]
    after = durations.of(kind, stage, microbatch)
    heads = columns.batch[ops]
    is_alone = columns.sizes[ops] == 1
    if is_alone.all():
        return after
    # Overlaps come in few combinations of kinds and stages: each is asked for once. Only where
    # durations differ by microbatch, each is one of its own.
    known: dict[tuple[tuple[int, int, int], ...], list[float]] = {}
    unit = microbatch if durations.by_unit else np.zeros_like(microbatch)
    overlapping = np.flatnonzero(~is_alone)
    starts = overlapping[heads[overlapping] == ops[overlapping]]
    sizes = columns.sizes[ops[starts]]
    words = list(zip(kind.tolist(), stage.tolist(), unit.tolist(), strict=True))
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        group = tuple(words[start : start + size])
        if group not in known:
            known[group] = durations.ends(group)
        after[start : start + size] = known[group]
    return after
