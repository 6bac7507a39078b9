"""Program text and places in it."""

from bisect import bisect_left
from functools import cached_property

from attrs import field, frozen


@frozen
class Span:
    """Characters `start` up to `end` of a source's text."""

    start: int
    end: int


@frozen
class Label:
    """A place in the program and what is to be said about it."""

    span: Span
    text: str = ""


@frozen
class Source:
    """A program's text and the name that messages give it.

    The texts of the files that it imports follow its own; `imports` has the name of each and where
    its text starts.
    """

    path: str
    text: str = field(repr=False)
    imports: tuple[tuple[str, int], ...] = ()

    @property
    def is_plan(self) -> bool:
        """Whether the text is a plan's: it begins with `{`, a program never does."""
        return self.text.lstrip().startswith("{")

    def file(self, offset: int) -> tuple[str, int]:
        """The file that a character is in, and where the file's text starts."""
        started = [each for each in self.imports if each[1] <= offset]
        return started[-1] if started else (self.path, 0)

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column in its file, both from 1, of a character."""
        start = self.file(offset)[1]
        first = bisect_left(self._newlines, start)
        behind = bisect_left(self._newlines, offset)
        return behind - first + 1, offset - (
            self._newlines[behind - 1] if behind > first else start - 1
        )

    def where(self, offset: int) -> str:
        """The line that a character is in, as `file:line`."""
        return f"{self.file(offset)[0]}:{self.position(offset)[0]}"

    def line(self, offset: int) -> str:
        """The text of the line that a character is in."""
        start = max(self.text.rfind("\n", 0, offset) + 1, self.file(offset)[1])
        return self.text[start:].partition("\n")[0]

    @cached_property
    def _newlines(self) -> list[int]:
        """Where lines end: tables of torch's have many lines, and an op in each of their cells."""
        return [index for index, character in enumerate(self.text) if character == "\n"]
