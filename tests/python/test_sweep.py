"""`load` and `sweep`: schedules of a notebook, and tables of many."""

from collections.abc import Callable
from typing import Any

import pytest

import schedlang
from schedlang import Costs, simulate
from tests.support.paths import PROGRAMS


def test_a_notebook_shows_what_is_loaded() -> None:
    plan = schedlang.load("1f1b", ranks=8)
    assert plan == schedlang.compile("1f1b", {"ranks": 8})
    html = plan._repr_html_()
    assert html
    assert "one_f_one_b (ranks = 8, microbatches = 8)" in html
    assert "<iframe" in html


def test_load_takes_what_compile_takes(tmp_path: Any) -> None:
    costs = Costs(p2p_time=0.5)
    program = PROGRAMS / "zb_h1.sched"
    plan = schedlang.load(program, costs, transport="nccl", microbatches=5)
    assert plan == schedlang.compile(
        program, {"microbatches": 5}, costs, transport="nccl"
    )
    schedlang.write_plan(plan, tmp_path / "plan.json")
    assert schedlang.load(tmp_path / "plan.json").transport == "nccl"
    with pytest.raises(ValueError, match="`params` are those of a program"):
        schedlang.load(tmp_path / "plan.json", ranks=2)


def test_a_sweep_has_a_row_for_each_size_and_costs() -> None:
    """With the figures of a simulation, all of them plain values."""
    costs = {"near": Costs(), "far": Costs(p2p_time=0.5)}
    rows = schedlang.sweep(
        ["1f1b", "zb_h1"], costs, ranks=[2, 4], microbatches=range(4, 9, 4)
    )
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert all(
            isinstance(value, (str, int, float, type(None))) for value in row.values()
        )
        params = {"ranks": row["ranks"], "microbatches": row["microbatches"]}
        execution = simulate(row["schedule"], costs[row["costs"]], params=params)
        assert row["makespan"] == execution.timeline.makespan
        assert row["bubble_over_ideal"] == execution.timeline.bubble_over_ideal
        assert row["bubble_of_span"] == execution.timeline.bubble_of_span
        assert row["peak_activations"] == max(execution.peak_activations)
        assert row["refusal"] is None


def test_a_size_that_is_refused_has_the_reason() -> None:
    rows = schedlang.sweep("interleaved_1f1b", ranks=4, microbatches=[7, 8], group=4)
    assert [row["refusal"] is None for row in rows] == [False, True]
    assert "makespan" not in rows[0]
    assert rows[0]["microbatches"] == 7


def test_a_program_that_is_text_has_its_own_name() -> None:
    text = (PROGRAMS / "gpipe.sched").read_text()
    (row,) = schedlang.sweep(text, ranks=2, microbatches=2)
    assert row["schedule"] == "gpipe"


def test_each_program_takes_the_parameters_that_it_has() -> None:
    rows = schedlang.sweep(
        ["1f1b", "interleaved_1f1b"], ranks=2, microbatches=8, chunks=[2, 4]
    )
    assert [row.get("chunks") for row in rows] == [None, 2, 4]


@pytest.mark.parametrize(
    ("call", "error", "complaint"),
    [
        (
            lambda: schedlang.sweep("1f1b", depth=3),
            ValueError,
            "no program has a parameter `depth`",
        ),
        (lambda: schedlang.sweep("1f1b", ranks=[]), ValueError, "`ranks` has no value"),
        (
            lambda: schedlang.sweep("1f1b", ranks=[2.5]),
            TypeError,
            "must be a whole number",
        ),
        (lambda: schedlang.sweep("1f1b", {"a": 3}), TypeError, "Costs"),
        (lambda: schedlang.sweep(["1f1b", 3]), TypeError, "`programs`"),
        (lambda: schedlang.load(3), TypeError, "`program`"),
    ],
)
def test_wrong_arguments(
    call: Callable[[], object], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        call()
