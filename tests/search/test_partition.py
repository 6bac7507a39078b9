"""Layers shared out among stages: against every split that there is."""

from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang import Plan, compile, simulate
from schedlang.extras.search.partition import (
    Layer,
    Sizes,
    costs_of_stages,
    names_by_stage,
    partition,
)

#: One stage on each rank; a V; a loop; two pipelines; two waves, for which it is not exact.
EXACT = [
    compile("1f1b", {"ranks": 3, "microbatches": 4}),
    compile("zb_v", {"ranks": 2, "microbatches": 4}),
    compile("interleaved_1f1b", {"ranks": 2, "microbatches": 4}),
    compile("chimera", {"ranks": 4, "microbatches": 4}),
]
WAVES = compile("hanayo", {"ranks": 2, "microbatches": 4, "waves": 2})

#: Numbers that add up without rounding.
EIGHTHS = st.integers(0, 24).map(lambda eighths: eighths / 8)
LAYERS = st.builds(
    Layer,
    forward=EIGHTHS.filter(bool),
    input=EIGHTHS,
    weight=EIGHTHS,
    activation_bytes=EIGHTHS,
    weights_bytes=EIGHTHS,
)


def every_split(layers: int, stages: int) -> Iterator[Sizes]:
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, layers)))


def slowest(layers: list[Layer], sizes: Sizes, plan: Plan) -> tuple[float, float]:
    """The work of the slowest rank and of the slowest stage for a microbatch, on average over the
    pipelines: from the stages' costs, not from the sums that the search makes.
    """
    costs = costs_of_stages(layers, sizes, plan.layout)
    assert costs.forward_times
    assert costs.backward_times
    of_stages = [
        forward + backward
        for forward, backward in zip(
            costs.forward_times, costs.backward_times, strict=True
        )
    ]
    of_ranks = [0.0] * len(plan.ranks)
    for stage, rank in enumerate(plan.placement):
        of_ranks[rank] += of_stages[stage] * plan.layout.pipeline_of[stage].microbatches
    return max(of_ranks) / plan.layout.microbatches, max(of_stages)


def fits(layers: list[Layer], sizes: Sizes, plan: Plan, capacity: float) -> bool:
    costs = costs_of_stages(layers, sizes, plan.layout)
    peaks = simulate(plan, costs).peak_bytes
    return peaks is None or max(peaks) <= capacity


def check_best(
    layers: list[Layer], sizes: Sizes, splits: list[Sizes], plan: Plan
) -> None:
    """No split has a slowest rank that is more than 1 % faster; and of those within 1 % of the
    best, none has a faster slowest stage.
    """
    assert sizes in splits
    rank, stage = slowest(layers, sizes, plan)
    others = [slowest(layers, split, plan) for split in splits]
    within = 1.01 * min(other for other, _ in others)
    assert rank <= within * (1 + 1e-9)
    assert stage == min(
        slowest_stage for other, slowest_stage in others if other <= within
    )


@given(st.data())
def test_no_split_is_better(data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(EXACT))
    pieces = plan.layout.pieces
    layers = data.draw(st.lists(LAYERS, min_size=pieces, max_size=pieces + 4))
    splits = list(every_split(len(layers), pieces))
    check_best(layers, partition(layers, plan), splits, plan)


@settings(max_examples=40)
@given(st.data())
@pytest.mark.slow
def test_memory_is_kept(data: st.DataObject) -> None:
    """With one stage on each rank, what is found fits, and is the best of all that fit."""
    plan = EXACT[0]
    layers = data.draw(st.lists(LAYERS, min_size=3, max_size=7))
    capacity = data.draw(st.integers(1, 40))
    splits = every_split(len(layers), 3)
    fitting = [split for split in splits if fits(layers, split, plan, capacity)]
    if not fitting:
        with pytest.raises(ValueError, match="no split of the layers fits"):
            partition(layers, plan, capacity)
        return
    check_best(layers, partition(layers, plan, capacity), fitting, plan)


@given(st.lists(LAYERS, min_size=8, max_size=11))
def test_many_stages_on_a_rank_are_no_worse_than_an_equal_split(
    layers: list[Layer],
) -> None:
    share, more = divmod(len(layers), 8)
    equal = tuple(share + (stage < more) for stage in range(8))
    sizes = partition(layers, WAVES)
    assert sizes in every_split(len(layers), 8)
    found = slowest(layers, sizes, WAVES)[0]
    assert found <= slowest(layers, equal, WAVES)[0] * (1 + 1e-9)


def test_capacities_by_rank() -> None:
    """A smaller rank gets fewer layers."""
    layers = [Layer(1, 1, 1, weights_bytes=1) for _ in range(9)]
    assert partition(layers, EXACT[0]) == (3, 3, 3)
    assert partition(layers, EXACT[0], [9, 2, 9]) in ((3, 2, 4), (4, 2, 3))


def test_many_layers_within_memory() -> None:
    """As many as large models have, no two alike."""
    random = Random(0)
    layers = [Layer(random.random() + 0.5, 1, 1, activation_bytes=1) for _ in range(60)]
    for name in ("1f1b", "zb_v", "dualpipe", "interleaved_1f1b"):
        assert (
            sum(partition(layers, compile(name, {"ranks": 4, "microbatches": 8}), 500))
            == 60
        )


def test_the_split_in_the_words_of_the_runtime() -> None:
    layers = [
        Layer(1, 1, 1, name=name) for name in ("embedding", "layers.0", "layers.1")
    ]
    assert names_by_stage(layers, (1, 2)) == [["embedding"], ["layers.0", "layers.1"]]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Layer(1, 1, 1)], "1 layer for 3 stages, of which each has one or more"),
        ([Layer(0, 0, 0)] * 3, "the layers take no time"),
    ],
)
def test_what_cannot_be_shared_out(layers: list[Layer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(layers, EXACT[0])


def test_a_layer_of_a_wrong_number() -> None:
    with pytest.raises(ValueError, match="`weight` of a layer is -1"):
        Layer(1, 1, -1)
    with pytest.raises(TypeError, match=r"layers\[1\]"):
        partition([Layer(1, 1, 1), "head"], EXACT[0])  # type: ignore[list-item]
