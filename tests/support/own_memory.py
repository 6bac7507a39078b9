"""The most activations that each rank of a plan holds, counted batch by batch from docs/costs.md, apart
from the compiler.
"""

from schedlang import Kind, Schedule
from tests.support.graph import pieces
from tests.support.own_order import has_backward

#: What lets go of a stage's activation; of a frozen one behind a trained one, the input half does.
GIVES = (Kind.B, Kind.W)


def most_held(schedule: Schedule) -> list[int] | None:
    """The peak of each rank; None where activations are copied away, which takes time."""
    rows = [
        [actions.row(index)[:3] for index in range(len(actions))]
        for actions in schedule.ranks
    ]
    kinds = {row[0] for own in rows for row in own}
    if kinds & {Kind.OFFLOAD, Kind.RELOAD}:
        return None
    trains = bool(kinds & {Kind.B, Kind.I})
    again = {row[1:] for own in rows for row in own if row[0] == Kind.R}
    peaks = []
    for own, actions in zip(rows, schedule.ranks, strict=True):
        held = most = 0
        for batch in actions.batches():
            # All ops of a batch begin together and end together.
            taken = given = 0
            for kind, stage, unit in (own[index] for index in batch):
                if kind == Kind.F:
                    taken += 1
                    stays = trains and has_backward(schedule, stage)
                    given += (stage, unit) in again or not stays
                taken += kind == Kind.R
                is_frozen = kind == Kind.I and (
                    pieces(schedule.layout, stage)[0] in schedule.layout.frozen
                )
                given += kind in GIVES or is_frozen
            most = max(most, held + taken)
            held += taken - given
        peaks.append(most)
    return peaks
