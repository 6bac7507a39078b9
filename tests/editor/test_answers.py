"""What the language server says, without a server."""

import pytest
from lsprotocol import types

from schedlang import Source
from schedlang.diagnostics.source import Span
from schedlang.extras.editor import answers
from schedlang.extras.editor.analysis import Analysis, analyse
from schedlang.extras.editor.completion import candidates
from schedlang.extras.editor.positions import Lines
from schedlang.extras.editor.words import examples, meanings
from schedlang.language.grammar import words
from schedlang.language.names import FIGURES
from schedlang.schedule.kinds import OPS

TEXT = """\
schedule s {
    param ranks = 2
    param microbatches = 4
    let all = 2 * microbatches
    rank r {
        let ahead = ranks - 1 - r
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { B(m) }
        assert peak(r) <= all
    }
}
"""


def last(text: str, **params: int) -> Analysis:
    *_, analysis = analyse(Source("s.sched", text), params)
    return analysis


def hover(piece: str, word: str, **params: int) -> str:
    return answers.hover(last(TEXT, **params), TEXT.index(piece), word) or ""


def test_hover() -> None:
    assert (
        hover("all", "all") == "```sched\nlet all = 2 * microbatches\n```\n`all` is 8"
    )
    assert hover("ahead", "ahead", ranks=3).endswith("`ahead` is 2, 1, 0")
    assert hover("microbatches {", "microbatches").startswith(
        "```sched\nparam microbatches = 4"
    )
    assert "`r` is" not in hover("r)", "r")
    assert hover("F(m)", "F").startswith(
        "`F(m)`: forward of microbatch m\n\nAt ranks = 2,"
    )
    assert "(4 of 4) of the peak memory, on rank 0" in hover("for m", "for")
    assert hover("peak(r)", "peak").startswith("`peak(r)`, `peak()`: the most")
    assert hover("assert", "assert").startswith("as in `assert ")


def test_many_ranks_are_shown_in_short() -> None:
    assert hover("ahead", "ahead", ranks=12).endswith(
        "`ahead` is 11, 10, 9, 8, 7, 6, …, 0"
    )


def test_hints() -> None:
    places = {
        TEXT[:place].split()[-4:][0]: text for place, text in answers.hints(last(TEXT))
    }
    assert list(places.values()) == [" = 8", " = 1, 0"]
    assert not list(answers.hints(last(TEXT.replace("2 * microbatches", "8"))))[1:]


def test_every_word_is_explained() -> None:
    known = meanings().keys() | examples().keys()
    assert not set(words().values()) - known
    assert not {op.word for op in OPS.values()} - meanings().keys()
    assert not FIGURES.keys() - meanings().keys()


@pytest.mark.parametrize(
    ("before", "wanted", "unwanted"),
    [
        ("", {"schedule", "let", "param"}, {"and", "F"}),
        ("schedule s { ", {"param", "rank", "block", "fill"}, {"F", "then"}),
        (
            "schedule s { rank r { ",
            {"F", "for", "overlap", "assert"},
            {"param", "rank"},
        ),
        ("schedule s { rank r { fo", {"for"}, {"param"}),
        ("schedule s { cost ", {"F", "send", "gather", "overlap"}, {"let", "peak"}),
        ("schedule s { weights ", {"latest", "stash", "delay"}, {"let"}),
        ("schedule s { objective ", {"makespan", "span"}, {"let"}),
        ("schedule s { send ", {"bf16", "fp16"}, {"let"}),
        ("schedule s { param ", {"ranks", "microbatches", "slices"}, {"let"}),
        ("schedule s { let a = ", {"if", "not"}, {"let", "fill"}),
        ('schedule s { import "', {"lib/v.sched"}, {"let"}),
        ("schedule s { # a ", set(), {"let"}),
        ("schedule s { ) ", {"let", "F"}, set()),
    ],
)
def test_completion(before: str, wanted: set[str], unwanted: set[str]) -> None:
    possible = candidates(before, len(before), "s.sched")
    offered = {*possible.words, *possible.others}
    assert wanted <= offered
    assert not unwanted & offered
    assert before[possible.start :] in ("fo", "")


def test_where_names_and_figures_can_stand() -> None:
    place = TEXT.index("peak")
    assert candidates(TEXT, place, "").takes_figures
    place = TEXT.index("ranks - 1")
    possible = candidates(TEXT, place, "")
    assert possible.takes_names
    assert not possible.takes_figures
    assert not candidates(TEXT, TEXT.index("ahead"), "").takes_names


def test_positions_count_in_utf_16() -> None:
    text = "a\n# \U0001f600 ü x\nlast"
    lines = Lines(text)
    assert lines.position(text.index("x")) == types.Position(1, 7)
    for offset in range(len(text) + 1):
        assert lines.offset(lines.position(offset)) == offset
    assert lines.offset(types.Position(1, 99)) == text.index("\nlast")
    assert lines.offset(types.Position(9, 0)) == len(text)
    assert lines.range(Span(0, 2)) == types.Range(
        types.Position(0, 0), types.Position(1, 0)
    )
