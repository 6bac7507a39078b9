"""Ranks that wait, as messages show them, from actions of a schedule."""

from attrs import frozen

from schedlang.diagnostics.waits import Stand, Values, Wait
from schedlang.schedule.schedule import Recorded, Schedule

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
    """Waits as messages show them; all at once, since for loop variables the program is run
    again.
    """
    places = {place for edge in edges for place in (edge.at, edge.until) if place is not None}
    values = _values(schedule, sorted(places))

    def stand(place: Place) -> Stand:
        rank, index = place
        actions = schedule.ranks[rank]
        spans = schedule.spans
        span = spans[actions.source[index]] if actions.source[index] < len(spans) else None
        return Stand(rank, actions.word(index), span, values[place])

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


def _values(schedule: Schedule, places: list[Place]) -> dict[Place, Values]:
    """The loop variables at actions; none where they come from no program.

    A transfer that the compiler placed has those of the op that it came from.
    """
    if schedule.recall is None:
        return dict.fromkeys(places, ())
    ops = {place: _recorded(schedule, place) for place in places}
    found = schedule.recall(frozenset(op for each in ops.values() for op in each))
    values: dict[Place, Values] = {}
    for place, candidates in ops.items():
        noted = next((found[op] for op in candidates if op in found), [])
        values[place] = (
            noted[_earlier(schedule, place)] if _earlier(schedule, place) < len(noted) else ()
        )
    return values


def _recorded(schedule: Schedule, place: Place) -> list[Recorded]:
    """What an action may have been recorded as: in a schedule without a flush, one of the updates'
    ops.
    """
    kind, number, microbatch, source, _ = schedule.ranks[place[0]].row(place[1])
    stage = schedule.layout.stage_of(kind, number)
    step = schedule.layout.units(stage) // schedule.layout.updates
    return [
        (source, stage, microbatch - update * step) for update in range(schedule.layout.updates)
    ]


def _earlier(schedule: Schedule, place: Place) -> int:
    """How often a rank has the same action, from the same place of the program, before."""
    actions = schedule.ranks[place[0]]
    row = actions.row(place[1])[:4]
    return sum(actions.row(index)[:4] == row for index in range(place[1]))
