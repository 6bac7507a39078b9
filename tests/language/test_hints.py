"""Helps that can be done at once: their edits do what they say."""

import random
import re
from pathlib import Path

import pytest

from schedlang import CompileError, Source
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.rendering import to_json
from schedlang.diagnostics.repair import Repair
from schedlang.language.loading import load
from schedlang.language.names import check_names
from tests.support.paths import DIAGNOSTICS, GALLERY, PROGRAMS

HEAD = "schedule s { param ranks = 2 param microbatches = 4 "
BODY = "rank r { for m in 0 .. microbatches { F(m) B(m) } } }"


def wrong(source: Source) -> list[Diagnostic]:
    """What is wrong with a program before it runs."""
    try:
        return check_names(*load(source))
    except CompileError as error:
        return error.diagnostics


def mended(source: Source, diagnostic: Diagnostic) -> Source:
    """A program with the edits of a diagnostic made."""
    return Repair("", diagnostic.edits).apply(source)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (HEAD + BODY.replace("microbatches", "microbatchs"), HEAD + BODY),
        (HEAD + BODY.replace("F(m)", "F(mm)"), HEAD + BODY),
        (HEAD + BODY.replace("for", "fro"), HEAD + BODY),
        (HEAD + BODY.replace("rank r", "rnak r"), HEAD + BODY),
        (HEAD.replace("param ranks", "pram ranks") + BODY, HEAD + BODY),
        (HEAD + "let a = world_size " + BODY, HEAD + "let a = ranks " + BODY),
        (HEAD + "let a = abss(3) " + BODY, HEAD + "let a = abs(3) " + BODY),
        (
            HEAD + "let a = [1, 2] let b = aa[0] " + BODY,
            HEAD + "let a = [1, 2] let b = a[0] " + BODY,
        ),
        (HEAD + "objective makspan " + BODY, HEAD + "objective makespan " + BODY),
        (
            HEAD + "seq drain(n) { W } " + BODY.replace("F(m)", "run dran(1)"),
            HEAD + "seq drain(n) { W } " + BODY.replace("F(m)", "run drain(1)"),
        ),
        (HEAD + "let a = ranks && 1 " + BODY, HEAD + "let a = ranks and 1 " + BODY),
        (HEAD + "let a = min(ranks 2) " + BODY, HEAD + "let a = min(ranks, 2) " + BODY),
    ],
)
def test_what_is_written_is_what_was_meant(written: str, meant: str) -> None:
    source = Source("s.sched", written)
    (diagnostic,) = wrong(source)
    assert mended(source, diagnostic).text == meant
    assert len(to_json(diagnostic)["edits"]) == len(diagnostic.edits) == 1


def test_the_same_habit_is_mended_wherever_it_is() -> None:
    written = HEAD + "let a = ranks && 1\nlet b = ranks && 2\n" + BODY
    source = Source("s.sched", written)
    (diagnostic,) = wrong(source)
    assert mended(source, diagnostic).text == written.replace("&&", "and")


def test_what_takes_more_thought_has_no_edit() -> None:
    for item in ("let a = 2 ** 3", "let a = 2 // half of it\n", "let a = ceil(3)"):
        (diagnostic,) = wrong(Source("s.sched", HEAD + item + " " + BODY))
        assert diagnostic.help
        assert not diagnostic.edits


def misspelt(path: Path, rng: random.Random) -> Source:
    """A program of the gallery with a letter less somewhere."""
    text = path.read_text()
    words = [match for match in re.finditer(r"^[^#\n]*?(\w{5,})", text, re.M)]
    start, end = rng.choice(words).span(1)
    place = rng.randrange(start, end)
    return Source(str(PROGRAMS / "s.sched"), text[:place] + text[place + 1 :])


@pytest.mark.slow
def test_no_edit_leaves_what_it_is_for_or_makes_more_mistakes() -> None:
    rng = random.Random(0)
    sources = [
        Source(path.name, path.read_text())
        for path in sorted(DIAGNOSTICS.glob("*.sched"))
    ]
    sources += [misspelt(rng.choice(GALLERY), rng) for _ in range(60)]
    tried = 0
    for source in sources:
        found = wrong(source)
        for diagnostic in found:
            if not diagnostic.edits:
                continue
            tried += 1
            left = wrong(mended(source, diagnostic))
            places = [(each.message, each.labels[0].span.start) for each in left]
            assert (diagnostic.message, diagnostic.labels[0].span.start) not in places
            # Behind a mistake of syntax nothing else is looked for, so mending one may bring up
            # others.
            assert len(left) < len(found) or found[0].code == "syntax"
    assert tried > 30
