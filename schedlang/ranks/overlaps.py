"""Forwards and backwards that a rank runs at the same time."""

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import MAKERS, Kind


def overlapped_pairs(actions: Actions) -> dict[int, int]:
    """For each overlap of a rank, the index of its forward and that of its backward, `B` or `I`. An
    overlap with several forwards or several backwards has no such pair.
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
