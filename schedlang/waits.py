"""Ranks that wait, as messages show them: where each stands and why, and what would release it."""

from typing import Any

from attrs import frozen

from schedlang.diagnostics import Label
from schedlang.schedule import Recorded, Schedule, Values
from schedlang.source import Source, Span

#: An action: its rank and its index there.
Place = tuple[int, int]

#: Why a rank waits, and how a message says what it waits for. `{at}` and `{until}` are actions.
REASONS = {
    "partner": ("{who} waits here, at {at}", "until rank {rank} comes here, to {until}"),
    "stream": ("{who} waits here, at {at}", "until the stream of rank {rank} comes here, to {until}"),
    "sum": ("{who} waits here for the sum of gradients, at {at}", "until rank {rank} comes here, to {until}"),
    "batch": ("{who} waits here, at {at}", "until rank {rank} is done with the batch here, at {until}"),
    "first use": ("{who} waits here, at its first {what}, {at}", "until rank {rank} comes here, to its own, {until}"),
    "never matched": ("{who} waits here, at {at}", ""),
}


@frozen
class Stand:
    """An action of a rank, its place in the program if it has one, and the loop variables there."""

    rank: int
    action: str
    span: Span | None
    variables: Values

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {value}" for name, value in self.variables)
        return f"`{self.action}`{f', with {values}' if values else ''}"

    def to_json(self, source: Source) -> dict[str, Any]:
        """The stand as machines read it."""
        place: dict[str, Any] = {"file": None, "line": None, "column": None}
        if self.span:
            line, column = source.position(self.span.start)
            place = {"file": source.file(self.span.start)[0], "line": line, "column": column}
        return {"rank": self.rank, "action": self.action, **place, "variables": dict(self.variables)}


@frozen
class Wait:
    """A rank that waits at an action, for a reason in `REASONS`, until another action; None if that never comes.

    What waits is the rank or, as `who` says, only a transfer; at a first use, `what` is used.
    """

    at: Stand
    reason: str
    until: Stand | None
    who: str
    what: str

    def labels(self) -> list[Label]:
        """The two lines of a message."""
        here, there = REASONS[self.reason]
        rank = self.until.rank if self.until else None
        texts = [(self.at, here), *([(self.until, there)] if self.until else [])]
        names = {"who": self.who, "at": self.at, "rank": rank, "until": self.until, "what": self.what}
        return [Label(stand.span, text.format(**names)) for stand, text in texts if stand.span]

    def to_json(self, source: Source) -> dict[str, Any]:
        """The wait as machines read it."""
        until = self.until.to_json(source) if self.until else None
        return {**self.at.to_json(source), "reason": self.reason, "released_by": until}


@frozen
class Edge:
    """A wait between actions of a schedule, see `Wait`; of a transfer `alone`, its rank does not wait."""

    at: Place
    reason: str
    until: Place | None = None
    alone: bool = False
    what: str = "transfer"


def describe(schedule: Schedule, edges: list[Edge]) -> tuple[Wait, ...]:
    """Waits as messages show them; all at once, since for loop variables the program is run again."""
    places = {place for edge in edges for place in (edge.at, edge.until) if place is not None}
    values = _values(schedule, sorted(places))

    def stand(place: Place) -> Stand:
        rank, index = place
        actions, spans = schedule.ranks[rank], schedule.spans
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
        values[place] = noted[_earlier(schedule, place)] if _earlier(schedule, place) < len(noted) else ()
    return values


def _recorded(schedule: Schedule, place: Place) -> list[Recorded]:
    """What an action may have been recorded as: in a schedule without a flush, one of the updates' ops."""
    _, stage, microbatch, source, _ = schedule.ranks[place[0]].row(place[1])
    step = schedule.layout.units(stage) // schedule.layout.updates
    return [(source, stage, microbatch - update * step) for update in range(schedule.layout.updates)]


def _earlier(schedule: Schedule, place: Place) -> int:
    """How often a rank has the same action, from the same place of the program, before."""
    actions = schedule.ranks[place[0]]
    row = actions.row(place[1])[:4]
    return sum(actions.row(index)[:4] == row for index in range(place[1]))
