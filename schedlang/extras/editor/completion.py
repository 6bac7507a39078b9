"""What can stand at a place of a program, as the parser has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen
from lark import Token
from lark.exceptions import UnexpectedInput

from schedlang.diagnostics.source import Source
from schedlang.extras.editor.analysis import names_of
from schedlang.files.package import GALLERY
from schedlang.language.declarations import SIZES
from schedlang.language.formatting import rule_of
from schedlang.language.grammar import FORMS, reserved, spellings, tokens_of, words
from schedlang.language.names import CHOICES
from schedlang.language.recovery import Parser, accepted_by, begin
from schedlang.language.scopes import BUILTINS
from schedlang.language.symbols import Symbol


@frozen
class Candidates:
    """What can stand at a place: words of the language; names and functions, if an expression can;
    figures, if it is a claim; and other texts. What is typed of it already begins at `start`.

    `forms` are whole statements and items, by their first word: as they are shown, and as a
    snippet, in the syntax that editors have for one.
    """

    start: int
    words: tuple[str, ...] = ()
    takes_names: bool = False
    takes_figures: bool = False
    others: tuple[str, ...] = ()
    names: tuple[Symbol, ...] = ()
    forms: tuple[tuple[str, str, str], ...] = ()


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
        states = begin("items"), begin("schedule")
        return Candidates(
            start,
            _words(accepted_by(states[0]) | accepted_by(states[1])),
            forms=tuple(form for state in states for form in _forms(state)),
        )
    state = begin(rule_of(text))
    try:
        for token in before:
            state.feed_token(token)
    except UnexpectedInput:
        names = _names(text, start, path)
        return Candidates(start, tuple(words().values()), True, names=names)
    forms = tuple(_forms(state))
    accepted = accepted_by(state)
    last = before[-1]
    others: tuple[str, ...] = ()
    if last in CHOICES and "NAME" in accepted:
        others = tuple(CHOICES[last][1])
    elif last.type == "PARAM":
        others = SIZES
    if "NAME" in accepted:
        # Words that can be names too are no likelier there than any other name.
        accepted &= reserved()
    takes_names = "NUMBER" in accepted_by(state)
    takes_figures = takes_names and _statement(before) == "ASSERT"
    names = _names(text, start, path) if takes_names else ()
    return Candidates(
        start, _words(accepted), takes_names, takes_figures, others, names, forms
    )


def _names(text: str, start: int, path: str) -> tuple[Symbol, ...]:
    """The names that an expression at a place can speak of."""
    # The text stands as it is typed, so it is hardly ever a program.
    return tuple(names_of(Source(path, text)).known_at(start))


def _forms(state: Parser) -> Iterator[tuple[str, str, str]]:
    """The statements and items that can stand at a place: the word that each begins with, how it is
    shown, and its snippet.
    """
    for form in dict.fromkeys(FORMS.values()):
        word = form.partition(" ")[0]
        tokens = tokens_of(form.replace("…", ""))
        if len(tokens) > 1 and _takes_all(state, tokens):
            yield word, form, _snippet(form)


def _takes_all(state: Parser, tokens: Sequence[Token]) -> bool:
    """Whether the parser takes some tokens next, and whatever may stand behind a statement."""
    state = state.copy(deepcopy_values=False)
    try:
        for token in tokens:
            state.feed_token(token)
    except UnexpectedInput:
        return False
    return True


def _snippet(form: str) -> str:
    """The snippet for a form: its names, numbers and texts are places to fill in, those that are
    alike together, and a block is open behind them.
    """
    parts = []
    end = 0
    places: dict[str, int] = {}
    fixed = set(spellings().values()) | set(BUILTINS) | set(SIZES)
    for token in tokens_of(form):
        start = token.start_pos or 0
        parts.append(form[end:start])
        end = token.end_pos or 0
        if token == "…":
            parts = ["".join(parts).rstrip(), "\n\t$0\n"]
            end += len(form[end:]) - len(form[end:].lstrip())
        elif token in fixed:
            parts.append(token)
        else:
            number = places.setdefault(str(token), len(places) + 1)
            text = str(token).strip('"')
            place = f"${{{number}:{text}}}"
            parts.append(f'"{place}"' if token.startswith('"') else place)
    return "".join([*parts, form[end:]])


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
