"""The parts of a text and its names, whether it is a program or not: outline, folding, meaning of
each name, calls, snippets. Without a server.
"""

import random
import re

import pytest

from schedlang import Source
from schedlang.extras.editor.analysis import analyse, names_of
from schedlang.extras.editor.completion import candidates
from schedlang.extras.editor.outline import Entry, folds
from schedlang.extras.editor.semantics import pieces
from schedlang.extras.editor.signatures import call_at
from schedlang.language.grammar import FORMS
from schedlang.language.symbols import Symbols
from tests.support.paths import GALLERY
from tests.support.sizes import shares

TEXT = """\
schedule s {
    param ranks = 2
    param microbatches = 4
    fn twice(n) = 2 * n
    seq both(n) {
        repeat n { F(next)  B(next) }
    }
    pipeline down runs microbatches stage s in 0 .. ranks on s
    # The first line,
    # the second one.
    rank r {
        let ahead = ranks - 1 - r
        if ahead > 0 {
            repeat ahead { F(down(r), next) }
        }
        assert peak(r) <= twice(ahead)
    }
}
"""


def outline(text: str) -> list[Entry]:
    first = next(analyse(Source("s.sched", text), {}))
    return list(first.outline)


def listed(entries: tuple[Entry, ...] | list[Entry]) -> list[object]:
    """Names, and what stands in each part."""
    return [
        (each.name, listed(each.children)) if each.children else each.name
        for each in entries
    ]


INNER = ("if ahead > 0", ["repeat ahead"])
OUTLINE = [
    (
        "s",
        [
            "ranks",
            "microbatches",
            "twice",
            ("both", ["repeat n"]),
            "down",
            ("r", ["ahead", INNER]),
        ],
    )
]


@pytest.mark.core
def test_outline() -> None:
    (whole,) = outline(TEXT)
    assert listed([whole]) == OUTLINE
    by_name = {each.name: each for each in whole.children}
    assert by_name["ranks"].detail == "= 2"
    assert by_name["ranks"].kind == "param"
    assert TEXT[by_name["r"].place.start] == "r"
    assert outline("let a = 1\nfn f(x) = x\n")[1].name == "f"


@pytest.mark.core
def test_a_broken_program_has_the_outline_of_what_can_be_read() -> None:
    for broken in (
        TEXT.replace("let ahead =", "let ahead"),
        TEXT.replace("param ranks = 2", "param ranks = = 2"),
        TEXT[:-2],
    ):
        assert listed(outline(broken)) == OUTLINE


def test_folding() -> None:
    lines = TEXT.splitlines()
    found = {
        (lines[first].strip(), lines[last].strip()): is_comment
        for first, last, is_comment in folds(TEXT)
    }
    assert found == {
        ("schedule s {", "}"): False,
        ("seq both(n) {", "repeat n { F(next)  B(next) }"): False,
        ("# The first line,", "# the second one."): True,
        ("rank r {", "assert peak(r) <= twice(ahead)"): False,
        ("if ahead > 0 {", "repeat ahead { F(down(r), next) }"): False,
    }
    # A brace that is missing costs no more than its own block.
    assert len(folds(TEXT.replace("repeat ahead {", "repeat ahead"))) >= 3


def meanings(text: str) -> dict[str, set[str]]:
    """What each piece of a text is, by the piece; `+` for its properties."""
    found: dict[str, set[str]] = {}
    for start, end, kind, properties in pieces(Source("s.sched", text)):
        piece = text[start:end]
        found.setdefault(piece, set()).add("+".join([kind, *properties]))
    return found


@pytest.mark.core
def test_semantic_tokens() -> None:
    found = meanings(TEXT)
    assert found["ranks"] == {"variable+declaration+readonly", "variable+readonly"}
    assert found["r"] == {"parameter+declaration", "parameter"}
    assert found["twice"] == {"function+declaration", "function"}
    assert found["down"] == {"function+declaration", "function"}
    assert found["peak"] == {"property"}
    assert found["F"] == {"type"}
    assert found["rank"] == {"keyword"}
    assert found["# the second one."] == {"comment"}
    assert meanings("schedule s { let m = min(1, 2) }")["min"] == {
        "function+defaultLibrary"
    }
    # Two words that are one, in two lines.
    assert meanings("schedule s { assert bubble == 1 for\n  all }")["all"] == {
        "keyword"
    }


def names_with_uses(symbols: Symbols, end: int) -> list[tuple[str, int, int | None]]:
    """The declared names of a text's own file, and its uses with the place where each is declared."""
    declared = [
        (each.name, each.place.start, each.known.end)
        for each in symbols.declared
        if each.place.end <= end
    ]
    uses = [
        ("", use.place.start, use.declared.start if use.declared else None)
        for use in symbols.uses
        if use.place.end <= end
    ]
    return [*declared, *uses]


@pytest.mark.parametrize("paths", shares(GALLERY))
def test_a_mistake_costs_no_names(paths: list[object]) -> None:
    """A piece of an expression is missing, somewhere, as while one types it: all names that were
    declared still are, but for one whose own declaration is broken.
    """
    for path in paths:
        text = path.read_text()  # type: ignore[attr-defined]
        whole = names_of(Source(str(path), text))
        own = {each.name for each in whole.declared if each.place.end <= len(text)}
        places = [match.span() for match in re.finditer(r"(?<== )[\w.]+", text)]
        places += [match.span() for match in re.finditer(r"(?<=[-+*(] )\w+", text)]
        rng = random.Random(path.stem)  # type: ignore[attr-defined]
        for start, end in rng.sample(places, min(4, len(places))):
            broken = text[:start] + text[end:]
            found = {each.name for each in names_of(Source(str(path), broken)).declared}
            assert len(own - found) <= 1, (path, text[start:end], own - found)


@pytest.mark.core
def test_names_of_a_program_that_was_never_right() -> None:
    broken = TEXT.replace("if ahead > 0 {", "if ahead > {")
    offset = broken.index("> {") + 2
    possible = candidates(broken, offset, "s.sched")
    assert {"ranks", "microbatches", "twice", "down", "r", "ahead"} <= {
        symbol.name for symbol in possible.names
    }
    symbols = names_of(Source("s.sched", broken))
    symbol = symbols.at(broken.rindex("ahead"))
    assert symbol is not None
    assert symbol.place.start == broken.index("ahead")


@pytest.mark.parametrize(
    ("before", "label", "argument", "active"),
    [
        ("repeat 2 { F(", "F(m)", 0, "m"),
        ("repeat 2 { F(0, ", "F(s, m)", 1, "m"),
        ("repeat 2 { BW(", "BW(m)", 0, "m"),
        ("repeat 2 { send F(", "send F(m)", 0, "m"),
        ("run both(", "both(n)", 0, "n"),
        ("let x = twice(", "twice(n)", 0, "n"),
        ("let x = min(1, ", "min(a, b, …)", 1, "b"),
        ("let x = twice(min(1, 2) + ", "twice(n)", 0, "n"),
        ("repeat 2 { F(down(", "down(s)", 0, "s"),
        ("assert peak(", "peak(r)", 0, "r"),
        ("let x = (", None, 0, ""),
        ("repeat 2 { F(0)  ", None, 0, ""),
    ],
)
def test_signatures(before: str, label: str | None, argument: int, active: str) -> None:
    start = TEXT.index("        if ahead")
    text = f"{TEXT[:start]}{before}\n{TEXT[start:]}"
    call = call_at(Source("s.sched", text), start + len(before))
    if label is None:
        assert call is None
        return
    assert call is not None
    chosen = call.signatures[call.chosen]
    assert (chosen.label, call.argument) == (label, argument)
    assert chosen.arguments[argument] == active


@pytest.mark.core
@pytest.mark.parametrize(
    ("before", "wanted", "unwanted"),
    [
        ("", {"schedule"}, {"for"}),
        ("schedule s { ", {"param", "rank", "stage", "block"}, {"for", "if"}),
        ("schedule s { rank r { ", {"for", "repeat", "if", "overlap"}, {"rank"}),
        ("schedule s { let a = ", set(), {"if", "stage", "for"}),
    ],
)
def test_snippets(before: str, wanted: set[str], unwanted: set[str]) -> None:
    forms = candidates(before, len(before), "s.sched").forms
    offered = {word for word, _, _ in forms}
    assert wanted <= offered
    assert not unwanted & offered
    for word, shown, snippet in forms:
        # What it says without its places is the form itself.
        plain = re.sub(r"\$\{\d+:([^}]*)\}", r"\1", snippet).replace("$0", "…")
        assert plain.split() == shown.split()
        assert shown in FORMS.values()
        assert shown.startswith(word)
