"""Ranks that wait, as messages show them: where each stands and why, and what would release it."""

from typing import Any

from attrs import frozen

from schedlang.diagnostics.source import Label, Source, Span

#: Loop variables and their values, the outermost loop first.
Values = tuple[tuple[str, int], ...]
#: An op as a program recorded it: its place in the program, its stage, its microbatch.
Recorded = tuple[int, int, int]

#: Why a rank waits, and how a message says what it waits for. `{at}` and `{until}` are actions.
REASONS = {
    "partner": ("{who} waits here, at {at}", "until rank {rank} comes here, to {until}"),
    "stream": (
        "{who} waits here, at {at}",
        "until the stream of rank {rank} comes here, to {until}",
    ),
    "sum": (
        "{who} waits here for the sum of gradients, at {at}",
        "until rank {rank} comes here, to {until}",
    ),
    "batch": (
        "{who} waits here, at {at}",
        "until rank {rank} is done with the batch here, at {until}",
    ),
    "first use": (
        "{who} waits here, at its first {what}, {at}",
        "until rank {rank} comes here, to its own, {until}",
    ),
    "never matched": ("{who} waits here, at {at}", ""),
}


@frozen
class Stand:
    """An action of a rank, its place in the program if it has one, and the loop variables there.

    `number` is that of its stage or skip. It is one of the ops `recorded` by the program, of which
    the rank has `earlier` ones before it; by these its loop variables are looked up.
    """

    rank: int
    action: str
    span: Span | None
    number: int
    recorded: tuple[Recorded, ...]
    earlier: int
    variables: Values = ()

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {value}" for name, value in self.variables)
        return f"`{self.action}`{f', with {values}' if values else ''}"

    def to_json(self, source: Source) -> dict[str, Any]:
        """The stand as machines read it."""
        place: dict[str, Any] = {"file": None, "line": None, "column": None}
        if self.span:
            line, column = source.position(self.span.start)
            place = {"file": source.file(self.span.start)[0], "line": line, "column": column}
        return {
            "rank": self.rank,
            "action": self.action,
            **place,
            "variables": dict(self.variables),
        }


@frozen
class Wait:
    """A rank that waits at an action, for a reason in `REASONS`, until another action; None if that
    never comes.

    What waits is the rank or, as `who` says, only a transfer; at a first use, `what` is used.
    """

    at: Stand
    reason: str
    until: Stand | None
    who: str
    what: str

    def numbers(self) -> list[int]:
        """The numbers of the stages or skips whose actions are named."""
        return [stand.number for stand in (self.at, self.until) if stand is not None]

    def labels(self) -> list[Label]:
        """The two lines of a message."""
        here, there = REASONS[self.reason]
        rank = self.until.rank if self.until else None
        texts = [(self.at, here), *([(self.until, there)] if self.until else [])]
        names = {
            "who": self.who,
            "at": self.at,
            "rank": rank,
            "until": self.until,
            "what": self.what,
        }
        return [Label(stand.span, text.format(**names)) for stand, text in texts if stand.span]

    def to_json(self, source: Source) -> dict[str, Any]:
        """The wait as machines read it."""
        until = self.until.to_json(source) if self.until else None
        return {**self.at.to_json(source), "reason": self.reason, "released_by": until}
