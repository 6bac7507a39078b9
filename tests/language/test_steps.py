"""Loops that go through a range by steps: `for m in 0 .. n by -1`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang import CompileError, Source
from schedlang.compiler import compile_tree
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.extras.prove.sets.outcome import contains, prove
from schedlang.language.expand import expand
from schedlang.language.loading import load

NUMBERS = st.integers(-9, 9)
STEPS = st.integers(-4, 4).filter(bool)

#: Every microbatch once, whatever the step and the sizes.
BY_STEPS = """
schedule by_steps {{
    param ranks = 4
    param microbatches = 8
    rank r {{
        for k in 0 .. {step} {{ for m in k .. microbatches by {step} {{ F(m) }} }}
        for m in 0 .. microbatches by {back} {{ B(m) }}
    }}
}}
"""


def numbers_of(loop: str) -> list[int]:
    """The numbers that a loop goes through."""
    text = f"""schedule s {{
        param ranks = 1  param microbatches = 40
        rank r {{ {loop} {{ F(m + 20) }} }}
    }}"""
    schedule = expand(*load(Source("s.sched", text)), {})
    return [number - 20 for number in schedule.ranks[0].microbatch]


@given(NUMBERS, NUMBERS, STEPS)
def test_a_step_takes_of_a_range_what_a_slice_takes_of_a_list(
    start: int, stop: int, step: int
) -> None:
    expected = list(range(start, stop))[::step]
    assert numbers_of(f"for m in {start} .. {stop} by {step}") == expected
    assert numbers_of(f"let by = {step}  for m in {start} .. {stop} by by") == expected


def test_a_step_of_0_is_refused() -> None:
    with pytest.raises(CompileError, match="a range by steps of 0 comes to no end"):
        numbers_of("for m in 0 .. 3 by 0")


def test_a_step_is_whole() -> None:
    with pytest.raises(CompileError, match="the step of a range is a whole number"):
        numbers_of("for m in 0 .. 3 by 0.5")


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("back", [-1, 1])
def test_the_proofs_for_all_sizes_agree_with_the_compiler(step: int, back: int) -> None:
    """Forwards and backwards once each: ranks do all of them in one order, so none waits for ever."""
    text = BY_STEPS.format(step=step, back=back)
    verdict = prove_for_all(text).verdicts["portable"]
    assert verdict.proved == "microbatches >= 1"
    source, tree = load(Source("by_steps.sched", text))
    outcome = prove(tree, {})
    for ranks in (1, 3):
        for microbatches in range(1, 8):
            sizes = {"ranks": ranks, "microbatches": microbatches}
            assert contains(outcome.proved, sizes)
            compile_tree(source, tree, sizes)


def test_what_a_step_leaves_out_is_missing_for_all_sizes() -> None:
    text = BY_STEPS.format(step=1, back=-2)
    verdict = prove_for_all(text).verdicts["portable"]
    assert verdict.proved == "microbatches == 1"
    assert verdict.wrong == "microbatches >= 2"
    outcome = prove(load(Source("by_steps.sched", text))[1], {})
    assert contains(outcome.proved, {"ranks": 3, "microbatches": 1})
    assert contains(outcome.wrong, {"ranks": 3, "microbatches": 2})
    assert contains(outcome.wrong, {"ranks": 3, "microbatches": 5})
