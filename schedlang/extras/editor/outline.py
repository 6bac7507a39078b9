"""The parts of a program: the outline that an editor lists, and what it can fold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from schedlang.diagnostics.source import Span
from schedlang.language import syntax
from schedlang.language.grammar import tokens_of

#: The statements that are listed, beside all items of a schedule: those that declare a name or have
#: a block.
_LISTED = (
    syntax.Let,
    syntax.Fn,
    syntax.Part,
    syntax.For,
    syntax.Repeat,
    syntax.If,
    syntax.Row,
)
#: The most characters of a heading.
_WIDTH = 60


@frozen
class Entry:
    """A part of a program: its name, or how it begins if it has none; what follows that up to its
    block; the name of its node's class. `place` is what the editor selects.
    """

    name: str
    detail: str
    kind: str
    span: Span
    place: Span
    children: tuple[Entry, ...]


def outline_of(tree: syntax.Schedule, text: str) -> list[Entry]:
    """The parts of a program's own text, in its order."""
    items = tuple(_entries(tree.items, text, everything=True))
    # Of a file to import, the schedule is nowhere in the text.
    if not tree.span.end:
        return list(items)
    return [_entry(tree, text, items)]


def _entries(
    nodes: Sequence[syntax.Node], text: str, everything: bool = False
) -> Iterator[Entry]:
    """The parts among some nodes; a node that is none has its parts listed in its place."""
    for node in nodes:
        # The texts of imported files stand behind the program's own.
        if not node.span.start < node.span.end <= len(text):
            continue
        children = tuple(_entries(tuple(_statements(node)), text))
        if everything or isinstance(node, _LISTED):
            yield _entry(node, text, children)
        else:
            yield from children


def _statements(node: syntax.Node) -> Iterator[syntax.Node]:
    """The statements in the blocks of a node, and the rows of a building block."""
    for part in node.parts:
        if isinstance(part, syntax.Block):
            yield from part.statements
        elif isinstance(part, syntax.If):
            yield part
        elif isinstance(node, syntax.Repeated) and isinstance(part, tuple):
            yield from (row for row in part if isinstance(row, syntax.Row))


def _entry(node: syntax.Node, text: str, children: tuple[Entry, ...]) -> Entry:
    """A node as a part of its program."""
    span = node.span
    heading = text[span.start : span.end].partition("{")[0].partition("\n")[0]
    name = getattr(node, "name", None)
    if isinstance(name, syntax.Name) and span.start <= name.span.start < name.span.end:
        title = name.text
        place = name.span
        detail = heading[name.span.end - span.start :]
    else:
        title = _short(heading)
        place = Span(span.start, span.start + len(heading.rstrip()))
        detail = ""
    kind = type(node).__name__.lower()
    return Entry(title, _short(detail), kind, span, place, children)


def _short(text: str) -> str:
    """A text in one line of a list."""
    words = " ".join(text.split())
    return words if len(words) <= _WIDTH else f"{words[: _WIDTH - 1]}…"


def folds(text: str) -> list[tuple[int, int, bool]]:
    """The lines that can be folded, from the first to the last one, and whether they are comments:
    blocks, and comments of several lines. The text need not be a program.
    """
    found = []
    opened: list[int] = []
    lines = text.split("\n")
    for token in tokens_of(text):
        if token.type == "LBRACE":
            opened.append(text.count("\n", 0, token.start_pos or 0))
        elif token.type == "RBRACE" and opened:
            first = opened.pop()
            # The line of the closing brace stays.
            last = text.count("\n", 0, token.start_pos or 0) - 1
            if last > first:
                found.append((first, last, False))
    begins: int | None = None
    for number, line in enumerate([*lines, ""]):
        if line.lstrip().startswith("#"):
            begins = number if begins is None else begins
        elif begins is not None:
            if number - 1 > begins:
                found.append((begins, number - 1, True))
            begins = None
    return sorted(found)
