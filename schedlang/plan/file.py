"""How a plan lies in its file, so that a rank can read its own part and no more.

The file is one JSON document. Its last fields are `actions` and `sources`. Both have one line of
text for each rank, which is a line of the file too. The field `lines` before them has the lengths
of these lines, and their hashes. So whoever has read the file up to `actions` knows where the part
of each rank is, and what must be in it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, overload

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.files.reading import unreadable
from schedlang.schedule.actions import Actions

#     {
#      "format": "schedlang.plan/1",
#      …                                      the head: all other fields
#      "lines": [[7, 3, "5f…"], …],           lengths and hash of rank 0's two lines, …
#      "actions": [
#       "0F0 0B0",                            rank 0; the lines begin with the blanks in front of it
#       "1F0 1B0"                             rank 1
#      ],
#      "sources": [
#       "1 2",
#       "1 2"
#      ]
#     }

# The bytes before the lines of `actions`, between these and the lines of `sources`, and at the end.
ACTIONS = b'\n "actions": [\n'
SOURCES = b'\n ],\n "sources": [\n'
END = b"\n ]\n}\n"
# The bytes before a line, behind it, and between two lines.
OPENS = b'  "'
CLOSES = b'"'
NEXT = b",\n"
_BETWEEN = len(CLOSES + NEXT + OPENS)


class Line(NamedTuple):
    """An entry of the field `lines`: the lengths of a rank's two lines, and their hash."""

    actions: int
    sources: int
    sha256: str


def line_of(actions: str, sources: str) -> Line:
    """The entry of the field `lines` for a rank's two lines."""
    both = f"{actions}\n{sources}"
    return Line(len(actions), len(sources), hashlib.sha256(both.encode()).hexdigest())


def decode_head(path: Path) -> tuple[Any, int]:
    """The fields before `actions`, and where in the file the lines of `actions` begin; OSError or
    ValueError if they cannot be read.
    """
    with path.open("rb") as file:
        text = bytearray()
        for line in file:
            text += line
            if text.endswith(ACTIONS):
                # A document by itself, if it is closed here.
                head = text.removesuffix(b"," + ACTIONS) + b"}"
                return decode(head), len(text)
    raise ValueError("it has no lines of `actions` of its own")


def decode(text: bytes | bytearray) -> Any:
    """A document; ValueError if it is none, or says a thing twice."""
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{ascii(twice)[1:-1]}` is there twice in one object")
    return fields


def _no_number(text: str) -> Any:
    raise ValueError(f"`{text}` is no number")


class Parts(Sequence[Actions]):
    """The actions of each rank, read from the plan file when somebody asks for them.

    `read` makes the actions of a rank from its number and its two lines. CompileError if the file
    has changed since its head was read.
    """

    def __init__(
        self,
        path: Path,
        lines: Sequence[Line],
        begin: int,
        read: Callable[[int, str, str], Actions],
    ) -> None:
        self.lines = lines
        self._path = path
        self._read = read
        # Where each line begins; each is followed by what is between two lines.
        steps = [line.actions + _BETWEEN for line in lines]
        self._actions = list(accumulate(steps, initial=begin + len(OPENS)))
        end = self._actions[-1] - _BETWEEN
        first = end + len(CLOSES + SOURCES + OPENS)
        steps = [line.sources + _BETWEEN for line in lines]
        self._sources = list(accumulate(steps, initial=first))
        #: What was read before.
        self._known: dict[int, Actions] = {}

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, rank: int) -> Actions: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Actions]: ...

    def __getitem__(self, rank: int | slice) -> Actions | list[Actions]:
        if isinstance(rank, slice):
            return [self[number] for number in range(len(self))[rank]]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        if rank not in self._known:
            self._known[rank] = self._part(rank)
        return self._known[rank]

    def _part(self, rank: int) -> Actions:
        line = self.lines[rank]
        try:
            with self._path.open("rb") as file:
                file.seek(self._actions[rank])
                actions = file.read(line.actions).decode(errors="replace")
                file.seek(self._sources[rank])
                sources = file.read(line.sources).decode(errors="replace")
        except OSError as error:
            raise unreadable(self._path, error.strerror or str(error)) from None
        if line_of(actions, sources) != line:
            message = f"the part of rank {rank} has changed since it was written"
            help = "write it again with `schedc compile -o`"
            raise plan_error(self._path, message, help=help)
        return self._read(rank, actions, sources)


def plan_error(
    path: str | Path, message: str, *, help: str | None = None
) -> CompileError:
    """The error for a plan file as a whole."""
    return CompileError(
        [Diagnostic("plan", f"`{path}`: {message}", help=help, file=str(path))]
    )
