"""How a plan lies in its file, so that a rank can read its own part and no more.

The file is one JSON document. Its last fields are `actions` and `sources`, with one line of text
for each rank, and each on a line of the file; `lines` before them has how long these are, and a
hash of both. So what stands before `actions` tells where each rank's part is, and what must be in
it.
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

#: What stands before the lines of `actions`, between them and those of `sources`, and around each.
_ACTIONS = b'\n "actions": [\n'
_SOURCES = b'\n ],\n "sources": [\n'
_END = b"\n ]\n}\n"
_OPENS = b'  "'
_CLOSES = b'"'
_NEXT = b",\n"
_BETWEEN = len(_CLOSES + _NEXT + _OPENS)


class Line(NamedTuple):
    """What `lines` tells of a rank: the lengths of its two lines, and their hash."""

    actions: int
    sources: int
    sha256: str


def line_of(actions: str, sources: str) -> Line:
    """What `lines` tells of a rank's two lines."""
    return Line(
        len(actions), len(sources), hashlib.sha256(f"{actions}\n{sources}".encode()).hexdigest()
    )


def encode(head: dict[str, Any], actions: Sequence[str], sources: Sequence[str]) -> bytes:
    """The file of a plan, from all its fields before the lines and the lines."""
    lines = list(map(line_of, actions, sources))
    text = json.dumps(head | {"lines": lines}, indent=1).removesuffix("\n}").encode()
    return text + b"," + _ACTIONS + _SOURCES.join(map(_block, (actions, sources))) + _END


def _block(lines: Sequence[str]) -> bytes:
    return _NEXT.join(_OPENS + line.encode() + _CLOSES for line in lines)


def decode_head(path: Path) -> tuple[Any, int]:
    """What stands before the actions, and where these begin; OSError or ValueError if it cannot be
    read.
    """
    with path.open("rb") as file:
        text = bytearray()
        for line in file:
            text += line
            if text.endswith(_ACTIONS):
                return json.loads(text.removesuffix(b"," + _ACTIONS) + b"}"), len(text)
    raise ValueError("it has no lines of `actions` of its own")


class Parts(Sequence[Actions]):
    """The actions of each rank, which are read from a plan file when they are asked for.

    `read` makes the actions of a rank out of its two lines. CompileError if the file is not the
    same by then.
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
        # From the first character of a line to the first one of the next.
        lengths = (each.actions + _BETWEEN for each in lines)
        self._actions = list(accumulate(lengths, initial=begin + len(_OPENS)))
        end = self._actions[-1] - _BETWEEN + len(_CLOSES + _SOURCES + _OPENS)
        self._sources = list(accumulate((each.sources + _BETWEEN for each in lines), initial=end))
        self._known: dict[int, Actions] = {}

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, rank: int) -> Actions: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Actions]: ...

    def __getitem__(self, rank: int | slice) -> Actions | list[Actions]:
        if isinstance(rank, slice):
            return [self[each] for each in range(len(self))[rank]]
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
            help = "write it again with `schedc compile -o`"
            raise plan_error(
                self._path, f"the part of rank {rank} has changed since it was written", help=help
            )
        return self._read(rank, actions, sources)


def plan_error(path: str | Path, message: str, *, help: str | None = None) -> CompileError:
    """The error for a plan file as a whole."""
    return CompileError([Diagnostic("plan", f"`{path}`: {message}", help=help, file=str(path))])
