"""Program text in the one style: `schedc fmt`.

Only what is between tokens changes, and line ends mean nothing, so a program means what it meant.
Forms that the language had before become those of today.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

from attrs import define, field

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.files.file_kinds import FileKind, kind_of
from schedlang.language.concrete import Gap, concrete
from schedlang.language.formatted_lines import WIDTH, Layout, lay_out
from schedlang.language.grammar import tokens_of
from schedlang.language.parser import wrong_as_diagnostics
from schedlang.language.recovery import accepted_by, begin, with_forms_of_today

#: Where statements of a kind that stand in lines one below the other are brought into line: the
#: first of these tokens in each.
_ALIGNED = {
    "for": "LBRACE",
    "repeat": "LBRACE",
    "if": "LBRACE",
    "row": "LBRACE",
    "pipeline": "RUNS",
    "placed": "AT",
}


def formatted(source: Source) -> str:
    """The text of a program, or of a file to import, in the one style and today's forms.

    CompileError where the text is neither.
    """
    rule = rule_of(source.text)
    try:
        return _formatted(source, rule)
    except CompileError:
        return _formatted(with_forms_of_today(source, rule), rule)


def _formatted(source: Source, rule: str) -> str:
    with wrong_as_diagnostics(source, rule):
        return _text(lay_out(source.text, concrete(source.text, rule)))


def rule_of(text: str) -> str:
    """The rule of the grammar by which a file is read: `schedule`, or `items` for one to import."""
    if kind_of(text) in (FileKind.PROGRAM, FileKind.PYTHON):
        return "schedule"
    # Whatever else it is, the message on a schedule says so.
    first = next(iter(tokens_of(text)), None)
    is_items = first is None or first.type in accepted_by(begin("items"))
    return "items" if is_items else "schedule"


@define
class _Line:
    """A line: its text, a comment behind it, and what it is brought into line by: a statement's
    rule, and the column of a token of it. One that `opens` a block has no free line below it.
    """

    text: str
    comment: str = ""
    rule: str = ""
    column: int = 0
    depth: int = 0
    opens: bool = False


@define
class _Lines:
    """The lines so far."""

    layout: Layout
    lines: list[_Line] = field(factory=list)

    def gap(self, number: int, gap: Gap) -> None:
        """Add the comments before a token, and lines left free."""
        may_be_free = number in self.layout.boundaries
        depth = self.layout.comment_depths.get(number, 0)
        for index, comment in enumerate(gap.comments):
            if index == 0 and comment.newlines == 0 and number > 0:
                self.lines[-1].comment = comment.text
                continue
            self.free(comment.newlines, may_be_free)
            self.lines.append(_Line("    " * depth + comment.text))
        is_end = (
            number == len(self.layout.tokens)
            or self.layout.tokens[number].type == "RBRACE"
        )
        self.free(gap.newlines, may_be_free and not is_end)

    def free(self, newlines: int, may_be_free: bool) -> None:
        """Leave a line free where the author has, but for the beginning of a block."""
        is_beginning = not self.lines or self.lines[-1].opens
        if newlines > 1 and may_be_free and not is_beginning:
            self.lines.append(_Line(""))

    def add(self, first: int, stop: int) -> None:
        """Add a line of tokens."""
        layout = self.layout
        depth = layout.breaks[first]
        line = _Line("    " * depth, depth=depth)
        statement = layout.statements.get(first)
        aligned = ""
        # A statement of several lines is not brought into line with others.
        if statement is not None and statement.stop == stop:
            aligned = _ALIGNED.get(statement.rule, "")
        for number in range(first, stop):
            token = layout.tokens[number]
            if number > first:
                line.text += " " * layout.spaces[number]
            if statement is not None and token.type == aligned and not line.column:
                line.rule = statement.rule
                line.column = len(line.text)
            line.text += token
        line.opens = layout.tokens[stop - 1].type == "LBRACE"
        self.lines.append(line)


def _text(layout: Layout) -> str:
    lines = _Lines(layout)
    for first, stop in pairwise([*sorted(layout.breaks), len(layout.tokens)]):
        lines.gap(first, layout.gaps[first])
        lines.add(first, stop)
    lines.gap(len(layout.tokens), layout.gaps[-1])
    for alike in _neighbours(lines.lines):
        _align(alike)
    return "".join(f"{text}\n" for text in _with_comments(lines.lines))


def _neighbours(lines: Iterable[_Line]) -> Iterator[list[_Line]]:
    """Lines one below the other that are brought into line."""
    for (rule, _), alike in groupby(lines, key=lambda line: (line.rule, line.depth)):
        if rule:
            yield list(alike)


def _align(lines: list[_Line]) -> None:
    """Put the tokens that are brought into line below each other, if there is room."""
    column = max(line.column for line in lines)
    if any(len(line.text) + column - line.column > WIDTH for line in lines):
        return
    for line in lines:
        line.text = line.text[: line.column].ljust(column) + line.text[line.column :]


def _with_comments(lines: Iterable[_Line]) -> Iterator[str]:
    """The texts of lines; comments behind lines one below the other begin in one column, if there
    is room.
    """
    for has_comment, group in groupby(lines, key=lambda line: bool(line.comment)):
        alike = list(group)
        if not has_comment:
            yield from (line.text for line in alike)
            continue
        column = max(len(line.text) for line in alike)
        has_room = all(column + 2 + len(line.comment) <= WIDTH for line in alike)
        for line in alike:
            yield f"{line.text.ljust(column if has_room else 0)}  {line.comment}"
