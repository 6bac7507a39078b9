"""Programs in the one style: what stays as it was, and what the style is."""

import random
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.extra.lark import from_lark
from lark import Lark

from schedlang import CompileError, Source, compile
from schedlang.files.package import GRAMMAR
from schedlang.language.concrete import gap
from schedlang.language.formatted_lines import WIDTH
from schedlang.language.formatting import formatted, rule_of
from schedlang.language.grammar import tokens_of
from schedlang.language.loading import load, of_today
from schedlang.language.parser import parse_items
from schedlang.language.trees import tree_of
from tests.support.pages import blocks
from tests.support.paths import GALLERY, PROGRAMS, ROOT
from tests.support.scattered import scattered
from tests.support.short_programs import short_programs

FILES = [*GALLERY, *sorted((PROGRAMS / "lib").glob("*.sched"))]
#: What a plan says of the text of its program.
OF_TEXT = ("program", "spans", "sources", "source")
#: Whole texts: programs of the gallery, what they import, and short ones, right and wrong.
TEXTS = [
    *(path.read_text() for path in FILES),
    *(source.text for source in short_programs()),
]


def text_of(text: str) -> str:
    return formatted(Source("some.sched", text))


def content(text: str) -> list[str]:
    """The tokens and the comments of a text, each comment where it stands; all that may not
    change.
    """
    pieces = []
    end = 0
    for token in tokens_of(text):
        between = gap(text, end, token.start_pos or 0)
        # Only in texts do blanks mean something.
        text_of_it = str(token) if token.type == "STRING" else " ".join(token.split())
        pieces += [*(comment.text for comment in between.comments), text_of_it]
        end = token.end_pos or 0
    return pieces + [comment.text for comment in gap(text, end, len(text)).comments]


def behind_a_token(text: str) -> set[int]:
    """The comments, by their numbers, that stand in the line of the token before them."""
    found = set()
    number = 0
    end = 0
    starts = [token.start_pos or 0 for token in tokens_of(text)]
    ends = [token.end_pos or 0 for token in tokens_of(text)]
    # Between each token and the one before it, and last behind all of them.
    for start, following in zip([*starts, len(text)], [*ends, 0], strict=True):
        for index, comment in enumerate(gap(text, end, start).comments):
            if index == 0 and comment.newlines == 0 and end:
                found.add(number)
            number += 1
        end = following
    return found


@cache
def tree(text: str) -> Any:
    """The syntax tree of a program, or of a file to import."""
    source = Source("some.sched", text)
    return tree_of(source) if rule_of(text) == "schedule" else parse_items(source, 0)


@cache
def meaning(text: str) -> Any:
    """What a program is: its plan at its defaults without places in the text; or the codes of what
    is wrong with it.
    """
    try:
        document = compile(Source("some.sched", text)).to_json()
    except CompileError as error:
        return [diagnostic.code for diagnostic in error.diagnostics]
    return {name: value for name, value in document.items() if name not in OF_TEXT}


def check(text: str) -> str:
    """Format a text: nothing of it is lost or moved, and it is in style then."""
    new = text_of(text)
    assert content(new) == content(text)
    assert behind_a_token(new) == behind_a_token(text)
    assert text_of(new) == new
    assert not any(line != line.rstrip(" ") for line in new.split("\n"))
    assert "\n\n\n" not in new
    return new


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_gallery_is_in_style(path: Path) -> None:
    assert check(path.read_text()) == path.read_text(), "schedc fmt programs"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str
)
def test_programs_of_the_documentation_are_in_style(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sched" and "wrong" not in block.words:
            assert text_of(block.text) == block.text, block.where


@pytest.mark.blocks(2)
@pytest.mark.slow
def test_a_program_stays_what_it_is_however_it_is_written(block: int) -> None:
    """A hundred programs; `make explore WHAT=formatting` tries 10,000."""
    rng = random.Random(block)
    plans = 0
    for number in range(100):
        text = rng.choice(TEXTS if rng.random() < 0.5 else TEXTS[: len(FILES)])
        written = scattered(text, rng)
        new = check(written)
        # A plan is made of the tree, which takes no notice of places.
        assert tree(new) == tree(text), written
        if number % 4 == 0:
            assert meaning(new) == meaning(text), written
            plans += isinstance(meaning(text), dict)
    assert plans > 5


@settings(max_examples=60)
@given(
    from_lark(
        Lark(GRAMMAR.read_text(), parser="lalr", start="schedule"), start="schedule"
    )
)
@pytest.mark.slow
def test_programs_of_the_grammar(text: str) -> None:
    # What the generator puts side by side may be another word for the lexer.
    with suppress(CompileError):
        check(text)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("", ""),
        ("# nothing else", "# nothing else\n"),
        ("let a=1 let b  =-a", "let a = 1\nlet b = -a\n"),
        ("let a = - ( 1+2 )*3", "let a = -(1 + 2) * 3\n"),
        ("let a = not(b)", "let a = not (b)\n"),
        ("fill W within(3)", "fill W within (3)\n"),
        ("let a = within (3)", "let a = within(3)\n"),
        ("rank r{F (next)B(next)}", "rank r { F(next)  B(next) }\n"),
        (
            "rank r {\n\nF(next)   B(next)\n\n\nU\n\n}",
            "rank r {\n    F(next)  B(next)\n\n    U\n}\n",
        ),
        ("rank r { if a { U } else { W } }", "rank r { if a { U } else { W } }\n"),
        (
            "rank r { if a { U }\nelse { W } }",
            "rank r {\n    if a { U }\n    else { W }\n}\n",
        ),
        (
            "rank r { if a {\nU }\n else { W } }",
            "rank r {\n    if a {\n        U\n    } else {\n        W\n    }\n}\n",
        ),
        ("rank r { U # now\n}", "rank r {\n    U  # now\n}\n"),
        ("rank r { # all\n # of it\n U }", "rank r {  # all\n    # of it\n    U\n}\n"),
        ("let a = 1 # one\nlet bb = 2 # two", "let a = 1   # one\nlet bb = 2  # two\n"),
        ("rank r { }", "rank r { }\n"),
        ("rank r {\n}", "rank r { }\n"),
        ("assert 1 for \n all", "assert 1 for all\n"),
        ("let a = 1 # x\n + 2", "let a = 1  # x\n    + 2\n"),
    ],
)
def test_the_style(written: str, wanted: str) -> None:
    assert check(written) == wanted


@pytest.mark.core
@pytest.mark.parametrize(
    ("former", "today"),
    [
        ("link r on r / 2", "link(r) = r / 2\n"),
        (
            "schedule s { keep r on 1 - r # keep r on 0\n}",
            "schedule s {\n    keeper(r) = 1 - r  # keep r on 0\n}\n",
        ),
        ("weights delay 1", "weights delay(1)\n"),
        ("weights delay -1", "weights delay(-1)\n"),
        (
            "weights delay ranks - half(2) on 0 .. ranks",
            "weights delay(ranks - half(2)) on 0 .. ranks\n",
        ),
        ("frozen s in 0 .. ranks", "frozen 0 .. ranks\n"),
        (
            "rank r { exchange { send F(0) recv B(0) } exchange{recv B(1)} }",
            "rank r { overlap { send F(0)  recv B(0) }  overlap { recv B(1) } }\n",
        ),
    ],
)
def test_forms_that_the_language_had_before_become_those_of_today(
    former: str, today: str
) -> None:
    assert text_of(former) == today


def test_programs_with_former_forms_are_those_of_today() -> None:
    text = """schedule s {{
        param ranks = 2
        param microbatches = 2
        {}
        rank r {{
            repeat microbatches {{ F(next) {} {{ send F(r, 0) }} }}
        }}
    }}"""
    former = Source("s.sched", text.format("link r on 0  weights delay 1", "exchange"))
    today = of_today(former)
    assert text_of(today.text) == text_of(
        text.format("link(r) = 0  weights delay(1)", "overlap")
    )
    assert load(former) == load(today)
    assert of_today(today) is today


def test_former_forms_beside_another_mistake_stay() -> None:
    with pytest.raises(
        CompileError, match=r"write `link\(r\) =`, as `schedc fmt` does"
    ):
        text_of("link r on 0\nlet a = ")


def test_lines_one_below_the_other_are_brought_into_line() -> None:
    written = "rank r {\nrepeat a { U }\nrepeat a + b { U }\nfor m in 0..1 { U }\n}"
    lines = text_of(written).splitlines()
    assert lines[1:4] == [
        "    repeat a     { U }",
        "    repeat a + b { U }",
        "    for m in 0 .. 1 { U }",
    ]


def test_a_long_line_is_broken_where_its_parts_are() -> None:
    names = [f"a_rather_long_name_{number}" for number in range(8)]
    text = text_of(f'require {" or ".join(names)}, "why"')
    assert text.splitlines()[-1] == '    "why"'
    choice = " else ".join(f"if {name} then 1" for name in names)
    assert text_of(f"let a = {choice} else 0").count("\n    else ") == 8
    block = text_of(f"rank r {{ {' '.join(f'F({name})' for name in names)} }}")
    assert block.startswith("rank r {\n    F(")
    for line in [*text.splitlines(), *block.splitlines()]:
        assert len(line) <= WIDTH


def test_a_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(CompileError, match="is a Python script, not a program"):
        text_of("import os\n")
    with pytest.raises(CompileError, match="expected"):
        text_of("let a = 1\nlet b = ")
    deep = 5000
    with pytest.raises(CompileError, match="nested too deeply"):
        text_of(f"let a = {'(' * deep}1{')' * deep}")
