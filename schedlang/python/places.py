"""Where in a script something was called, and its files as a `Source`, so that messages show lines
of Python.
"""

import linecache
import os
import sys
from collections.abc import Iterable
from itertools import islice
from types import CodeType

from attrs import define, field, frozen

from schedlang.diagnostics.source import Source, Span

_PACKAGE = __name__.rpartition(".")[0]


@frozen
class Place:
    """A place in a script: an instruction of some code."""

    code_object: CodeType
    instruction: int
    line: int

    @property
    def file(self) -> str:
        """The path of the file, as short as it can be from where the script runs."""
        path = self.code_object.co_filename
        below = os.path.join(os.getcwd(), "")
        return path.removeprefix(below)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def columns(self) -> tuple[int, int, int, int] | None:
        """The line and column of its first character and of its end, if Python knows them; lines
        are counted from 1, columns in bytes.
        """
        # As tracebacks find them: there is one entry for each instruction of two bytes.
        start, end, column, end_column = next(
            islice(self.code_object.co_positions(), self.instruction // 2, None)
        )
        if start is None or end is None or column is None or end_column is None:
            return None
        return start, column, end, end_column


def caller() -> Place:
    """The place outside of this package that the call under way comes from."""
    frame = sys._getframe(1)
    # Out of this package, to the frame of the script.
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return Place(frame.f_code, frame.f_lasti, frame.f_lineno)


@define
class Script:
    """The files of some places as one source, in which every place has a span."""

    source: Source
    _starts: dict[str, int]
    _spans: dict[Place, Span] = field(factory=dict)

    @classmethod
    def of(cls, places: Iterable[Place]) -> "Script":
        """The files of these places; that of the first one comes first."""
        last_lines: dict[str, int] = {}
        for place in places:
            name = place.code_object.co_filename
            last_lines[name] = max(last_lines.get(name, 0), place.line)
        text = ""
        starts: dict[str, int] = {}
        files: list[tuple[str, int]] = []
        for name, last in last_lines.items():
            if files:
                text += "\n"
            starts[name] = len(text)
            shown = name.removeprefix(os.path.join(os.getcwd(), ""))
            files.append((shown, len(text)))
            lines = linecache.getlines(name)
            # What is typed at a prompt has no file: its lines are empty.
            lines += ["\n"] * (last - len(lines))
            text += "".join(lines)
        return cls(Source(files[0][0], text, tuple(files[1:])), starts)

    def span(self, place: Place) -> Span:
        """The span of a place."""
        if place not in self._spans:
            self._spans[place] = self._find(place)
        return self._spans[place]

    def _find(self, place: Place) -> Span:
        columns = place.columns()
        if columns is None:
            start = self._offset(place, place.line, 0)
            return Span(start, start + len(self.source.line(start)))
        line, column, end_line, end_column = columns
        return Span(
            self._offset(place, line, column), self._offset(place, end_line, end_column)
        )

    def _offset(self, place: Place, line: int, column: int) -> int:
        """Where a column of a line of a place's file is, in the text of all files."""
        start = self._starts[place.code_object.co_filename]
        for _ in range(line - 1):
            start = self.source.text.index("\n", start) + 1
        # Python counts bytes.
        before = self.source.line(start).encode()[:column]
        return start + len(before.decode(errors="ignore"))
