"""Ranks that wait, as messages show them, from actions of a schedule."""

from attrs import frozen

from schedlang.diagnostics.waiting_ranks import Recorded, Stand, Wait
from schedlang.schedule.schedule import Schedule

#: An action: its rank and its index there.
Place = tuple[int, int]


@frozen
class Edge:
    """A wait between actions of a schedule, see `Wait`; of a transfer `alone`, its rank does not
    wait.
    """

    at: Place
    reason: str
    until: Place | None = None
    alone: bool = False
    what: str = "transfer"


def describe(schedule: Schedule, edges: list[Edge]) -> tuple[Wait, ...]:
    """Waits as messages show them; the compiler adds the loop variables of the program."""

    def stand(place: Place) -> Stand:
        rank, index = place
        actions = schedule.ranks[rank]
        spans = schedule.spans
        span = (
            spans[actions.source[index]] if actions.source[index] < len(spans) else None
        )
        return Stand(
            rank,
            schedule.name_of(rank, index),
            span,
            actions.stage[index],
            _recorded(schedule, place),
            _earlier(schedule, place),
        )

    return tuple(
        Wait(
            stand(edge.at),
            edge.reason,
            None if edge.until is None else stand(edge.until),
            f"a transfer of rank {edge.at[0]}" if edge.alone else f"rank {edge.at[0]}",
            edge.what,
        )
        for edge in edges
    )


def _recorded(schedule: Schedule, place: Place) -> tuple[Recorded, ...]:
    """What an action may have been recorded as: in a schedule without a flush, one of the updates'
    ops. A transfer that the compiler placed is taken for the op that it came from.
    """
    kind, number, microbatch, source, _ = schedule.ranks[place[0]].row(place[1])
    stage = schedule.layout.stage_of(kind, number)
    step = schedule.layout.units_of_update(stage)
    updates = range(schedule.layout.updates)
    return tuple((source, stage, microbatch - update * step) for update in updates)


def _earlier(schedule: Schedule, place: Place) -> int:
    """How often a rank has the same action, from the same place of the program, before."""
    actions = schedule.ranks[place[0]]
    row = actions.row(place[1])[:4]
    return sum(actions.row(index)[:4] == row for index in range(place[1]))
