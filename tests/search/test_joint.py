"""Partition and schedule together: never worse than what it begins with, within memory, and as the
program is compiled at the costs of the stages.
"""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang import Costs, Plan, compile, simulate
from schedlang.extras.search.partition import (
    Fit,
    Layer,
    Sizes,
    costs_of_stages,
    fit,
    gallery,
    partition,
    search,
)

pytestmark = pytest.mark.slow

SIZE = {"ranks": 2, "microbatches": 4}
EIGHTHS = st.integers(1, 24).map(lambda eighths: eighths / 8)
LAYERS = st.lists(
    st.builds(
        Layer,
        EIGHTHS,
        EIGHTHS,
        EIGHTHS,
        activation_bytes=EIGHTHS,
        weights_bytes=EIGHTHS,
    ),
    min_size=4,
    max_size=9,
)
LINKS = Costs(p2p_time=0.125)


def equal(layers: list[Layer], stages: int) -> Sizes:
    share, more = divmod(len(layers), stages)
    return tuple(share + (stage < more) for stage in range(stages))


def makespan(layers: list[Layer], sizes: Sizes, program: str, layout: Plan) -> float:
    """The step of a program that is compiled for these stages."""
    costs = costs_of_stages(layers, sizes, layout.layout, LINKS)
    return simulate(compile(program, SIZE, costs), costs).timeline.makespan


@settings(max_examples=10, deadline=None)
@given(LAYERS, st.sampled_from(["1f1b", "zb_1p", "zb_v", "interleaved_1f1b"]))
def test_no_start_is_better(layers: list[Layer], program: str) -> None:
    plan = compile(program, SIZE)
    found = fit(layers, program, SIZE, LINKS)
    assert sum(found.sizes) == len(layers)
    for start in (equal(layers, plan.layout.pieces), partition(layers, plan)):
        assert found.makespan <= makespan(layers, start, program, plan) + 1e-9


@settings(max_examples=10, deadline=None)
@given(LAYERS, st.integers(5, 40))
def test_what_is_found_fits(layers: list[Layer], capacity: int) -> None:
    try:
        found = fit(layers, "zb_v", SIZE, LINKS, capacity)
    except ValueError as error:
        assert "fits" in str(error)  # noqa: PT017
        return
    costs = costs_of_stages(layers, found.sizes, found.plan.layout, LINKS)
    peaks = simulate(found.plan, costs).peak_bytes
    assert peaks is not None
    assert max(peaks) <= capacity


def test_a_layer_moves_where_the_simulation_says() -> None:
    """Of two ranks with as much work each, the one that begins a step need not wait: an extra layer
    does less harm there, which no sum of work shows.
    """
    layers = [Layer(1, 1, 1) for _ in range(5)]
    found = fit(layers, "1f1b", SIZE)
    assert sorted(found.sizes) == [2, 3]
    other = tuple(reversed(found.sizes))
    assert found.makespan <= makespan(layers, other, "1f1b", found.plan)


def test_the_search_gives_the_shortest_step_first() -> None:
    layers = [Layer(1, 1, 1, name=f"layers.{index}") for index in range(7)]
    layers.append(Layer(3, 3, 3, name="head"))
    programs = [(name, SIZE) for name in ("1f1b", "zb_h1", "zb_v")]
    fits: list[Fit] = search(layers, programs, LINKS)
    makespans = [found.makespan for found in fits]
    assert makespans == sorted(makespans)
    names = list(chain.from_iterable(fits[0].layout(layers)))
    assert names == [layer.name for layer in layers]
    assert makespans[0] < makespan(
        layers, equal(layers, 2), "1f1b", compile("1f1b", SIZE)
    )


def test_the_gallery_for_one_model_and_a_flush() -> None:
    programs = [name for name, _ in gallery(4, 8)]
    assert {"1f1b", "interleaved_1f1b", "zb_v"} <= set(programs)
    assert not {"chimera", "pipedream", "terapipe", "pipe_offload"} & set(programs)


def test_too_few_layers() -> None:
    with pytest.raises(ValueError, match="2 layers for 4 stages"):
        fit([Layer(1, 1, 1)] * 2, "zb_v", SIZE)
