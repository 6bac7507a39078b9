"""The text of a program, and where something is in it."""

from bisect import bisect_left
from functools import cached_property

from attrs import field, frozen

from schedlang.diagnostics.wrong_arguments import check_type


@frozen
class Span:
    """The characters from `start` up to `end` of a source's text."""

    start: int
    end: int


@frozen
class Label:
    """A span of the program, and what a message says about it."""

    span: Span
    text: str = ""


@frozen
class Source:
    """The text of a program, and the path that messages give for it.

    The texts of the files that it imports follow its own, so that one number says where something
    is. `imports` has the path of each of these files, and where its text starts.
    """

    path: str
    text: str = field(repr=False)
    imports: tuple[tuple[str, int], ...] = ()

    def __attrs_post_init__(self) -> None:
        check_type("path", self.path, str, "text: the path that messages give")
        check_type(
            "text",
            self.text,
            str,
            "the text of a program; `read_source` reads it from a file",
        )

    @property
    def alone(self) -> "Source":
        """The program without the texts of the files that it imports."""
        # The texts of all files stand one behind the other, with a line break between any two:
        #
        #    own text ⏎ text of the first import ⏎ text of the second
        #             ↑ ends here
        ends = [start - 1 for _, start in self.imports[:1]]
        return Source(self.path, self.text[: ends[0] if ends else None])

    @property
    def is_plan(self) -> bool:
        """Whether the text is that of a plan: it begins with `{`, and a program never does."""
        return self.text.lstrip().startswith("{")

    def file(self, offset: int) -> tuple[str, int]:
        """The file that a character is in, and where the file's text starts."""
        file = self.path, 0
        for path, start in self.imports:
            if start <= offset:
                file = path, start
        return file

    def position(self, offset: int) -> tuple[int, int]:
        """The line and the column of a character in its file, both counted from 1."""
        file_start = self.file(offset)[1]
        # How many lines of the whole text end before the file, and before the character.
        before_file = bisect_left(self._newlines, file_start)
        before = bisect_left(self._newlines, offset)
        line_start = file_start
        if before > before_file:
            line_start = self._newlines[before - 1] + 1
        return before - before_file + 1, offset - line_start + 1

    def where(self, offset: int) -> str:
        """The line that a character is in, as `file:line`."""
        return f"{self.file(offset)[0]}:{self.position(offset)[0]}"

    def line(self, offset: int) -> str:
        """The text of the line that a character is in."""
        line_start = self.text.rfind("\n", 0, offset) + 1
        # The first line of an imported file need not begin behind a line end.
        start = max(line_start, self.file(offset)[1])
        return self.text[start:].partition("\n")[0]

    @cached_property
    def _newlines(self) -> list[int]:
        """Where lines end, looked up once: a table of torch has many lines, each cell of which is a
        place.
        """
        return [index for index, character in enumerate(self.text) if character == "\n"]
