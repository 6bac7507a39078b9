"""Programs with several mistakes, and with one: as many messages as mistakes."""

import random
from collections import Counter
from itertools import combinations

import pytest

from schedlang import CompileError, Source, read_source
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.language.grammar import tokens_of
from schedlang.language.parser import parse
from tests.support.paths import PROGRAMS

PROGRAM = """\
schedule steps {
    param ranks = 4
    param microbatches = 8
    require microbatches >= ranks, "why"
    let n = 2 * ranks
    fn half(x) = if x > 1 then x / 2 else 1
    stage s in 0 .. n on s % ranks
    cost F = 3
    rank r {
        let warmup = min(ranks - 1 - r, microbatches)
        repeat warmup { F(stage(0), next) }
        for m in 0 .. microbatches {
            F(stage(0), m)
            B(stage(1), m)
        }
        assert peak(r) <= 2 * ranks
    }
}
"""
#: A right text, and a wrong one in its place; each is in a statement of its own.
MISTAKES = (
    ("param ranks = 4", "param ranks: 4"),
    (">= ranks,", ">= ranks && ranks > 0,"),
    ("let n =", "lte n ="),
    ("if x > 1 then", "if x > 1"),
    ("stage s in 0 .. n on", "stage s in 0 ... n on"),
    ("cost F = 3", "cost F = [3, 3]"),
    ("let warmup", "let W"),
    ("repeat warmup", "while warmup"),
    ("for m in 0 .. microbatches", "for m in range(microbatches)"),
    ("F(stage(0), m)", "F[stage(0), m]"),
    ("B(stage(1), m)", "B(stage(1) m)"),
    ("assert peak(r) <=", "assert peak(r) < ="),
)


def syntax_errors(text: str) -> list[Diagnostic]:
    try:
        parse(Source("s.sched", text))
    except CompileError as error:
        return error.diagnostics
    return []


@pytest.mark.parametrize("number", [1, 2, len(MISTAKES) - 1, len(MISTAKES)])
def test_as_many_messages_as_mistakes(number: int) -> None:
    assert not syntax_errors(PROGRAM)
    for mistakes in combinations(MISTAKES, number):
        text = PROGRAM
        for right, wrong in mistakes:
            assert text.count(right) == 1
            text = text.replace(right, wrong)
        lines = [
            1 + line
            for line, (before, after) in enumerate(
                zip(PROGRAM.splitlines(), text.splitlines(), strict=True)
            )
            if before != after
        ]
        diagnostics = syntax_errors(text)
        source = Source("s.sched", text)
        assert [
            source.position(each.labels[0].span.start)[0] for each in diagnostics
        ] == lines


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.slow
def test_one_mistake_is_hardly_ever_told_twice(seed: int) -> None:
    """A token of a program left out, doubled, or replaced by another one."""
    chance = random.Random(seed)
    told: Counter[int] = Counter()
    for path in sorted(PROGRAMS.glob("*.sched")):
        text = read_source(path).text
        tokens = tokens_of(text)
        token = chance.choice(tokens)
        replaced = chance.choice(["", f"{token} {token}", str(chance.choice(tokens))])
        mutant = f"{text[: token.start_pos]} {replaced} {text[token.end_pos :]}"
        told[len(syntax_errors(mutant))] += 1
    # Some are programs still, with another meaning.
    assert told[1] > 25
    assert told.total() - told[0] - told[1] <= 1
    assert max(told) <= 2


def test_what_is_no_program_at_all_ends_soon() -> None:
    chance = random.Random(0)
    words = ["{", "}", "(", "for", "F", "x", "=", "1", "..", ";", '"', "\n", "schedule"]
    for length in (1, 10, 100, 5000):
        text = " ".join(chance.choice(words) for _ in range(length))
        assert 1 <= len(syntax_errors(text)) <= 20


@pytest.mark.slow
def test_behind_every_word_a_mistake_has_a_message() -> None:
    """Whatever the parser would take, a message can name it."""
    for path in sorted(PROGRAMS.glob("*.sched")):
        text = read_source(path).text
        for token in tokens_of(text)[::50]:
            assert syntax_errors(f"{text[: token.end_pos]} ) ")
    assert syntax_errors("schedule s { assert 1 2 }")
