"""Places of a text as the protocol has them: lines and UTF-16 units, both counted from 0."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from lsprotocol import types

from schedlang.diagnostics.source import Span


class Lines:
    """The lines of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts = [0]
        self._starts += [
            index + 1 for index, character in enumerate(text) if character == "\n"
        ]

    def position(self, offset: int) -> types.Position:
        """The position of a character."""
        line = bisect_right(self._starts, offset) - 1
        before = self._text[self._starts[line] : offset]
        return types.Position(line, _units(before))

    def offset(self, position: types.Position) -> int:
        """The character at a position; at the end of its line for one beyond that."""
        if position.line >= len(self._starts):
            return len(self._text)
        start = self._starts[position.line]
        line = self._text[start:].partition("\n")[0]
        units = 0
        # UTF-16 is what the protocol counts in: a character beyond the first 65,536, as in some
        # scripts and all emojis, has two units there and is one in Python.
        for number, character in enumerate(line):
            if units >= position.character:
                return start + number
            units += _units(character)
        return start + len(line)

    def range(self, span: Span) -> types.Range:
        """The range of a span."""
        return types.Range(self.position(span.start), self.position(span.end))

    def line_of(self, offset: int) -> int:
        """The line that a character is in."""
        return bisect_right(self._starts, offset) - 1


@lru_cache(16)
def lines_of(text: str) -> Lines:
    """The lines of a text, which many answers ask for."""
    return Lines(text)


def _units(text: str) -> int:
    """How many UTF-16 units a text has."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
