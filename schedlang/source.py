"""Program text and places in it."""

from pathlib import Path

from attrs import field, frozen

from schedlang.diagnostics import CompileError, Diagnostic


@frozen
class Span:
    """Characters `start` up to `end` of a program's text."""

    start: int
    end: int


@frozen
class Source:
    """A program's text and the name that messages give it."""

    path: str
    text: str = field(repr=False)

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of a character."""
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1

    def line(self, number: int) -> str:
        """The text of a line, counted from 1."""
        lines = self.text.split("\n")
        return lines[number - 1] if number <= len(lines) else ""


def read_source(path: str | Path) -> Source:
    """The program in a file; CompileError when it cannot be read as text."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise unreadable(path, f"byte {error.start} is not UTF-8 text") from None
    return Source(str(path), text.removeprefix("\ufeff").replace("\r\n", "\n"))


def unreadable(path: str | Path, reason: str) -> CompileError:
    """The error for a file whose content never became text."""
    return CompileError([Diagnostic("unreadable", f"cannot read `{path}`: {reason}", file=str(path))])
