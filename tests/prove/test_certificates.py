"""Certificates of `schedc check --for microbatches=any`, honest ones and forgeries."""

import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest

from schedlang.compiler import check_program as compiled
from schedlang.compiler import compile
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.prove.certificates import what_it_proves
from schedlang.extras.prove.check_orders import Wrong, check
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.files.sources import source_of
from schedlang.proof.prove import ideal_execution
from tests.support.damaged_certificates import is_refused
from tests.support.forgeries import forged
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.slow

#: How many forgeries are tried.
FORGERIES = 200
#: Sizes of a class at which a certificate is held against the compiler: the first, and some around
#: the numbers that hide in the texts.
LOOKED_AT = (0, 1, 2, 3, 7, 12, 36, 98, 110)


@pytest.fixture(scope="module")
def honest() -> list[Any]:
    names = ["1f1b", "zb_h1", "frozen_1f1b", "1f1b_explicit", "two_encoders"]
    return [certificate_of(name, 2 if name != "two_encoders" else 3) for name in names]


def certificate_of(name: str, ranks: int) -> Any:
    proof = prove_for_all(PROGRAMS / f"{name}.sched", {"ranks": ranks})
    return json.loads(json.dumps(proof.certificate))


def falsehoods(document: Mapping[str, Any]) -> Iterator[str]:
    """What a certificate says that the compiler denies."""
    for one in document["classes"]:
        for n in LOOKED_AT:
            microbatches = one["base"] + one["period"] * n
            params = {**document["params"], "microbatches": microbatches}
            try:
                source = source_of(document["program"])
                wrong = compiled(source, params, document["transports"])
                execution = ideal_execution(compile(source, params))
            except CompileError as error:
                yield f"at {microbatches}: {error.diagnostics[0].message}"
                continue
            for diagnostic in (each for of in wrong.values() for each in of):
                if diagnostic.severity == "error":
                    yield f"at {microbatches}: {diagnostic.message}"
            if not one["idle"]:
                yield from other_figures(one["figures"], execution, n)


def other_figures(said: Mapping[str, Any], execution: Any, n: int) -> Iterator[str]:
    """The figures of a class for some n that are not those of the ideal execution."""
    line = execution.timeline
    real = {
        "makespan": line.makespan,
        "work": max(line.busy),
        "span": line.span,
        "peak": list(execution.peak_memory),
    }
    for name, value in real.items():
        number = (
            [at(of, n) for of in said[name]] if name == "peak" else at(said[name], n)
        )
        if number != value:
            yield f"{name} for n = {n}"


def at(number: Any, n: int) -> Fraction:
    constant, by_n, _ = map(Fraction, number)
    return constant + by_n * n


def test_nobody_gets_a_false_statement_past_the_checker(honest: list[Any]) -> None:
    assert not any(map(is_refused, honest))
    rng = Random(0)
    for number in range(FORGERIES):
        document, how = forged(rng.choice(honest), honest, rng)
        if not is_refused(document):
            false = list(falsehoods(document))
            assert not false, f"forgery {number}, {how}: {false}"


def test_a_text_that_is_another_at_sizes_that_nobody_tries_is_refused() -> None:
    document = certificate_of("1f1b", 3)
    old = "0 .. warmup                           { F(m) }"
    assert old in document["program"]
    new = old.replace("F(m)", "F(if microbatches > 100 then 0 else m)")
    document["program"] = document["program"].replace(old, new)
    with pytest.raises(Wrong, match="not one order for all these sizes"):
        what_it_proves(document)


@pytest.mark.parametrize("field", ["period", "holds", "kind"])
def test_a_class_is_refused_without_a_look_at_its_text(field: str) -> None:
    document = certificate_of("1f1b", 3)
    (one,) = document["classes"]
    first = one["ops"][0]
    if field == "period":
        one["period"] = 0
    elif field == "holds":
        first[3] = [0, 0, 0]
    else:
        assert first[:2] == ["F", 0]
        first[0] = "B"
    with pytest.raises((Wrong, LookupError)):
        check(document)


def test_a_certificate_has_the_texts_that_its_program_imports(tmp_path: Path) -> None:
    (tmp_path / "warm.sched").write_text(
        'import "deep.sched"\nlet more = deep(0)  # behind it'
    )
    (tmp_path / "deep.sched").write_text("fn deep(r) = r  # nothing else")
    text = (
        (PROGRAMS / "1f1b.sched")
        .read_text()
        .replace("rank r {", 'import "warm.sched" import "deep.sched"\n rank r {', 1)
    )
    text = text.replace("min(ranks - 1 - r,", "min(ranks - 1 - deep(r) + more,")
    (tmp_path / "own.sched").write_text(text)
    proof = prove_for_all(tmp_path / "own.sched", {"ranks": 3})
    document = json.loads(json.dumps(proof.certificate))
    assert "import" not in document["program"]
    assert "for microbatches >= " in what_it_proves(document)
    # A text with an import says what another file says, today.
    with pytest.raises(Wrong, match="imports files"):
        what_it_proves({**document, "program": text})
