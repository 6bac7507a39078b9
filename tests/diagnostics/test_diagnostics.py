"""What bad programs get: the whole text of every message, and its JSON form."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from schedlang import CompileError, Source, compile, read_source
from schedlang.advice.advice import advise
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.rendering import to_github, to_json
from schedlang.diagnostics.source import Label, Span
from schedlang.language.grammar import FORMS, words
from schedlang.language.parser import parse
from schedlang.schedule.kinds import OPS
from tests.support.paths import DIAGNOSTICS

BAD = sorted(DIAGNOSTICS.glob("*.sched"))


def message(source: Source, **params: int) -> str:
    with pytest.raises(CompileError) as caught:
        compile(source, params)
    return str(advise(caught.value, source, params))


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_message(path: Path, golden: Callable[[str, Path], None]) -> None:
    golden(
        message(Source(path.name, read_source(path).text)) + "\n",
        path.with_suffix(".txt"),
    )


def in_a_program(form: str) -> str:
    """A program with an item, a statement or an op in it, or what holds the last two."""
    item = form.replace("…", "").replace(
        "F(s, m) at s", "stage s in 0 .. 1 { F(s, m) at s }"
    )
    for body in (item, f"rank r {{ {item} }}", f"block m every 3 {{ {item} }}"):
        text = item if item.startswith("schedule") else f"schedule s {{ {body} }}"
        try:
            parse(Source("s.sched", text))
        except CompileError:
            continue
        return text
    raise AssertionError(f"not a part of a program: {form}")


@pytest.mark.parametrize(("keyword", "form"), FORMS.items())
def test_the_form_of_a_word_is_right(keyword: str, form: str) -> None:
    assert words()[keyword] in re.findall(r"\w+", form)
    in_a_program(form)


@pytest.mark.parametrize(
    "keyword", ["BLOCK", "COST", "EDGE", "FN", "MEMORY", "PIPELINE", "SKIP"]
)
def test_an_item_that_is_wrong_shows_its_form(keyword: str) -> None:
    item = FORMS[keyword].replace("…", "")
    broken = in_a_program(item).replace(item, item.replace(" ", " 5 ", 1))
    with pytest.raises(
        CompileError, match=re.escape(f"write it as in `{FORMS[keyword]}`")
    ):
        parse(Source("s.sched", broken))


def test_every_word_has_a_form_or_is_an_op() -> None:
    """So a message can say what a word is for, to those who would use it as a name."""
    ops = {op.word for op in OPS.values()} | {"BW"}
    assert words().keys() - FORMS.keys() == {
        name for name, word in words().items() if word in ops
    }


def test_parameters_from_the_command() -> None:
    source = Source(
        "s.sched",
        "schedule s { param ranks = 2 param microbatches = 2 rank r { F(0) } }",
    )
    assert message(source, microbatch=3) == (
        "error[unknown-parameter]: the schedule `s` has no parameter `microbatch`\n"
        " --> s.sched:1:10\n"
        "  |\n"
        "1 | schedule s { param ranks = 2 param microbatches = 2 rank r { F(0) } }\n"
        "  |          ^\n"
        "  |\n"
        "  = help: there is `microbatches`"
    )
    assert "it has `ranks`, `microbatches`" in message(source, zebra=3)
    assert "error[parameter]: `ranks` is -1, it must be 1 or more" in message(
        source, ranks=-1
    )


def test_json_has_places_in_lines_and_columns() -> None:
    source = Source(
        "s.sched",
        "schedule s {\n  param ranks = 2\n  param microbatches = m\n  rank r { }\n}\n",
    )
    with pytest.raises(CompileError) as caught:
        compile(source)
    assert to_json(caught.value.diagnostics[0]) == {
        "code": "unknown-name",
        "severity": "error",
        "message": "no name `m` in scope",
        "file": "s.sched",
        "start": {"line": 3, "column": 24},
        "end": {"line": 3, "column": 25},
        "labels": [
            {
                "file": "s.sched",
                "start": {"line": 3, "column": 24},
                "end": {"line": 3, "column": 25},
                "text": "",
            }
        ],
        "notes": [],
        "help": None,
        "edits": [],
        "repair": None,
        "waits": [],
    }


def test_github_annotations_escape_what_would_end_them() -> None:
    source = Source("100%, a:b\r.sched", "one\ntwo three\n")
    place = Label(Span(8, 13), "not shown")
    shown = to_github(
        Diagnostic(
            "order", "50%: `a::b`,\r\nnext", (place,), source, ("a note",), help="a, b"
        )
    )
    assert shown == (
        "::error file=100%25%2C a%3Ab%0D.sched,line=2,col=5,endLine=2,endColumn=10,title=order"
        "::50%25: `a::b`,%0D%0Anext%0Aa note%0Ahelp: a, b"
    )
    whole_file = to_github(Diagnostic("plan", "cut off", file="plan.json"))
    assert whole_file == "::error file=plan.json,title=plan::cut off"


def test_unreadable_files(tmp_path: Path) -> None:
    for name, content, reason in [
        ("latin.sched", "schedule é".encode("latin-1"), "byte 9 is not UTF-8 text"),
        ("nul.sched", b"\x00\xff\xfe", "byte 1 is not UTF-8 text"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CompileError, match=reason):
            read_source(tmp_path / name)
    with pytest.raises(CompileError, match="No such file"):
        read_source(tmp_path / "absent.sched")
    with pytest.raises(CompileError, match="Is a directory"):
        read_source(tmp_path)


def test_windows_line_ends_and_byte_order_marks_are_text(tmp_path: Path) -> None:
    (tmp_path / "s.sched").write_bytes(
        b"\xef\xbb\xbfschedule s {\r\n param ranks = 1\r\n param microbatches = 1\r\n rank r { F(0) B(0) }\r\n}\r\n"
    )
    assert compile(read_source(tmp_path / "s.sched")).ranks[0].text() == "0F0 0B0"


def test_of_a_very_long_line_only_what_is_around_the_mistake_is_shown() -> None:
    head = "schedule s { param ranks = 1 param microbatches = 1 rank r { "
    text = message(
        Source("s.sched", head + "F(0) " * 3000 + "F(x) " + "B(0) " * 3000 + "} }")
    )
    assert " --> s.sched:1:15064\n" in text
    excerpt, underline = text.splitlines()[3:5]
    assert len(excerpt) < 200
    assert excerpt[underline.index("^")] == "x"
