"""What to do about a mistake, as data: edits of the text of a program, or another transport."""

from typing import Any

from attrs import frozen

from schedlang.diagnostics.source import Source, Span


@frozen
class Edit:
    """A new text for a piece of the program."""

    span: Span
    text: str

    def moved(self, by: int) -> "Edit":
        """The edit where the text stands so many characters further behind."""
        return Edit(Span(self.span.start + by, self.span.end + by), self.text)

    def to_json(self, source: Source) -> dict[str, Any]:
        """The edit for programs; positions are lines and columns, counted from 1."""
        line, column = source.position(self.span.start)
        end_line, end_column = source.position(self.span.end)
        return {
            "start": {"line": line, "column": column},
            "end": {"line": end_line, "column": end_column},
            "text": self.text,
        }


@frozen
class Hint:
    """A help, in words; and the edits that do what it says, where it is that simple."""

    text: str
    edits: tuple[Edit, ...] = ()


def another_word(word: str, place: Span | None) -> Hint:
    """The hint that another word was meant, at a place of the program's text if it stands there."""
    return Hint(f"there is `{word}`", (Edit(place, word),) if place else ())


@frozen
class Repair:
    """What to do, in words; and the edits that do it, or the transport to compile for instead."""

    text: str
    edits: tuple[Edit, ...] = ()
    transport: str | None = None

    def apply(self, source: Source) -> Source:
        """The program with the edits made."""
        text = source.text
        # From the last edit to the first, so that those to come are still where they were.
        edits = sorted(
            self.edits, key=lambda edit: (edit.span.start, edit.span.end), reverse=True
        )
        for edit in edits:
            text = text[: edit.span.start] + edit.text + text[edit.span.end :]
        return Source(source.path, text)

    def to_json(self, source: Source) -> dict[str, Any]:
        """The repair for programs; positions are lines and columns, counted from 1."""
        edits = [edit.to_json(source) for edit in self.edits]
        return {"text": self.text, "edits": edits, "transport": self.transport}
