"""What can stand at a place of a program, as the parser has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from lark import Token
from lark.exceptions import UnexpectedInput

from schedlang.files.package import GALLERY
from schedlang.language.declarations import SIZES
from schedlang.language.formatting import rule_of
from schedlang.language.grammar import reserved, tokens_of, words
from schedlang.language.names import OBJECTIVES
from schedlang.language.recovery import accepted_by, begin


@frozen
class Candidates:
    """What can stand at a place: words of the language; names, if an expression can; figures, if it
    is a claim; and other texts. What is typed of it already begins at `start`.
    """

    start: int
    words: tuple[str, ...] = ()
    takes_names: bool = False
    takes_figures: bool = False
    others: tuple[str, ...] = ()


def candidates(text: str, offset: int, path: str) -> Candidates:
    """What can stand at a place of a text. Where the text before it is no program, all words can,
    and names.
    """
    typed = re.search(r"\w*$", text[:offset])
    start = typed.start() if typed else offset
    before = tokens_of(text[:start])
    # A text that has begun and not ended is nothing of the language yet, `"lib/` for instance.
    if before and before[-1].type == "FOREIGN" and before[-1].startswith('"'):
        return _in_text(before, path)
    # In a comment, people write what they want. A `#` within a text in quotes looks like one, and
    # gets nothing offered either.
    if "#" in text[text.rfind("\n", 0, start) + 1 : start]:
        return Candidates(start)
    if not before:
        beginnings = accepted_by(begin("items")) | accepted_by(begin("schedule"))
        return Candidates(start, _words(beginnings))
    state = begin(rule_of(text))
    try:
        for token in before:
            state.feed_token(token)
    except UnexpectedInput:
        return Candidates(start, tuple(words().values()), takes_names=True)
    accepted = accepted_by(state)
    last = before[-1].type if before else ""
    others: tuple[str, ...] = ()
    if last == "OBJECTIVE":
        others = OBJECTIVES
    elif last == "PARAM":
        others = SIZES
    if "NAME" in accepted:
        # Words that can be names too are no likelier there than any other name.
        accepted &= reserved()
    takes_names = "NUMBER" in accepted_by(state)
    takes_figures = takes_names and _statement(before) == "ASSERT"
    return Candidates(start, _words(accepted), takes_names, takes_figures, others)


def _words(terminals: frozenset[str]) -> tuple[str, ...]:
    """The words of the language among some terminals."""
    return tuple(
        sorted(text for terminal, text in words().items() if terminal in terminals)
    )


def _statement(tokens: Sequence[Token]) -> str:
    """The word that the last statement of some tokens begins with."""
    # `stage` begins an item, but `stage(c)` is an expression, which can stand within a claim.
    begins = (accepted_by(begin("items")) | {"LBRACE", "RBRACE"}) - {"STAGE"}
    return next((token.type for token in reversed(tokens) if token.type in begins), "")


def _in_text(before: Sequence[Token], path: str) -> Candidates:
    """What can stand in quotes: behind `import`, the files beside the program, and those that come
    along.
    """
    start = (before[-1].start_pos or 0) + 1
    if [token.type for token in before[-2:-1]] != ["IMPORT"]:
        return Candidates(start)
    folder = Path(path).parent
    files = sorted(file.name for file in folder.glob("*.sched"))
    files += [f"lib/{file.name}" for file in sorted((GALLERY / "lib").glob("*.sched"))]
    return Candidates(start, others=tuple(files))
