"""What each piece of a program's text is, for who colours it: one answer, which the lexers and
grammars of editors are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache

from lark import Token
from lark.exceptions import UnexpectedInput

from schedlang.language.concrete import gap
from schedlang.language.formatting import rule_of
from schedlang.language.grammar import reserved, tokens_of, words
from schedlang.language.recovery import Parser, accepts, begin
from schedlang.language.scopes import BUILTINS
from schedlang.language.sites import KINDS


class Colour(Enum):
    """What a piece of a text is."""

    COMMENT = "comment"
    KEYWORD = "keyword"
    OP = "op"
    FUNCTION = "function"
    BUILTIN = "builtin"
    NAME = "name"
    NUMBER = "number"
    STRING = "string"
    OPERATOR = "operator"
    PUNCTUATION = "punctuation"
    FOREIGN = "foreign"


_OF_TERMINALS = {
    "NAME": Colour.NAME,
    "NUMBER": Colour.NUMBER,
    "DECIMAL": Colour.NUMBER,
    "STRING": Colour.STRING,
    "FOR_ALL": Colour.KEYWORD,
    "FOREIGN": Colour.FOREIGN,
    "LBRACE": Colour.PUNCTUATION,
    "RBRACE": Colour.PUNCTUATION,
    "LPAR": Colour.PUNCTUATION,
    "RPAR": Colour.PUNCTUATION,
    "COMMA": Colour.PUNCTUATION,
}


def coloured(text: str) -> Iterator[tuple[int, int, Colour]]:
    """The pieces of a text with their beginnings and ends, but for blanks."""
    tokens = tokens_of(text)
    state: Parser | None = begin(rule_of(text))
    end = 0
    for number, token in enumerate(tokens):
        yield from _comments(text, end, token.start_pos or 0)
        # A word is a name or not by what the parser can take there: `stage` in `F(stage)` is one.
        # Behind a mistake there is no parser any more, and every word of the language is taken for
        # one.
        state, is_name = _read(state, token)
        end = token.end_pos or 0
        is_called = number + 1 < len(tokens) and tokens[number + 1].type == "LPAR"
        yield token.start_pos or 0, end, _colour(token, is_name, is_called)
    yield from _comments(text, end, len(text))


def _comments(text: str, start: int, end: int) -> Iterator[tuple[int, int, Colour]]:
    """The comments between two tokens."""
    for comment in gap(text, start, end).comments:
        begin_at = text.index(comment.text, start)
        start = begin_at + len(comment.text)
        yield begin_at, start, Colour.COMMENT


def _read(state: Parser | None, token: Token) -> tuple[Parser | None, bool]:
    """The parser behind a token, or None behind a mistake; and whether the token is a word of the
    language that is a name here, since one can stand here.
    """
    if state is None:
        return None, False
    may_be_name = token.type in words().keys() - reserved()
    is_name = may_be_name and accepts(state, "NAME")
    try:
        state.feed_token(token)
    except UnexpectedInput:
        return None, is_name
    return state, is_name


def _colour(token: Token, is_name: bool, is_called: bool) -> Colour:
    """What a token is."""
    if is_name or token.type == "NAME":
        if not is_called:
            return Colour.NAME
        return Colour.BUILTIN if token in BUILTINS else Colour.FUNCTION
    if token.type in words():
        return Colour.OP if token in op_words() else Colour.KEYWORD
    return _OF_TERMINALS.get(token.type, Colour.OPERATOR)


@cache
def op_words() -> frozenset[str]:
    """The words of ops, and those that say which way a transfer goes."""
    return frozenset(word.partition(" ")[0] for word in KINDS)
