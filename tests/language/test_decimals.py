"""Decimal numbers in programs: in costs, memory and claims, exactly."""

from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from schedlang import CompileError, Plan, compile, simulate
from schedlang.cli.main import main
from schedlang.schedule.fixed_point import ANY, FixedPoint, fixed_point

HEAD = """schedule decimals {
    param ranks = 4  param microbatches = 8
    rank r {
        let warmup = min(ranks - 1 - r, microbatches)
        repeat warmup                { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
        repeat warmup                { B(next) }
    }
"""


def compiled(items: str) -> Plan:
    return compile(f"{HEAD}{items}\n}}")


@pytest.mark.parametrize(
    "items",
    [
        "cost F = 1.5",
        "memory F = 0.5  assert peak(0) == 2 and peak(3) == 0.5",
        "assert bubble <= 9.3 and bubble >= 8.999999999999999999",
        "cost F = 0.5  cost B = 0.7  assert makespan == 13.2 and work == 9.6 and bubble == 3.6",
        # In floats, sums of these are a little more or less.
        "cost F = 0.1  cost B = 0.2  assert makespan == 3.3 and bubble == 0.9 and span == 3.3",
        "cost F = 0.1  cost B = 0.2  cost send = 0.01  assert 10 * bubble == 10 * makespan - 24",
        "cost F = 0.1  cost B(s) = 0.2 + 0.01 * s  assert makespan <= 3.57 and makespan > 3.569999",
        "cost F = 0.12345678901  cost B = 1.0  assert makespan == 12.35802467911",
        # A whole backward that is not given is the sum of its halves.
        "cost F = 0.1  cost I = 0.2  cost W = 0.1  assert makespan == 4.4 and bubble == 1.2",
        "cost F = 10.3  cost I = 11.7  cost W = 9.1  assert makespan == 342.1 and span == makespan",
        "memory F = 0.3  memory B = -0.1  assert peak(3) == 1.7",
        "cost F = 0.123457 * 0.1000001  assert work == 8 * 0.123457 * 0.1000001 + 16",
        # What claims are about may also be an odd part of a whole.
        "cost F = 1.0 / 3  cost B = 2.0 / 3  assert makespan == 11 and bubble == 3.0",
        "cost F = 1.0 / 7  cost B = 1.0 / 11  assert makespan == 11.0 / 7 + 11.0 / 11",
        # `/` rounds down where both sides are whole.
        "cost F = 3 / 2  assert work == 24",
        "cost F = 3.0 / 2  assert work == 28",
        "cost F = 1 + 3 / 2 * 1.0  assert work == 32",
        "assert 0.5 + 7 / 2 == 3.5 and 7.0 / 2 == 3.5 and 7.5 % 2 == 1.5",
        "assert 0.27 < bubble / makespan and bubble / makespan < 0.28",
        "let slow = 1.25  fn twice(x) = 2 * x  cost F = twice(slow)  assert work == 36",
        "fn half(n) = n / 2  cost F = half(3.0)  cost B = half(3)  assert work == 20",
        "cost F = if ranks > 2 then 0.5 else 1  cost B = max(0.1, 0.2)  assert work == 5.6",
        "require 1.5 * ranks < 6.5",
    ],
)
def test_a_claim_about_decimals_holds(items: str) -> None:
    compiled(items)


@pytest.mark.parametrize(
    ("items", "sides"),
    [
        ("assert bubble <= 8.9", "`bubble <= 8.9` is 9 <= 8.9"),
        ("cost F = 0.1  cost B = 0.2  assert makespan < 3.3", "is 3.3 < 3.3"),
        ("cost F = 0.1  cost B = 0.2  assert makespan != 3.3", "is 3.3 != 3.3"),
        (
            "cost F = 0.1  cost B = 0.2  assert makespan == 3.3000000001",
            "is 3.3 == 3.3000000001",
        ),
        ("assert bubble / makespan <= 0.25", "is 0.2727272727 <= 0.25"),
        # Large whole numbers are told apart to the last one.
        (
            "cost F = 1000000000000  cost B = 1  assert makespan == 11000000000012",
            "is 11000000000011 == 11000000000012",
        ),
    ],
)
def test_a_claim_about_decimals_fails(items: str, sides: str) -> None:
    with pytest.raises(CompileError, match="a claim does not hold") as caught:
        compiled(items)
    assert sides in str(caught.value)


def test_costs_of_too_many_digits_leave_near_claims_open() -> None:
    """Rounding decides about no claim: what is near to it is refused, and says why."""
    costs = "cost F = 0.1234567890123457  cost B = 0.2345678901234569"
    compiled(f"{costs}  assert makespan < 3.94 and makespan > 3.93 and peak() == 4")
    for claim in (
        "makespan == 3.9382714705038286",
        "0.0 <= bubble - 1.0740740401373982",
    ):
        with pytest.raises(CompileError, match="cannot be told: costs have too many"):
            compiled(f"{costs}  assert {claim}")


def test_figures_are_the_nearest_floats_of_the_exact_ones() -> None:
    timeline = simulate(compiled("cost F = 0.1  cost I = 0.2  cost W = 0.1")).timeline
    assert timeline.makespan == 4.4
    assert timeline.busy == [3.2] * 4
    assert timeline.spans == [4.4, 4.0, 3.6, 3.2]
    assert timeline.idle[0] == 1 - 3.2 / 4.4


THIRDS = """
    cost F(s) = 1.0 / 3 + s * 1.0 / 7  cost B = 2.0 / 7  cost send(r, q) = 1.0 / 3
    cost sum = 1.0 / 9  cost gather = 1.0 / 3  cost overlap = 5.0 / 7  memory F = 1.0 / 3
    capacity = 100.0 / 3
"""


@pytest.mark.parametrize(
    "command",
    [
        ["simulate"],
        ["explain-bubble"],
        ["compare", "1f1b"],
        ["view", "-o", "picture.html"],
        ["compile", "-o", "plan.json"],
    ],
    ids=lambda command: command[0],
)
def test_costs_that_are_no_decimals_are_told_by_every_command(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.json").write_text('{"activation_bytes": [8], "weights_bytes": [1]}')
    program = f"{HEAD}{THIRDS}  assert peak() == 4.0 / 3\n}}"
    Path("thirds.sched").write_text(program)
    name, *more = command
    assert main([name, "thirds.sched", *more, "--costs", "costs.json"]) == 0


def test_without_decimals_slashes_round_figures_down_as_ever() -> None:
    compiled("cost F = 3  assert makespan / 2 == 27")
    with pytest.raises(CompileError, match=r"27\.5 == 27"):
        compiled("cost F = 3  assert makespan / 2.0 == 27")


def test_costs_in_a_plan_are_what_is_written() -> None:
    plan = compiled("cost F = 0.1 * 3  cost B(s) = 0.1 + 0.2 * s  memory F = 0.7 - 0.1")
    assert plan.costs.to_json() == {
        "forward_times": [0.3],
        "backward_times": [0.1, 0.3, 0.5, 0.7],
        "forward_memory": [0.6],
    }


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_exact_at_random_decimals(seed: int) -> None:
    """1F1B at the same costs on all stages takes (ranks - 1 + microbatches) * (F + B)."""
    random = Random(seed)
    digits = random.randrange(1, 10)
    forward, backward = (f"{random.uniform(0.01, 30):.{digits}f}" for _ in range(2))
    # Four ranks and eight microbatches: 4 - 1 + 8.
    makespan = 11 * (Fraction(forward) + Fraction(backward))
    costs = f"cost F = {forward}  cost B = {backward}"
    text = f"{float(makespan):.{digits}f}"
    assert Fraction(text) == makespan
    plan = compiled(f"{costs}  assert makespan == {text}")
    assert simulate(plan).timeline.makespan == pytest.approx(float(makespan))
    with pytest.raises(CompileError, match="a claim does not hold"):
        compiled(f"{costs}  assert makespan < {text}")


def test_numbers_of_a_fixed_point_add_up_exactly() -> None:
    # 0.1, 0.25 and 3 are whole numbers of twentieths.
    fixed = fixed_point([0.1, 0.25, 3])
    assert fixed == FixedPoint(20)
    assert fixed.counts([0.1, 0.2, 0.1 + 0.2]).tolist() == [2, 4, 6]
    assert fixed.exact(0.1 + 0.2) == Fraction(3, 10)
    assert fixed.total([0.0] * 30, [0.1] * 30) == 3
    assert fixed_point([Fraction(1, 7), Fraction(1, 11), 0.5]) == FixedPoint(154)
    # More digits than there is room for.
    assert fixed_point([0.1234567890123457]) == ANY
    assert ANY.exact(0.5) == Fraction(1, 2)
