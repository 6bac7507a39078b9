"""What is wrong with a program or a plan, as data; and its renderings: text, JSON, GitHub's
annotations.
"""

import json
from typing import Any

from attrs import evolve, field, frozen

from schedlang.diagnostics.repair import Repair
from schedlang.diagnostics.source import Label, Source
from schedlang.diagnostics.waits import Wait

#: The most columns of a source line that are shown.
_WIDTH = 160

#: The most diagnostics that are shown as text: in a table, one mistake can make every cell behind
#: it wrong.
_MOST = 20


@frozen
class Diagnostic:
    """One mistake: a code word, a message that stands alone, the places it concerns, and the way
    out.

    The first label is the place of the mistake; without labels the mistake concerns `file` as a
    whole. `waits` says which ranks wait, and for whom. A `repair` is proved, and takes the place of
    the help. A warning does not make a program wrong.
    """

    code: str
    message: str
    labels: tuple[Label, ...] = ()
    source: Source | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    help: str | None = None
    file: str | None = None
    waits: tuple[Wait, ...] = ()
    severity: str = "error"
    repair: Repair | None = None

    def with_note(self, note: str) -> "Diagnostic":
        """The diagnostic with one more note."""
        return evolve(self, notes=(*self.notes, note))

    def with_waits(self, waits: tuple[Wait, ...]) -> "Diagnostic":
        """The diagnostic with more to say of the ranks that wait, in its labels as well."""
        labels = tuple(label for wait in waits for label in wait.labels())
        return evolve(self, waits=waits, labels=labels or self.labels)


class CompileError(Exception):
    """Everything found wrong with a program or a plan; `diagnostics` is never empty."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        super().__init__(diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return "\n\n".join(map(to_text, self.diagnostics))


def render(diagnostics: list[Diagnostic], format: str) -> str:
    """Diagnostics as one `text` with the way to their pages, as one `json` document, or for
    `github`.
    """
    if format == "json":
        return json.dumps({"diagnostics": [to_json(each) for each in diagnostics]}, indent=1)
    if format == "github":
        return "\n".join(map(to_github, diagnostics))
    shown = diagnostics[:_MOST]
    noun = diagnostics[0].severity
    count = f"{counted(len(diagnostics), noun)}; " if len(diagnostics) > 1 else ""
    if len(shown) < len(diagnostics):
        count = f"{counted(len(diagnostics), noun)}, the first {_MOST} are shown; "
    codes = dict.fromkeys(each.code for each in diagnostics)
    return "\n\n".join([*map(to_text, shown), f"{count}see: schedc explain {' '.join(codes)}"])


def to_text(diagnostic: Diagnostic) -> str:
    """The diagnostic as people read it: message, source lines with the places underlined, notes,
    help.
    """
    lines = [f"{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}"]
    margin = 1
    if diagnostic.source and diagnostic.labels:
        margin = max(
            len(str(diagnostic.source.position(each.span.start)[0])) for each in diagnostic.labels
        )
        files = dict.fromkeys(diagnostic.source.file(each.span.start) for each in diagnostic.labels)
        for (path, start), arrow in zip(files, ["-->", *[":::"] * len(files)], strict=False):
            labels = [
                each
                for each in diagnostic.labels
                if diagnostic.source.file(each.span.start) == (path, start)
            ]
            line, column = diagnostic.source.position(labels[0].span.start)
            lines += [f"{' ' * margin}{arrow} {path}:{line}:{column}", f"{' ' * margin} |"]
            lines += _excerpts(diagnostic, labels, margin)
            lines.append(f"{' ' * margin} |")
    elif diagnostic.file:
        lines.append(f"{' ' * margin}--> {diagnostic.file}")
    lines += [f"{' ' * margin} = note: {note}" for note in diagnostic.notes]
    if diagnostic.repair:
        lines.append(f"{' ' * margin} = repair: {diagnostic.repair.text}: proved at this size")
    elif diagnostic.help:
        lines.append(f"{' ' * margin} = help: {diagnostic.help}")
    return "\n".join(lines)


def _excerpts(diagnostic: Diagnostic, labels: list[Label], margin: int) -> list[str]:
    """The lines of one file that labels are in, in order."""
    assert diagnostic.source is not None
    lines: list[str] = []
    by_line: dict[int, list[Label]] = {}
    for label in labels:
        by_line.setdefault(diagnostic.source.position(label.span.start)[0], []).append(label)
    for previous, number in zip([None, *sorted(by_line)], sorted(by_line), strict=False):
        if previous is not None and number > previous + 1:
            lines.append("...")
        lines += _excerpt(diagnostic, number, by_line[number], margin)
    return lines


def _excerpt(diagnostic: Diagnostic, number: int, labels: list[Label], margin: int) -> list[str]:
    """One source line, and under it a line for each label that starts there; the first label is
    drawn with ^.

    Of a very long line, what is around its first label; and again for labels further away.
    """
    source = diagnostic.source
    assert source is not None
    columns = [source.position(each.span.start)[1] for each in labels]
    text = source.line(labels[0].span.start).replace("\t", " ")
    cut = max(columns[0] - _WIDTH // 2, 0) if len(text) > _WIDTH else 0
    text = text[cut : cut + _WIDTH]
    lines = [f"{number:>{margin}} | {text}"]
    far: list[Label] = []
    for label, column in zip(labels, columns, strict=True):
        start = column - 1 - cut
        if not 0 <= start <= len(text):
            far.append(label)
            continue
        width = max(1, min(label.span.end - label.span.start, len(text) - start))
        mark = "^" if label is diagnostic.labels[0] else "-"
        lines.append(f"{' ' * margin} | {' ' * start}{mark * width} {label.text}".rstrip())
    return [*lines, *_excerpt(diagnostic, number, far, margin)] if far else lines


def to_json(diagnostic: Diagnostic) -> dict[str, Any]:
    """The diagnostic as machines read it; positions are lines and columns from 1."""
    source = diagnostic.source

    def position(offset: int) -> dict[str, int]:
        assert source is not None
        line, column = source.position(offset)
        return {"line": line, "column": column}

    def file(label: Label) -> str:
        assert source is not None
        return source.file(label.span.start)[0]

    labels = [
        {
            "file": file(each),
            "start": position(each.span.start),
            "end": position(each.span.end),
            "text": each.text,
        }
        for each in diagnostic.labels
    ]
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "file": labels[0]["file"] if labels else source.path if source else diagnostic.file,
        "start": labels[0]["start"] if labels else None,
        "end": labels[0]["end"] if labels else None,
        "labels": labels,
        "notes": list(diagnostic.notes),
        "help": diagnostic.help,
        "repair": diagnostic.repair.to_json(source) if source and diagnostic.repair else None,
        "waits": [each.to_json(source) for each in diagnostic.waits] if source else [],
    }


def to_github(diagnostic: Diagnostic) -> str:
    """The diagnostic as a GitHub workflow shows it beside the changed line: one `::error` command,
    or `::warning`.
    """
    shown = to_json(diagnostic)
    properties = {"file": shown["file"]}
    if shown["start"]:
        start = shown["start"]
        end = shown["end"]
        properties |= {"line": start["line"], "col": start["column"]}
        properties |= {"endLine": end["line"], "endColumn": end["column"]}
    properties["title"] = diagnostic.code
    text = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in properties.items())
    helps = [f"help: {diagnostic.help}"] if diagnostic.help else []
    if diagnostic.repair:
        helps = [f"repair: {diagnostic.repair.text}: proved at this size"]
    # The annotation stands beside one line of the program only.
    stands = [
        f"line {each['start']['line']}: {each['text']}"
        for each in shown["labels"]
        if diagnostic.waits
    ]
    message = "\n".join([diagnostic.message, *stands, *diagnostic.notes, *helps])
    return f"::{diagnostic.severity} {text}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    """A text in a workflow command: what would end it, or a property of it, by its number."""
    return "".join(f"%{ord(each):02X}" if each in "%\r\n" + more else each for each in text)


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 microbatches`."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"
