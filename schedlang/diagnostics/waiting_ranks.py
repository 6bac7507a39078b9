"""Ranks that wait, as messages show them: at which action, why, and for which other action."""

from typing import Any

from attrs import frozen

from schedlang.diagnostics.source import Label, Source, Span

#: Loop variables and their values, the outermost loop first.
Values = tuple[tuple[str, int], ...]
#: An op as a program recorded it: its place in the program, its stage, its microbatch.
Recorded = tuple[int, int, int]

#: Why a rank waits, and how a message says what it waits for. `{at}` and `{until}` are actions.
REASONS = {
    "partner": (
        "{who} waits here, at {at}",
        "until rank {rank} comes here, to {until}",
    ),
    "stream": (
        "{who} waits here, at {at}",
        "until the stream of rank {rank} comes here, to {until}",
    ),
    "sum": (
        "{who} waits here for the sum of gradients, at {at}",
        "until rank {rank} comes here, to {until}",
    ),
    "collective": (
        "{who} waits for its replicas here, at {at}",
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
    # Nothing of the other rank belongs to it, so there is only one line to say.
    "never matched": ("{who} waits here, at {at}", ""),
}


@frozen
class Stand:
    """Where a rank stands: an action, the span of the program that it comes from, if there is one,
    and the loop variables there.

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
        values = [f"{name} = {value}" for name, value in self.variables]
        if not values:
            return f"`{self.action}`"
        return f"`{self.action}`, with {', '.join(values)}"

    def to_json(self, source: Source) -> dict[str, Any]:
        """The action for programs; an action that the compiler has put in has no position."""
        # Without a span, all three are null, so that every program that reads this finds the keys.
        file = None
        line = None
        column = None
        if self.span:
            file = source.file(self.span.start)[0]
            line, column = source.position(self.span.start)
        return {
            "rank": self.rank,
            "action": self.action,
            "file": file,
            "line": line,
            "column": column,
            "variables": dict(self.variables),
        }


@frozen
class Wait:
    """A rank waits `at` an action for another one, for a reason in `REASONS`; `until` is None if
    there is no such action.

    `who` says in words what waits: the rank, or only a transfer of it. At the first use of a
    communicator, `what` says which one.
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
        """What a message says at the two actions, where these are in the program."""
        here, there = REASONS[self.reason]
        values = {
            "who": self.who,
            "at": self.at,
            "rank": self.until.rank if self.until else None,
            "until": self.until,
            "what": self.what,
        }
        labels = []
        if self.at.span:
            labels.append(Label(self.at.span, here.format(**values)))
        if self.until and self.until.span:
            labels.append(Label(self.until.span, there.format(**values)))
        return labels

    def to_json(self, source: Source) -> dict[str, Any]:
        """The wait for programs."""
        until = self.until.to_json(source) if self.until else None
        return {**self.at.to_json(source), "reason": self.reason, "released_by": until}
