"""A repair of a program, as data: edits of its text, or another transport."""

from typing import Any

from attrs import frozen

from schedlang.diagnostics.source import Source, Span


@frozen
class Edit:
    """A new text for a piece of the program."""

    span: Span
    text: str


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
        edits = sorted(self.edits, key=lambda edit: (edit.span.start, edit.span.end), reverse=True)
        for edit in edits:
            text = text[: edit.span.start] + edit.text + text[edit.span.end :]
        return Source(source.path, text)

    def to_json(self, source: Source) -> dict[str, Any]:
        """The repair for programs; positions are lines and columns, counted from 1."""
        edits = []
        for edit in self.edits:
            line, column = source.position(edit.span.start)
            end_line, end_column = source.position(edit.span.end)
            start = {"line": line, "column": column}
            end = {"line": end_line, "column": end_column}
            edits.append({"start": start, "end": end, "text": edit.text})
        return {"text": self.text, "edits": edits, "transport": self.transport}
