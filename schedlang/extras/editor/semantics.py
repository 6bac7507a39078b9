"""What each piece of a program means, for an editor that colours more than words: whether a name is
a parameter, a value, a variable, a function or a figure, and where it is declared.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedlang.diagnostics.source import Source
from schedlang.extras.editor.analysis import names_of
from schedlang.extras.editor.colours import Colour, coloured
from schedlang.language.symbols import Symbol

#: The kinds of pieces and their properties, by the names that the protocol has for them; in an
#: answer they are numbers of these lists.
KINDS = (
    "comment",
    "keyword",
    "type",
    "function",
    "variable",
    "parameter",
    "property",
    "number",
    "string",
    "operator",
)
PROPERTIES = ("declaration", "readonly", "defaultLibrary")

_OF_COLOURS = {
    Colour.COMMENT: "comment",
    Colour.KEYWORD: "keyword",
    Colour.OP: "type",
    Colour.FUNCTION: "function",
    Colour.BUILTIN: "function",
    Colour.NAME: "variable",
    Colour.NUMBER: "number",
    Colour.STRING: "string",
    Colour.OPERATOR: "operator",
}
_FUNCTIONS = ("fn", "seq", "pipeline")


def pieces(source: Source) -> list[tuple[int, int, str, tuple[str, ...]]]:
    """The pieces of a text in its order, each with its beginning, its end, its kind and its
    properties. The text need not be a program. No piece goes beyond the end of its line.
    """
    text = source.text
    symbols = names_of(source)
    declared = {symbol.place: symbol for symbol in symbols.declared}
    names: dict[int, Symbol | None] = {
        place.start: symbol for place, symbol in declared.items()
    }
    for use in symbols.uses:
        names[use.place.start] = declared.get(use.declared) if use.declared else None
    declares = {place.start for place in declared}
    found = []
    for start, end, colour in coloured(text):
        kind = _OF_COLOURS.get(colour)
        if kind is None:
            continue
        properties: list[str] = []
        if colour in (Colour.NAME, Colour.FUNCTION) and start in names:
            kind = _kind_of(names[start])
            if start in declares:
                properties.append("declaration")
            if kind == "variable":
                properties.append("readonly")
        elif colour is Colour.BUILTIN:
            properties.append("defaultLibrary")
        for first, last in _in_lines(text, start, end):
            found.append((first, last, kind, tuple(properties)))
    return found


def _kind_of(symbol: Symbol | None) -> str:
    """The kind of a name; a figure is declared nowhere."""
    if symbol is None:
        return "property"
    if symbol.kind in _FUNCTIONS:
        return "function"
    return "parameter" if symbol.kind.endswith(" variable") else "variable"


def _in_lines(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """A piece, line by line: two words that are one, such as `for all`, may stand in two lines."""
    while "\n" in text[start:end]:
        line_end = text.index("\n", start)
        if text[start:line_end].strip():
            yield start, line_end
        start = line_end + 1
        start += len(text[start:end]) - len(text[start:end].lstrip())
    yield start, end
