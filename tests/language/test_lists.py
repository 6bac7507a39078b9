"""Lists: `let depth = [3, 2, 2, 1]`, of which `depth[r]` is a value; `param depth[ranks] = …` is a
list that users may give.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang import (
    CompileError,
    Kind,
    ParameterError,
    Source,
    compile,
    read_plan,
    write_plan,
)
from schedlang.advice.advice import advise
from schedlang.cli.main import main
from schedlang.compiler import compile_tree
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.extras.prove.sets.outcome import contains, prove
from schedlang.language.expand import expand
from schedlang.language.formatting import formatted
from schedlang.language.loading import load
from schedlang.language.symbols import symbols_of

#: 1F1B where each rank looks its warm-up up.
DEPTHS = """
schedule depths {
    param ranks = 4
    param microbatches = 8
    let depth = [3, 2, 1, 0]
    rank r {
        let warmup = min(depth[r], microbatches)
        repeat warmup                { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
        repeat warmup                { B(next) }
        assert peak(r) <= depth[r] + 1
    }
}
"""


def microbatches_of(items: str, body: str) -> list[int]:
    """The microbatches of the forwards that a rank does."""
    text = f"""schedule s {{
        param ranks = 1  param microbatches = 40  {items}
        rank r {{ {body} }}
    }}"""
    return list(expand(*load(Source("s.sched", text)), {}).ranks[0].microbatch)


@given(st.lists(st.integers(0, 39), min_size=1, max_size=9))
def test_a_list_has_its_values_in_order(values: list[int]) -> None:
    items = f"let list = {values}"
    count = len(values)
    assert microbatches_of(items, f"for k in 0 .. {count} {{ F(list[k]) }}") == values
    back = f"for k in 0 .. {count} by -1 {{ F(list[k]) }}"
    assert microbatches_of(items, back) == values[::-1]


@given(st.lists(st.integers(0, 39), min_size=1, max_size=9), st.integers(-3, 12))
def test_a_value_that_there_is_not_is_refused(values: list[int], number: int) -> None:
    items = f"let list = {values}"
    if 0 <= number < len(values):
        assert microbatches_of(items, f"F(list[{number}])") == [values[number]]
        return
    with pytest.raises(CompileError) as caught:
        microbatches_of(items, f"F(list[{number}])")
    assert [each.code for each in caught.value.diagnostics] == ["no-such-value"]


def test_values_are_expressions_and_lists_stand_in_functions_and_claims() -> None:
    items = "let two = 2  let list = [two, two + 1, microbatches - 1]  fn last(k) = list[2 - k]"
    assert microbatches_of(items, "F(last(0))  F(last(1))  F(list[0])") == [39, 3, 2]
    text = DEPTHS.replace(
        "let depth = [3, 2, 1, 0]", "let one = 1  let depth = [ranks - 1, 2, one, 0]"
    )
    compile(Source("s.sched", text))
    with pytest.raises(CompileError, match="is 4 <= 3, on rank 0"):
        compile(Source("s.sched", text.replace("depth[r] + 1", "depth[r]")))


def test_decimals_are_for_costs() -> None:
    text = DEPTHS.replace(
        "let depth", "let time = [1, 1.5, 1.5, 2]  cost F(s) = time[s]  let depth"
    )
    compile(Source("s.sched", text))
    with pytest.raises(CompileError, match="whole number, this is a decimal"):
        compile(Source("s.sched", text.replace("repeat warmup ", "repeat time[r] ")))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("depht[r]", "no list `depht` in scope"),
        ("ranks[r]", "`ranks` is no list"),
        ("depth", r"`depth` is a list: write `depth\[0\]` for its first value"),
        ("depth[0.5]", "the number of a value is a whole number"),
        ("depth[next]", "`next` stands only for the microbatch of an op"),
    ],
)
def test_what_is_no_value_of_a_list(wrong: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compile(Source("s.sched", DEPTHS.replace("min(depth[r]", f"min({wrong}")))


def test_the_proofs_for_all_sizes_agree_with_the_compiler() -> None:
    assert prove_for_all(DEPTHS).verdicts["portable"].proved == "microbatches >= 1"
    source, tree = load(Source("depths.sched", DEPTHS))
    outcome = prove(tree, {})
    for ranks in range(1, 7):
        for microbatches in range(1, 7):
            sizes = {"ranks": ranks, "microbatches": microbatches}
            try:
                compile_tree(source, tree, sizes)
            except CompileError as error:
                codes = {each.code for each in error.diagnostics}
                # A claim is no part of what is proved for all sizes.
                assert contains(outcome.wrong, sizes) or codes == {"assert"}
            else:
                assert contains(outcome.proved, sizes)


def test_a_value_by_a_number_of_microbatches_is_not_proved() -> None:
    text = DEPTHS.replace("rank r {", "let last = depth[microbatches - 5]  rank r {")
    verdict = prove_for_all(text).verdicts["portable"]
    # The first sizes were compiled one by one.
    assert verdict.wrong == "1 <= microbatches <= 4"
    assert verdict.unknown == "microbatches >= 9"
    assert "depends on `microbatches`" in verdict.reason


def test_a_list_is_a_symbol() -> None:
    source, tree = load(Source("depths.sched", DEPTHS))
    symbols = symbols_of(source, tree, len(DEPTHS))
    symbol = symbols.at(DEPTHS.index("depth[r] + 1"))
    assert symbol is not None
    assert symbol.kind == "list"
    assert [DEPTHS[place.start : place.end] for place in symbols.places_of(symbol)] == [
        "depth"
    ] * 3


#: 1F1B where users may give the warm-up of each rank.
GIVEN = DEPTHS.replace("let depth =", "param depth[ranks] =")


@pytest.mark.core
def test_a_list_is_a_parameter() -> None:
    source = Source("given.sched", GIVEN)
    alike = compile(Source("s.sched", DEPTHS))
    assert [each.text() for each in compile(source).ranks] == [
        each.text() for each in alike.ranks
    ]
    deeper = compile(source, {"depth": [5, 3, 2, 0]})
    assert deeper.lists == {"depth": (5, 3, 2, 0)}
    assert deeper.title == "depths (ranks = 4, microbatches = 8, depth = [5, 3, 2, 0])"
    rank = deeper.ranks[0]
    forwards = list(rank.kind).index(Kind.B)
    assert sum(kind == Kind.F for kind in rank.kind[:forwards]) == 6


@pytest.mark.core
def test_a_plan_remembers_the_lists_of_its_user(tmp_path: Path) -> None:
    plan = compile(Source("given.sched", GIVEN), {"depth": (3, 3, 1, 0)})
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert json.loads(path.read_text())["params"]["depth"] == [3, 3, 1, 0]
    assert read_plan(path) == plan
    damaged = path.read_text().replace('"depth": [\n   3', '"depth": [\n   "3"')
    path.write_text(damaged)
    with pytest.raises(CompileError, match="whole numbers, or lists of them"):
        read_plan(path)


@pytest.mark.core
@pytest.mark.parametrize(
    ("params", "code", "message"),
    [
        ({"ranks": 3}, "list-length", "`depth` has 4 values, it must have 3"),
        ({"depth": [1, 0]}, "list-length", "`depth` has 2 values, it must have 4"),
        ({"depth": 3}, "list-length", "`depth` has 1 value, it must have 4"),
        ({"depth": [10**10] * 4}, "parameter", "it must be within"),
        ({"microbatches": [1, 2]}, "parameter", "given a list, it is one number"),
    ],
)
def test_a_list_has_as_many_values_as_it_says(
    params: dict[str, int | list[int]], code: str, message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        compile(Source("given.sched", GIVEN), params)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert message in diagnostic.message


@pytest.mark.core
def test_the_length_of_a_list_of_the_program_is_checked() -> None:
    text = DEPTHS.replace("let depth =", "let depth[ranks] =")
    compile(Source("s.sched", text))
    with pytest.raises(CompileError, match="`depth` has 4 values, it must have 3"):
        compile(Source("s.sched", text), {"ranks": 3})


@pytest.mark.core
def test_a_list_without_values_must_be_given() -> None:
    source = Source("s.sched", GIVEN.replace(" = [3, 2, 1, 0]", ""))
    with pytest.raises(ParameterError, match="`depth` has no values"):
        compile(source)
    assert compile(source, {"depth": [3, 2, 1, 0]}).lists == {"depth": (3, 2, 1, 0)}


@pytest.mark.core
def test_claims_are_about_the_list_that_is_given() -> None:
    claim = "assert depth[0] == 3"
    text = GIVEN.replace("    rank r {", f"    {claim}\n    rank r {{")
    compile(Source("s.sched", text))
    with pytest.raises(CompileError, match=r"depth\[0\] = 4"):
        compile(Source("s.sched", text), {"depth": [4, 2, 1, 0]})


@pytest.mark.core
def test_lists_of_users_are_formatted_and_given_at_the_command(tmp_path: Path) -> None:
    assert formatted(Source("s.sched", GIVEN)) == GIVEN.lstrip()
    path = tmp_path / "given.sched"
    path.write_text(GIVEN)
    assert main(["compile", str(path), "-p", "depth=5,3,2,0"]) == 0
    assert main(["compile", str(path), "-p", "ranks=3"]) == 1
    assert main(["compile", str(path), "-p", "ranks=3", "-p", "depth=2,1,0"]) == 0


@pytest.mark.core
def test_a_deadlock_is_told_with_the_list_that_shows_it() -> None:
    source = Source("given.sched", GIVEN)
    depths = {"depth": [0, 0, 0, 5]}
    with pytest.raises(CompileError) as caught:
        compile(source, depths)
    (diagnostic,) = advise(caught.value, source, depths).diagnostics
    assert any("-p depth=0,0,0,5" in note for note in diagnostic.notes)
