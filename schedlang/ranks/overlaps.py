"""Forwards and backwards that a rank runs side by side."""

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import MAKERS, Kind


def overlapped_pairs(actions: Actions) -> dict[int, int]:
    """Of the ops that a rank runs as one, each forward with the backward beside it, `B` or `I`, by
    their indices. An overlap with more than one of either has none.
    """
    pairs: dict[int, int] = {}
    for batch in actions.batches():
        if len(batch) < 2:
            continue
        forwards = [index for index in batch if actions.kind[index] == Kind.F]
        backwards = [index for index in batch if actions.kind[index] in MAKERS[Kind.B]]
        if len(forwards) == len(backwards) == 1:
            pairs[forwards[0]] = backwards[0]
    return pairs
