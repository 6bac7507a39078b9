"""Amounts of memory that differ by microbatch and by slice."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Costs,
    Kind,
    Plan,
    compile,
    read_plan,
    simulate,
    write_plan,
)
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.schedule.costs import read_costs
from schedlang.schedule.kept import keeps_all
from schedlang.schedule.layout import Layout
from schedlang.schedule.timeline import Bar
from tests.support.paths import GALLERY

NAMES = [path.stem for path in GALLERY]

HALVES = """
    rank r {
        let warmup = min(ranks - r, microbatches)
        repeat warmup                { F(next) }
        repeat microbatches - warmup { I(next)  W  F(next) }
        repeat warmup                { I(next)  W }
    }
"""
SLICED = """
    rank r {
        for m in 0 .. microbatches { for k in 0 .. slices { F(m, k) } }
        for m in 0 .. microbatches { for k in 0 .. slices { B(m, slices - 1 - k) } }
    }
"""


def compiled(items: str, order: str = HALVES, **params: int) -> Plan:
    given = {"ranks": 3, "microbatches": 4} | params
    declared = " ".join(f"param {name} = {value}" for name, value in given.items())
    return compile(f"schedule s {{ {declared} {order} {items} }}")


def random_memory(layout: Layout, rng: random.Random) -> Costs:
    """What forwards take and input halves give back, in whole numbers, so that sums are exact; the
    last use gives back the rest.
    """

    def amounts(least: int, most: int) -> list[list[int]]:
        return [
            [rng.randint(least, most) for _ in range(layout.units_of_update(stage))]
            for stage in range(len(layout.placement))
        ]

    return Costs(
        forward_memory=by_microbatch(layout, amounts(20, 60)),
        input_memory=by_microbatch(layout, amounts(-19, 5)),
    )


def by_microbatch(layout: Layout, of_stages: list[list[int]]) -> list[list[object]]:
    """Where there are slices, the amounts of each microbatch's in a list."""
    slices = layout.slices
    if slices == 1:
        return [list(row) for row in of_stages]
    return [
        [row[first : first + slices] for first in range(0, len(row), slices)]
        for row in of_stages
    ]


def counted_peak(bars: Sequence[Bar], costs: Costs, layout: Layout) -> float:
    """The most that a rank holds whose ops run one behind the other."""

    def of(values: object, bar: Bar) -> float:
        row = values[bar.stage]  # type: ignore[index]
        number = bar.microbatch % layout.units_of_update(bar.stage)
        if layout.slices == 1:
            return float(row[number])
        return float(row[number // layout.slices][number % layout.slices])

    held = most = 0.0
    for bar in bars:
        if bar.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            forward = of(costs.forward_memory, bar)
            half = of(costs.input_memory, bar)
            held += {
                Kind.F: forward,
                Kind.I: half,
                Kind.W: -forward - half,
                Kind.B: -forward,
            }[Kind(bar.kind)]
            most = max(most, held)
    return most


def has_other_rules(plan: Plan) -> bool:
    """Whether ops overlap, or activations are not kept, copied, or of frozen stages."""
    columns = plan.columns
    overlaps = ((columns.sizes > 1) & ~columns.is_transfer).any()
    if overlaps or columns.is_copy.any() or plan.layout.frozen:
        return True
    return not keeps_all(plan, columns.kind, columns.stage, columns.microbatch).all()


def test_peaks_are_those_of_a_count_microbatch_by_microbatch() -> None:
    seen = 0
    for name in NAMES:
        plan = compile(name)
        if has_other_rules(plan):
            continue
        costs = random_memory(plan.layout, random.Random(name))
        execution = simulate(plan, costs)
        for rank, bars in enumerate(execution.timeline.ranks):
            expected = counted_peak(list(bars), costs, plan.layout)
            assert execution.peak_memory[rank] == expected, (name, rank)
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("name", NAMES)
def test_equal_amounts_are_one_amount(name: str) -> None:
    plan = compile(name)
    stages = range(len(plan.placement))
    units = [
        plan.layout.units_of_update(stage) // plan.layout.slices for stage in stages
    ]
    one = Costs(
        forward_memory=[3], input_memory=[-1], activation_bytes=[7], kept_bytes=[2]
    )
    each = Costs(
        forward_memory=[[3] * units[stage] for stage in stages],
        input_memory=[[-1] * units[stage] for stage in stages],
        activation_bytes=[[7] * units[stage] for stage in stages],
        kept_bytes=[2],
    )
    assert each.differ_by_microbatch
    of_one = simulate(plan, one)
    of_each = simulate(plan, each)
    assert of_each.peak_memory == of_one.peak_memory
    assert of_each.memory == of_one.memory
    assert of_each.peak_bytes == of_one.peak_bytes
    assert of_each.timeline == of_one.timeline


def test_a_program_says_them() -> None:
    plan = compiled(
        "memory F(s, m) = 10 * s + m  memory I(s) = -s  assert peak(0) == 1 + 2 + 3"
    )
    assert plan.costs == Costs(
        forward_memory=[[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]],
        input_memory=[0, -1, -2],
    )
    # Rank r holds 3 - r microbatches at a time; the last ones are the largest.
    assert simulate(plan).peak_memory == (1 + 2 + 3, 12 + 13, 23)


def test_slices_have_amounts_of_their_own() -> None:
    plan = compiled("memory F(s, m, k) = 1 + m + 10 * k", SLICED, slices=2)
    assert (
        simulate(plan).peak_memory
        == (sum(1 + m + 10 * k for m in range(4) for k in (0, 1)),) * 3
    )


def test_each_update_of_a_stream_has_its_microbatches_amounts() -> None:
    plan = compile("pipedream_2bw", {"ranks": 2, "microbatches": 2})
    costs = Costs(forward_memory=[[1, 3]])
    held = {amount for _, amount in simulate(plan.for_updates(6), costs).memory[0]}
    assert max(held) == max(
        simulate(plan.for_updates(updates), costs).peak_memory[0] for updates in (3, 6)
    )
    assert held <= {0, 1, 3, 4}


def test_claims_are_about_them() -> None:
    with pytest.raises(CompileError, match=r"0 \+ 1 \+ 2 \+ 3 < 6|6 < 6"):
        compiled("memory F(s, m) = m  assert peak() < 6")


def test_a_rank_has_room_for_the_microbatches_that_it_holds() -> None:
    costs = Costs(activation_bytes=[[1e9, 5e9, 1e9, 1e9]])
    plan = compiled("")
    assert simulate(plan, costs).peak_bytes == (7e9, 6e9, 5e9)
    params = {"ranks": 3, "microbatches": 4}
    assert compile("1f1b", params, costs=evolve(costs, capacity_bytes=[7e9]))
    with pytest.raises(CompileError, match="rank 0") as caught:
        compile("1f1b", params, costs=evolve(costs, capacity_bytes=[6.5e9]))
    assert [each.code for each in caught.value.diagnostics] == ["capacity"]


def test_plan_files_and_files_of_costs_keep_them(tmp_path: Path) -> None:
    plan = compiled("memory F(s, m) = 1 + m")
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path).costs == plan.costs
    file = tmp_path / "costs.yaml"
    file.write_text(
        "activation_bytes: [[1, 2, 1, 1.5], 1, 1]\nforward_memory: [[1, 2, 1, 3]]\n"
    )
    assert read_costs(file) == Costs(
        activation_bytes=[[1, 2, 1, 1.5], 1, 1], forward_memory=[[1, 2, 1, 3]]
    )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            "memory F(s, m, k) = 1",
            "write `memory F` or `memory F(s)` or `memory F(s, m)`",
        ),
        ("memory gather(s, m) = 1", "write `memory gather` or `memory gather(s)`"),
        ("memory gather = 0 - 1", "a gather of -1, it must be 0 or more"),
        ("memory F = 1  memory F(s, m) = 1", "`memory F` is given already"),
    ],
)
def test_what_a_program_cannot_say(items: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(items)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"forward_memory": [[1, 2]]},
            "2 memories of `F` are given for the microbatches of stage",
        ),
        (
            {"activation_bytes": [[1] * 4] * 2},
            "2 `activation_bytes` are given, there are 3 stages",
        ),
        (
            {"gather_memory": [[1] * 4]},
            "`gather_memory` is ((1, 1, 1, 1),): it must be numbers",
        ),
        (
            {"weights_bytes": [[1] * 4]},
            "`weights_bytes` is ((1, 1, 1, 1),): it must be numbers",
        ),
    ],
)
def test_what_costs_cannot_be(values: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        simulate(compiled(""), Costs(**values))  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["fill", "reorder"])
def test_passes_keep_to_the_memory(name: str) -> None:
    """Where some microbatches take more than others, in whatever order of lengths."""
    gained = 0
    for seed in range(12):
        rng = random.Random(seed)
        lengths = [rng.choice([1, 1, 2, 5]) for _ in range(8)]
        items = f"let lengths = {lengths}  memory F(s, m) = lengths[m]"
        before = simulate(compiled(items, ranks=4, microbatches=8))
        most = max(before.peak_memory)
        how = f"fill W within {most}" if name == "fill" else "reorder"
        after = simulate(compiled(f"{items} {how}", ranks=4, microbatches=8))
        assert max(after.peak_memory) <= most
        assert after.timeline.makespan <= before.timeline.makespan
        gained += after.timeline.makespan < before.timeline.makespan
    assert gained > 6


@pytest.mark.slow
def test_the_best_order_keeps_to_the_memory() -> None:
    pytest.importorskip("ortools")
    from schedlang.extras.search.optimize.optimize import judged, optimize
    from schedlang.extras.search.optimize.problem import Problem

    lengths = [1, 4, 1, 2, 1, 3]
    items = f"let lengths = {lengths}  memory F(s, m) = lengths[m]"
    given = compiled(items, microbatches=6)
    for limit in (6.0, 8.0):
        problem = Problem.of(given, limit)
        *_, answer = optimize(problem, 10.0)
        text = judged(problem, answer, "gloo").text
        assert "memory F(s, m) = " in text
        assert max(simulate(compile(text)).peak_memory) <= limit


def test_a_proof_for_all_sizes_says_that_it_differs() -> None:
    verdict = prove_for_all(
        f"schedule s {{ param ranks = 2  param microbatches {HALVES} memory F(s, m) = m }}"
    ).verdicts["portable"]
    assert "`memory F` differs by microbatch" in str(verdict)


def test_a_copy_to_a_rank_that_keeps_it_takes_as_long_as_its_bytes() -> None:
    plan = compile("bpipe", {"ranks": 4, "microbatches": 8})
    sizes = [1e9 * (1 + number % 3) for number in range(8)]
    costs = Costs(activation_bytes=[sizes], boundary_bytes=[1], bandwidth_in_node=2e9)
    copies = [bar for bars in simulate(plan, costs).timeline.copies for bar in bars]
    assert copies
    for bar in copies:
        assert bar.end - bar.start == pytest.approx(sizes[bar.microbatch] / 2e9)
