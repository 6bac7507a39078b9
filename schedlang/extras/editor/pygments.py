"""Colours of programs for Pygments, which Sphinx, MkDocs and notebooks ask: the lexer `sched`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pygments.lexer import Lexer
from pygments.token import (
    Comment,
    Error,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Whitespace,
    _TokenType,
)

from schedlang.extras.editor.colours import Colour, coloured

_TYPES = {
    Colour.COMMENT: Comment.Single,
    Colour.KEYWORD: Keyword,
    Colour.OP: Name.Class,
    Colour.FUNCTION: Name.Function,
    Colour.BUILTIN: Name.Builtin,
    Colour.NAME: Name,
    Colour.NUMBER: Number,
    Colour.STRING: String,
    Colour.OPERATOR: Operator,
    Colour.PUNCTUATION: Punctuation,
    Colour.FOREIGN: Error,
}


class SchedLexer(Lexer):
    """The lexer of schedule programs."""

    name = "schedlang"
    aliases: ClassVar[list[str]] = ["sched", "schedlang"]
    filenames: ClassVar[list[str]] = ["*.sched"]

    def get_tokens_unprocessed(
        self, text: str
    ) -> Iterator[tuple[int, _TokenType, str]]:
        """The pieces of a text: where each begins, what it is, and its text."""
        end = 0
        for start, stop, colour in coloured(text):
            if start > end:
                yield end, Whitespace, text[end:start]
            yield start, _TYPES[colour], text[start:stop]
            end = stop
        if end < len(text):
            yield end, Whitespace, text[end:]
