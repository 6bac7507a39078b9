"""The ops of a rank recorded at once, against the same ops recorded one by one."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from schedlang import CompileError, Source
from schedlang.language import calls, expand
from schedlang.language.imports import load

_STAGES = "stage s in 0 .. 2 on 0"


def op(rng: random.Random, arity: int, forms: list[str]) -> str:
    """An op; sometimes wrong."""
    word = rng.choice(
        ["F", "F", "F", "B", "B", "BW", "W", "W"]
        if rng.random() < 0.97
        else ["R", "offload", "reload"]
    )
    if word == "W" and rng.random() < 0.5:
        return word
    stage = [str(rng.choice([0, 1] if rng.random() < 0.99 else [-1, 2, 9]))] if arity == 2 else []
    return f"{word}({', '.join([*stage, rng.choice(forms)])})"


def programs() -> Iterator[Source]:
    rng = random.Random(0)
    for number in range(1500):
        arity = rng.choice([1, 2])
        forms = rng.choice([["next"], ["next"], ["0", "1", "2", "3"], ["next", "0", "9"]])
        lines = []
        for _ in range(rng.randrange(1, 9)):
            ops = [op(rng, arity, forms) for _ in range(rng.choice([1, 1, 2]))]
            lines.append(f"overlap {{ {' '.join(ops)} }}" if len(ops) > 1 else ops[0])
        head = "param ranks = 1 param microbatches = 4 " + (_STAGES if arity == 2 else "")
        yield Source(f"{number}.sched", f"schedule s {{ {head} rank r {{ {' '.join(lines)} }} }}")


def recorded(source: Source) -> Any:
    """The ops of a program, or what is wrong with it."""
    try:
        return expand.expand(*load(source), {}).ranks
    except CompileError as error:
        return str(error)


def test_at_once_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: Counter[tuple[bool, bool]] = Counter()
    record = calls.record

    def noting(*arguments: Any) -> bool:
        known.append(record(*arguments))
        return known[-1]

    for source in programs():
        known: list[bool] = []
        monkeypatch.setattr(expand, "record", noting)
        at_once = recorded(source)
        monkeypatch.setattr(expand, "record", lambda *_: False)
        assert at_once == recorded(source), source.text
        verdicts[any(known), isinstance(at_once, str)] += 1
    # What is known is right; and much that is right is known.
    assert not verdicts[True, True]
    assert verdicts[True, False] > 250, verdicts
    assert verdicts[False, True] > 50, verdicts


def test_what_is_owed_in_the_order_of_its_stage_or_of_all() -> None:
    text = "schedule s {{ param ranks = 1 param microbatches = 2 {} rank r {{ {} }} }}"
    ops = "F(0, next) F(1, next) B(1, next) B(0, next) F(0, next) F(1, next) {} B(1, next) B(0, next) {} {} {}"
    for weights, expected in (
        (["W", "W", "W", "W"], "0F0 1F0 1I0 0I0 0F1 1F1 1W0 1I1 0I1 0W0 1W1 0W1"),
        (
            ["W(0, next)", "W(0, next)", "W(1, next)", "W(1, next)"],
            "0F0 1F0 1I0 0I0 0F1 1F1 0W0 1I1 0I1 0W1 1W0 1W1",
        ),
    ):
        found = recorded(Source("w.sched", text.format(_STAGES, ops.format(*weights))))
        assert found[0].text() == expected
