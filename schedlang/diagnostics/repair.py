"""A repair of a program, as data: edits of its text, or another transport."""

from typing import Any

from attrs import frozen

from schedlang.diagnostics.source import Source, Span


@frozen
class Edit:
    """Another text in place of a piece of the program."""

    span: Span
    text: str


@frozen
class Repair:
    """What to do, in words; the edits that do it, or the transport to compile for instead."""

    text: str
    edits: tuple[Edit, ...] = ()
    transport: str | None = None

    def apply(self, source: Source) -> Source:
        """The program with the edits."""
        text = source.text
        for edit in sorted(
            self.edits, key=lambda edit: (edit.span.start, edit.span.end), reverse=True
        ):
            text = text[: edit.span.start] + edit.text + text[edit.span.end :]
        return Source(source.path, text)

    def to_json(self, source: Source) -> dict[str, Any]:
        """The repair as machines read it; positions are lines and columns from 1."""
        edits = []
        for edit in self.edits:
            (line, column) = source.position(edit.span.start)
            (end_line, end_column) = source.position(edit.span.end)
            start = {"line": line, "column": column}
            end = {"line": end_line, "column": end_column}
            edits.append({"start": start, "end": end, "text": edit.text})
        return {"text": self.text, "edits": edits, "transport": self.transport}
