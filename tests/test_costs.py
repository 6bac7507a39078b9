"""What ops cost: given by a program, by its user, and kept in the plan."""

import json
from pathlib import Path

import pytest

from schedlang import CompileError, Costs, Plan, Source, compile, read_plan, simulate, write_plan
from schedlang.cli import main

PARAMS = "param ranks = 2  param microbatches = 2"


# One microbatch after the other: nothing overlaps, but weight gradients with what comes next.
def program(items: str, split: bool = False) -> Plan:
    backward = "B(next) W" if split else "B(next)"
    text = f"schedule s {{ {PARAMS} {items} rank r {{ F(next) {backward} F(next) {backward} }} }}"
    return compile(Source("s.sched", text))


@pytest.mark.parametrize(
    ("items", "split", "makespan"),
    [
        ("", False, 4 * (1 + 2)),
        ("cost F = 3", False, 4 * (3 + 2)),
        ("cost F(s) = 1 + s  cost B = 5", False, 2 * (1 + 2 + 2 * 5)),
        ("cost BW = 5", False, 4 * (1 + 5)),
        ("cost send = 2", False, 4 * (1 + 2 + 2)),
        ("cost B = 3  cost W = 2", True, 4 * (1 + 3) + 2 * 2),
    ],
)
def test_durations(items: str, split: bool, makespan: float) -> None:
    assert simulate(program(items, split)).timeline.makespan == pytest.approx(makespan)


def test_a_split_backward_and_a_whole_one_have_their_own_costs() -> None:
    text = f"schedule s {{ {PARAMS} cost B = 3 cost W = 4 cost BW = 5 rank r {{ F(0) F(1) BW(0) B(1) W }} }}"
    assert simulate(compile(Source("s.sched", text))).timeline.busy == [2 + 5 + 3 + 4] * 2


def test_a_whole_backward_is_its_halves_and_a_half_is_half_of_it() -> None:
    stages = 2
    assert Costs(input=(3,), weight=(1, 2)).durations(stages)[2] == [4, 5]
    assert Costs(backward=(3,)).durations(stages)[3] == [1.5, 1.5]
    assert Costs(forward=(3,)).durations(stages)[5] == [3, 3]


def test_what_the_user_gives_goes_first_and_the_rest_stays_the_programs() -> None:
    plan = program("cost F = 3  cost B = 4  cost W = 4  cost send = 1  memory F = 2", split=True)
    assert plan.costs.over(Costs(forward=(9,), recompute=(7,))) == Costs(
        forward=(3,), input=(4,), weight=(4,), p2p=1, recompute=(7,), forward_memory=(2,)
    )
    assert simulate(plan, Costs(backward=(2,))).timeline.busy == [2 * (3 + 1 + 1)] * 2
    assert simulate(plan, Costs(backward=(2,))).peak_memory == (2, 2)


def test_memory() -> None:
    text = f"schedule s {{ {PARAMS} memory F(s) = 3 + s  memory B = 0 - 1  rank r {{ F(0) F(1) B(0) B(1) W W }} }}"
    execution = simulate(compile(Source("s.sched", text)))
    assert execution.peak_memory == (6, 8)
    assert execution.peak_activations == (2, 2)


def test_claims_hold_at_the_programs_costs() -> None:
    assert program("cost F = 3  memory F = 5  assert makespan == 20 and work == 10")
    with pytest.raises(CompileError, match="the figures are makespan 20"):
        program("cost F = 3  assert makespan == 10")


def test_the_plan_keeps_the_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(program("cost F(s) = 3  memory F = 2"), path)
    assert json.loads(path.read_text())["costs"] == {"forward_times": [3.0, 3.0], "forward_memory": [2.0]}
    assert read_plan(path).costs == Costs(forward=(3, 3), forward_memory=(2,))
    for arguments, makespan in (([], 20), (["--forward-times", "1"], 12), (["--p2p-time", "2"], 28)):
        assert main(["simulate", str(path), "--json", *arguments]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["makespan"], figures["peak_memory"]) == (makespan, [2, 2])
    assert main(["simulate", str(path)]) == 0
    assert "peak memory 2 2 per rank, in the program's amounts" in " ".join(capsys.readouterr().out.split())
