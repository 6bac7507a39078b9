"""What the pieces of programs are, and Pygments, which colours them so."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.token import Error, Keyword, Name

from schedlang.extras.editor.colours import Colour, coloured
from schedlang.extras.editor.pygments import _TYPES, SchedLexer
from schedlang.language.concrete import Branch, concrete
from schedlang.language.formatting import rule_of
from schedlang.language.grammar import reserved, words
from tests.support.paths import GALLERY, PROGRAMS, ROOT
from tests.support.short_programs import short_programs

FILES = [*GALLERY, *sorted((PROGRAMS / "lib").glob("*.sched"))]


def names_in(branch: Branch) -> set[int]:
    """Where names stand, as the parse has them."""
    places = set()
    for part in branch.parts:
        if isinstance(part, Branch):
            places |= names_in(part)
        elif branch.rule in ("name", "reference"):
            places.add(part.start_pos or 0)
    return places


def check(text: str) -> None:
    pieces = list(coloured(text))
    named = (Colour.NAME, Colour.FUNCTION, Colour.BUILTIN)
    assert {start for start, _, colour in pieces if colour in named} == names_in(
        concrete(text, rule_of(text))
    )
    # All that is left are blanks.
    end = 0
    for start, stop, _ in pieces:
        assert not text[end:start].strip()
        end = stop
    assert not text[end:].strip()
    assert Colour.FOREIGN not in {colour for _, _, colour in pieces}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_are_those_of_the_parse(path: Path) -> None:
    check(path.read_text())


def test_short_programs() -> None:
    for number, source in enumerate(short_programs()):
        if number % 10 == 0:
            check(source.text)


def test_words_that_are_names_somewhere() -> None:
    """Every word that can be a name, as one and as a word of the language."""
    can_be = sorted(words()[terminal] for terminal in words().keys() - reserved())
    lets = "  ".join(f"let {word} = {word} + 1" for word in can_be)
    text = f"schedule s {{ fill W within 3 rank r {{ warmup {{ F(0) }}  {lets} }} }}"
    check(text)
    colours = {text[start:end]: colour for start, end, colour in coloured(text)}
    assert colours["rank"] is Colour.KEYWORD
    assert colours["F"] is Colour.OP


def test_behind_a_mistake_the_rest_is_coloured_too() -> None:
    text = "schedule s { let = 3 $ param ranks = 2 # why\n}"
    kinds = {text[start:end]: colour for start, end, colour in coloured(text)}
    assert kinds["$"] is Colour.FOREIGN
    assert kinds["param"] is Colour.KEYWORD
    assert kinds["# why"] is Colour.COMMENT


def test_pygments() -> None:
    text = GALLERY[0].read_text()
    tokens = list(SchedLexer().get_tokens(text))
    assert "".join(value for _, value in tokens) == text
    assert (Keyword, "repeat") in tokens or (Keyword, "for") in tokens
    assert (Name.Function, "peak") in tokens
    assert (Name.Builtin, "min") in tokens
    assert Error not in {kind for kind, _ in tokens}
    assert _TYPES.keys() == set(Colour)
    assert '<span class="k">rank</span>' in highlight(
        text, SchedLexer(), HtmlFormatter()
    )
    (entry,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]["pygments.lexers"].values()
    module, _, name = entry.partition(":")
    assert getattr(import_module(module), name) is SchedLexer
