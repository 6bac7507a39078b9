"""What ops take besides their layers: as measured, so it counts; more stages cost more then."""

import pytest
from attrs import evolve

from schedlang import Costs, compile
from schedlang.extras.search.partition import (
    Layer,
    costs_of_stages,
    fit,
    fixed_of_runs,
    layers_of_run,
    search,
    solve,
)

SIZE = {"ranks": 2, "microbatches": 4}
#: The last one takes twice as long.
LAYERS = [
    Layer(time, time, time / 2, name=f"layer{time}")
    for time in (1, 1.25, 1, 1.5, 1, 1.25, 3)
]
FIXED = Layer(0.25, 0.5, 0.125)


def runs() -> list[tuple[Costs, list[int]]]:
    """What two runs of the same layers would show."""
    one = compile("zb_h1", SIZE).layout
    two = compile("zb_v", SIZE).layout
    return [
        (costs_of_stages(LAYERS, [4, 3], one, fixed=FIXED), [4, 3]),
        (costs_of_stages(LAYERS, [2, 2, 2, 1], two, fixed=FIXED), [2, 2, 2, 1]),
    ]


def test_it_is_found_from_two_runs() -> None:
    fixed = fixed_of_runs([(costs, len(sizes)) for costs, sizes in runs()])
    for name in ("forward", "input", "weight", "backward"):
        assert getattr(fixed, name) == pytest.approx(getattr(FIXED, name))


def test_layers_are_what_is_left_of_a_run() -> None:
    shares = [layer.time for layer in LAYERS]
    names = [layer.name for layer in LAYERS]
    for costs, sizes in runs():
        found = layers_of_run(costs, sizes, shares, names, FIXED)
        assert [layer.name for layer in found] == names
        for layer, expected in zip(found, LAYERS, strict=True):
            assert layer.time == pytest.approx(expected.time)
            assert layer.forward == pytest.approx(expected.forward)


def test_measured_times_that_scatter_are_nothing_below_zero() -> None:
    fast = Costs(forward_times=(1.0,), backward_times=(2.0,))
    faster = Costs(forward_times=(0.4,), backward_times=(0.8,))
    fixed = fixed_of_runs([(fast, 2), (faster, 4)])
    assert (fixed.forward, fixed.input, fixed.weight, fixed.backward) == (0, 0, 0, 0)


@pytest.mark.parametrize("stages", [[], [4], [4, 4]])
def test_one_number_of_stages_shows_nothing(stages: list[int]) -> None:
    with pytest.raises(ValueError, match="two runs of different numbers of stages"):
        fixed_of_runs([(Costs(), count) for count in stages])


def test_it_is_part_of_every_figure() -> None:
    """A fit's costs are those of its stages with what is fixed, and its plan is compiled at them."""
    found = fit(LAYERS, "zb_v", SIZE, fixed=FIXED)
    layout = found.plan.layout
    assert found.costs == costs_of_stages(LAYERS, found.sizes, layout, fixed=FIXED)
    bare = costs_of_stages(LAYERS, found.sizes, layout)
    more = [
        a - b
        for a, b in zip(found.costs.forward_times, bare.forward_times, strict=True)
    ]
    assert more == pytest.approx([FIXED.forward] * layout.pieces)
    solution = solve(LAYERS, [found], fixed=FIXED)
    assert solution.makespan <= found.makespan


def test_programs_with_more_stages_lose_where_much_is_fixed() -> None:
    programs = [("zb_h1", SIZE), ("zb_v", SIZE)]
    best, *_ = search(LAYERS, programs)
    assert best.program == "zb_v"
    much = evolve(FIXED, forward=3.0, input=3.0, weight=3.0)
    best, *_ = search(LAYERS, programs, fixed=much)
    assert best.program == "zb_h1"
