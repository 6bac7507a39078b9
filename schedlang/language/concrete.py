"""A program with all its tokens: the same parse as that of the compiler, nothing left out.

The syntax tree has what a program means; here is how it is written, for who changes its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from typing import Any

from attrs import frozen
from lark import Token
from lark.grammar import Rule

from schedlang.language.grammar import END, grammar, patterns


@frozen(eq=False)
class Branch:
    """What a rule of the grammar has taken: tokens, and what other rules have taken.

    A rule that stands for another one alone, such as an expression that is a number, is left out.
    """

    rule: str
    parts: tuple[Branch | Token, ...]

    def tokens(self) -> Iterator[Token]:
        """All tokens, in the order of the text."""
        for part in self.parts:
            if isinstance(part, Branch):
                yield from part.tokens()
            else:
                yield part


@frozen
class Comment:
    """A comment: its text from `#` on, and how many line ends are between it and what it stands
    behind, a token or another comment.
    """

    text: str
    newlines: int


@frozen
class Gap:
    """What is between two tokens: comments, and how many line ends behind the last of them."""

    comments: tuple[Comment, ...]
    newlines: int

    @property
    def has_break(self) -> bool:
        """Whether the second token stands in another line than the first."""
        return bool(self.newlines or self.comments)


def concrete(text: str, rule: str) -> Branch:
    """The tokens of a text as a rule of the grammar has taken them; UnexpectedInput, or
    RecursionError, for a text that is not what the rule says.
    """
    interactive = grammar().parse_interactive(text, start=rule)
    state = interactive.parser_state
    # A copy, since all parsers of the grammar share the one that makes the syntax tree.
    state.parse_conf = copy(state.parse_conf)
    state.parse_conf.callbacks = _makers()
    for token in interactive.lexer_thread.lex(state):  # type: ignore[no-untyped-call]
        state.feed_token(token)
    branch: Branch = state.feed_token(Token(END, ""), is_end=True)
    return branch


@cache
def _makers() -> dict[Any, Callable[[list[Any]], Any]]:
    """What is made of the parts that each rule has taken."""
    return {rule: _maker(rule) for rule in grammar().rules}


def _maker(rule: Rule) -> Callable[[list[Any]], Any]:
    name = rule.alias or rule.origin.name
    is_repetition = rule.origin.name.startswith("_")
    may_be_left_out = rule.options.expand1

    def make(parts: list[Any]) -> Any:
        flat: list[Branch | Token] = []
        for part in parts:
            # What lark has made of a `*` is a list within lists.
            flat += part if isinstance(part, list) else [part]
        if is_repetition:
            return flat
        if may_be_left_out and len(flat) == 1:
            return flat[0]
        return Branch(name, tuple(flat))

    return make


def gap(text: str, start: int, end: int) -> Gap:
    """What is between two tokens: the first ends at `start`, the second begins at `end`."""
    between = text[start:end]
    comments = []
    behind = 0
    for match in re.finditer(patterns()["COMMENT"], between):
        newlines = between.count("\n", behind, match.start())
        comments.append(Comment(match.group().rstrip(" \t\r"), newlines))
        behind = match.end()
    return Gap(tuple(comments), between.count("\n", behind))
