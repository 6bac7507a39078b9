"""Sequences, statements with a name: `seq drain(n) { … }` and `run drain(3)`."""

import pytest

from schedlang import CompileError, Source, compile
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.extras.prove.sets.outcome import contains, prove
from schedlang.language.expand import expand
from schedlang.language.loading import load
from schedlang.language.symbols import symbols_of
from schedlang.proof.prove import simulate
from tests.support.paths import PROGRAMS

#: 1F1B of two sequences, of which one runs the other, with names that the rank has as well.
TEXT = """
schedule sequences {
    param ranks = 4
    param microbatches = 8
    seq both(count) { repeat count { F(next)  B(next) } }
    seq one_f_one_b(warmup, all) {
        let count = all - warmup
        for m in 0 .. warmup { F(next) }
        run both(count)
        for m in 0 .. warmup { B(next) }
    }
    rank r {
        let count = min(ranks - 1 - r, microbatches)
        run one_f_one_b(count, microbatches)
        assert peak(r) <= count + 1
    }
}
"""


def order(items: str, body: str) -> str:
    """The ops of a rank."""
    text = f"""schedule s {{
        param ranks = 1  param microbatches = 8  {items}
        rank r {{ {body} }}
    }}"""
    return expand(*load(Source("s.sched", text)), {}).ranks[0].text()


def test_a_sequence_is_what_its_statements_are() -> None:
    plan = compile(Source("s.sched", TEXT))
    same = compile(PROGRAMS / "1f1b.sched")
    assert [rank.compute().text() for rank in plan.ranks] == [
        rank.compute().text() for rank in same.ranks
    ]
    assert simulate(plan).timeline.makespan == 33


def test_names_of_a_sequence_are_its_own() -> None:
    swapped = "seq two(a, b) { F(a)  F(b) }"
    assert (
        order(swapped, "let a = 1  let b = 2  run two(b, a)  run two(a, b)")
        == "0F2 0F1 0F1 0F2"
    )
    own = "seq own(n) { let k = n + 1  for i in 0 .. 2 { F(k + i) } }"
    assert (
        order(own, "for i in 0 .. 2 { run own(2 * i)  F(i) }")
        == "0F1 0F2 0F0 0F3 0F4 0F1"
    )


def test_a_sequence_stands_in_loops_branches_and_parts() -> None:
    assert (
        order("seq f(m) { F(m) }", "for m in 0 .. 3 by -1 { if m > 0 { run f(m) } }")
        == "0F2 0F1"
    )
    assert order("seq none() { }", "run none()  F(0)") == "0F0"
    text = (PROGRAMS / "pipedream_2bw.sched").read_text()
    named = text.replace(
        "    rank r {", "    seq ahead(n) { for m in 0 .. n { F(m) } }\n    rank r {"
    )
    named = named.replace(
        "warmup { for m in 0 .. ahead { F(m) } }", "warmup { run ahead(ahead) }"
    )
    assert named.count("run ahead(ahead)") == 1
    with pytest.raises(CompileError, match="`ahead` is already declared"):
        compile(Source("s.sched", named))
    named = named.replace("seq ahead", "seq first").replace("run ahead(", "run first(")
    assert [rank.text() for rank in compile(Source("s.sched", named)).ranks] == [
        rank.text() for rank in compile(Source("s.sched", text)).ranks
    ]


def test_ops_of_a_sequence_count_where_it_runs() -> None:
    with pytest.raises(CompileError, match="more than"):
        order("seq f() { F(next) }", "repeat 1000000000 { run f() }")


def test_sequences_of_sequences_stay_small() -> None:
    doubling = "seq s0() { F(next) }  " + "  ".join(
        f"seq s{n}() {{ run s{n - 1}()  run s{n - 1}() }}" for n in range(1, 40)
    )
    with pytest.raises(CompileError) as caught:
        order(doubling, "run s39()")
    assert caught.value.diagnostics[0].code == "nesting"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("run drian(3)", "no sequence `drian` in scope"),
        ("run drain()", "`drain` with 0 arguments, it takes 1 argument"),
        ("run microbatches(3)", "`microbatches` is no sequence"),
        ("run drain(0.5)", "an argument of a sequence is a whole number"),
        ("F(drain(3))", "`drain` is a sequence: write `run drain"),
        ("F(drain)", "`drain` is a sequence: write `run drain"),
        ("run drain(next)", "`next` stands only for the microbatch of an op"),
        ("run drain(9)", "microbatches 0 to 7"),
    ],
)
def test_what_is_wrong_with_a_sequence(body: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        order("seq drain(m) { F(m) }", body)


def test_a_sequence_knows_what_stands_above_it_alone() -> None:
    for body in ("F(r)", "F(later)", "run me()"):
        with pytest.raises(CompileError, match="in scope"):
            order(f"seq me() {{ {body} }}  let later = 1", "run me()")


def test_a_fault_in_a_sequence_is_told_there_with_its_values() -> None:
    with pytest.raises(CompileError) as caught:
        order(
            "seq down(n) { repeat n - 2 { F(next) } }",
            "for m in 0 .. 3 { run down(2 - m) }",
        )
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "negative-repeat"
    assert "n = 1" in str(diagnostic)


def test_the_proofs_for_all_sizes_read_sequences() -> None:
    assert prove_for_all(TEXT).verdicts["portable"].proved == "microbatches >= 1"
    outcome = prove(load(Source("s.sched", TEXT))[1], {})
    for ranks in (1, 2, 5):
        for microbatches in (1, 4, 9):
            assert contains(
                outcome.proved, {"ranks": ranks, "microbatches": microbatches}
            )


def test_a_sequence_is_a_symbol() -> None:
    source, tree = load(Source("s.sched", TEXT))
    symbols = symbols_of(source, tree, len(TEXT))
    symbol = symbols.at(TEXT.index("run both") + 5)
    assert symbol is not None
    assert (symbol.kind, symbol.takes) == ("seq", 1)
    assert [TEXT[place.start : place.end] for place in symbols.places_of(symbol)] == [
        "both"
    ] * 2
    count = symbols.at(TEXT.index("repeat count") + 7)
    assert count is not None
    assert count.place.start == TEXT.index("(count)") + 1
