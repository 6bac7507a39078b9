"""Diagnostics as text for people, as JSON for programs, or as annotations for GitHub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, counted
from schedlang.diagnostics.source import Label, Source
from schedlang.diagnostics.style import COLOURED, PLAIN, Style

if TYPE_CHECKING:
    from schedlang.diagnostics.repair import Repair

#: The most columns of a source line that are shown.
_WIDTH = 160
#: The most diagnostics that are shown as text. In a table, one mistake can make every cell behind
#: it wrong, and nobody reads a thousand messages.
_MOST = 20


def render(diagnostics: list[Diagnostic], format: str, has_colour: bool = False) -> str:
    """Diagnostics in a format: `text`, which ends with the way to their pages, and may have colours
    for a terminal; `json`, one document for all of them; or `github`.
    """
    if format == "json":
        document = {"diagnostics": [to_json(diagnostic) for diagnostic in diagnostics]}
        return json.dumps(document, indent=1)
    # GitHub reads one command a line, so nothing else may be printed.
    if format == "github":
        return "\n".join(map(to_github, diagnostics))
    shown = diagnostics[:_MOST]
    number = counted(len(diagnostics), diagnostics[0].severity)
    summary = ""
    if len(shown) < len(diagnostics):
        summary = f"{number}, the first {_MOST} are shown; "
    elif len(diagnostics) > 1:
        summary = f"{number}; "
    # A dictionary, since it keeps the order and has each code once.
    codes = dict.fromkeys(diagnostic.code for diagnostic in diagnostics)
    summary += f"see: schedc explain {' '.join(codes)}"
    style = COLOURED if has_colour else PLAIN
    texts = [to_text(diagnostic, style) for diagnostic in shown]
    return "\n\n".join([*texts, summary])


def to_text(diagnostic: Diagnostic, style: Style = PLAIN) -> str:
    """The diagnostic for people: the message, the source lines with the places underlined, notes,
    and the help.
    """
    title = style.paint(
        diagnostic.severity, f"{diagnostic.severity}[{diagnostic.code}]"
    )
    lines = [title + style.paint("message", f": {diagnostic.message}")]
    margin = 1
    if diagnostic.source and diagnostic.labels:
        # The bar stands to the right of the longest line number.
        margin = len(str(max(_line_numbers(diagnostic.source, diagnostic.labels))))
        lines += _places(diagnostic, diagnostic.source, margin, style)
    elif diagnostic.file:
        lines.append(f"{' ' * margin}{style.paint('frame', '-->')} {diagnostic.file}")
    endings = [("note", note) for note in diagnostic.notes]
    if diagnostic.repair:
        endings.append(("repair", _repair_text(diagnostic.repair)))
    elif diagnostic.help:
        endings.append(("help", diagnostic.help))
    frame = style.paint("frame", f"{' ' * margin} =")
    lines += [
        f"{frame} {style.paint('note', f'{word}:')} {text}" for word, text in endings
    ]
    return "\n".join(lines)


def _repair_text(repair: Repair) -> str:
    return f"{repair.text}: proved at this size"


def _line_numbers(source: Source, labels: tuple[Label, ...] | list[Label]) -> list[int]:
    """The line, in its file, that each label starts in."""
    return [source.position(label.span.start)[0] for label in labels]


def _places(
    diagnostic: Diagnostic, source: Source, margin: int, style: Style
) -> list[str]:
    """The lines of the program that the labels are about, file by file."""
    by_file: dict[tuple[str, int], list[Label]] = {}
    for label in diagnostic.labels:
        by_file.setdefault(source.file(label.span.start), []).append(label)
    lines: list[str] = []
    # As compilers of other languages draw it: an arrow for the first file, colons for the others.
    arrow = "-->"
    for (path, _), labels in by_file.items():
        line, column = source.position(labels[0].span.start)
        bar = style.paint("frame", f"{' ' * margin} |")
        lines.append(
            f"{' ' * margin}{style.paint('frame', arrow)} {path}:{line}:{column}"
        )
        lines.append(bar)
        lines += _excerpts(diagnostic, source, labels, margin, style)
        lines.append(bar)
        # The files after the first one are only related to the mistake.
        arrow = ":::"
    return lines


def _excerpts(
    diagnostic: Diagnostic,
    source: Source,
    labels: list[Label],
    margin: int,
    style: Style,
) -> list[str]:
    """The lines of one file that have labels, in the order of the file."""
    by_line: dict[int, list[Label]] = {}
    for number, label in zip(_line_numbers(source, labels), labels, strict=True):
        by_line.setdefault(number, []).append(label)
    lines: list[str] = []
    previous = None
    for number in sorted(by_line):
        # Dots for the lines that are left out.
        if previous is not None and number > previous + 1:
            lines.append("...")
        lines += _excerpt(diagnostic, source, number, by_line[number], margin, style)
        previous = number
    return lines


def _excerpt(
    diagnostic: Diagnostic,
    source: Source,
    number: int,
    labels: list[Label],
    margin: int,
    style: Style,
) -> list[str]:
    """One source line, and under it a line for each label that starts there.

    The place of the mistake is underlined with `^`, the others with `-`. Of a very long line, only
    what is around its first label is shown; labels further away get an excerpt of their own.
    """
    columns = [source.position(label.span.start)[1] for label in labels]
    # A tab would shift what stands under it.
    text = source.line(labels[0].span.start).replace("\t", " ")
    cut = max(columns[0] - _WIDTH // 2, 0) if len(text) > _WIDTH else 0
    text = text[cut : cut + _WIDTH]
    lines = [f"{style.paint('frame', f'{number:>{margin}} |')} {text}"]
    bar = style.paint("frame", f"{' ' * margin} |")
    far: list[Label] = []
    for label, column in zip(labels, columns, strict=True):
        start = column - 1 - cut
        if not 0 <= start <= len(text):
            far.append(label)
            continue
        # A label of several lines is underlined up to the end of its first line.
        length = label.span.end - label.span.start
        width = max(1, min(length, len(text) - start))
        is_first = label is diagnostic.labels[0]
        mark = "^" if is_first else "-"
        note = style.paint(
            diagnostic.severity if is_first else "other",
            f"{mark * width} {label.text}".rstrip(),
        )
        lines.append(f"{bar} {' ' * start}{note}")
    if far:
        lines += _excerpt(diagnostic, source, number, far, margin, style)
    return lines


def to_json(diagnostic: Diagnostic) -> dict[str, Any]:
    """The diagnostic for programs; positions are lines and columns, counted from 1."""
    source = diagnostic.source
    labels: list[dict[str, Any]] = []
    waits: list[dict[str, Any]] = []
    repair = None
    edits: list[dict[str, Any]] = []
    file = diagnostic.file
    if source:
        labels = [_label_json(source, label) for label in diagnostic.labels]
        waits = [wait.to_json(source) for wait in diagnostic.waits]
        repair = diagnostic.repair.to_json(source) if diagnostic.repair else None
        edits = [edit.to_json(source) for edit in diagnostic.edits]
        file = labels[0]["file"] if labels else source.path
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "file": file,
        "start": labels[0]["start"] if labels else None,
        "end": labels[0]["end"] if labels else None,
        "labels": labels,
        "notes": list(diagnostic.notes),
        "help": diagnostic.help,
        "edits": edits,
        "repair": repair,
        "waits": waits,
    }


def _label_json(source: Source, label: Label) -> dict[str, Any]:
    line, column = source.position(label.span.start)
    end_line, end_column = source.position(label.span.end)
    return {
        "file": source.file(label.span.start)[0],
        "start": {"line": line, "column": column},
        "end": {"line": end_line, "column": end_column},
        "text": label.text,
    }


def to_github(diagnostic: Diagnostic) -> str:
    """The diagnostic as a command of a GitHub workflow, `::error` or `::warning`, which GitHub
    shows beside the changed line.
    """
    document = to_json(diagnostic)
    properties = {"file": document["file"]}
    if document["start"]:
        start = document["start"]
        end = document["end"]
        properties["line"] = start["line"]
        properties["col"] = start["column"]
        properties["endLine"] = end["line"]
        properties["endColumn"] = end["column"]
    properties["title"] = diagnostic.code
    pairs = [
        f"{name}={_escaped(str(value), ':,')}" for name, value in properties.items()
    ]
    lines = [diagnostic.message]
    if diagnostic.waits:
        # GitHub shows the annotation beside one line of the program; a deadlock is about several.
        for label in document["labels"]:
            lines.append(f"line {label['start']['line']}: {label['text']}")
    lines += diagnostic.notes
    if diagnostic.repair:
        lines.append(f"repair: {_repair_text(diagnostic.repair)}")
    elif diagnostic.help:
        lines.append(f"help: {diagnostic.help}")
    message = _escaped("\n".join(lines))
    return f"::{diagnostic.severity} {','.join(pairs)}::{message}"


def _escaped(text: str, separators: str = "") -> str:
    """A text with the characters replaced that would end a workflow command, or one of its
    properties.
    """
    special = "%\r\n" + separators
    return "".join(
        f"%{ord(character):02X}" if character in special else character
        for character in text
    )
