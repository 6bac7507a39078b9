"""What actions need, of plans that are written out: whether it is there, and what is told if not."""

import pytest

from schedlang import CompileError, Costs
from schedlang.proof.prove import simulate
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.needs import needs_of
from tests.support.written import words, written, wrong


def test_what_is_needed_is_in_rows() -> None:
    needs = needs_of(written("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"))
    rows = zip(
        needs.user.tolist(),
        map(Kind, needs.made.tolist()),
        needs.stage.tolist(),
        needs.number.tolist(),
        needs.maker.tolist(),
        needs.receive.tolist(),
        needs.is_far.tolist(),
        strict=True,
    )
    assert sorted(rows) == [
        (1, Kind.F, 0, 0, 0, -1, False),
        (3, Kind.F, 0, 0, 0, -1, False),
        (3, Kind.B, 1, 0, 6, 2, True),
        (5, Kind.F, 0, 1, 0, 4, True),
        (6, Kind.F, 1, 1, 5, -1, False),
        (7, Kind.B, 1, 1, 6, -1, False),
    ]


def test_what_is_not_there_has_no_row() -> None:
    needs = needs_of(written("0B0 0SEND_F0", "1F0 1B0"))
    assert sorted(zip(needs.user.tolist(), needs.maker.tolist(), strict=True)) == [
        (0, -1),
        (0, 3),
        (1, -1),
        (2, -1),
        (3, 2),
    ]
    assert needs.receive.tolist() == [-1] * 5


def test_a_step_needs_the_gradients_of_its_own_update() -> None:
    layout = Layout((0,), (Pipeline("", 0, 1, 4),), updates=2)
    plan = written("0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0U1 0B3", layout=layout)
    (told,) = wrong(plan)
    assert told.message == "`0U1` on rank 0 runs before `0B3`"
    assert words(told) == ["0U1"]


@pytest.mark.parametrize("models", ["ab", "ba"])
def test_a_step_needs_the_gradients_of_its_own_model(models: str) -> None:
    """Whichever is trained first."""
    layout = Layout(
        (0, 0), (Pipeline("a", 0, 1, 1), Pipeline("b", 1, 2, 1)), models=True
    )
    ops = {"a": "0F0 0B0 0U", "b": "1F0 1B0 1U"}
    assert wrong(written(" ".join(ops[model] for model in models), layout=layout)) == []


@pytest.mark.parametrize("costs", [Costs(), Costs(sum_times=(1,))], ids=["", "sums"])
def test_a_step_overlaps_with_no_gradient_that_it_needs(costs: Costs) -> None:
    """Nor is it simulated, where nobody asks whether that changes the weights."""
    with pytest.raises(CompileError) as caught:
        simulate(written("0F0 (0B0;0U)"), costs)
    (told,) = caught.value.diagnostics
    assert told.message == "`0U` on rank 0 runs before `0B0`"


def test_a_slice_needs_the_one_before() -> None:
    layout = Layout((0,), (Pipeline("", 0, 1, 1),), slices=2)
    (told,) = wrong(written("0F1 0F0 0B1 0B0", layout=layout))
    assert told.message == "`0F(m0.k1)` on rank 0 runs before `0F(m0.k0)`"


def test_a_backward_needs_what_was_made_again() -> None:
    """Only the recomputation comes too early."""
    (told,) = wrong(written("0R0 0B0 0F0"))
    assert told.message == "`0R0` on rank 0 runs before `0F0`"
    assert words(told) == ["0R0"]
