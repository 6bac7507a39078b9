"""The best order of the units of two microbatches, against all orders that there are."""

import random
from itertools import pairwise, permutations

import pytest

from schedlang.extras.search.unit_order import (
    Run,
    Unit,
    best_order,
    makespan,
    pair_of_units,
)
from schedlang.schedule.costs.component_costs import Component, alone, together

RESOURCES = ("compute", "network")


def least_of_all(units: list[Unit]) -> float:
    """The least makespan of all orders, each tried."""
    least = float("inf")
    for order in permutations(range(len(units))):
        ends: dict[int, float] = {}
        free = dict.fromkeys(RESOURCES, 0.0)
        for index in order:
            unit = units[index]
            if not ends.keys() >= {*unit.after}:
                break
            begin = max([free[unit.resource], *(ends[each] for each in unit.after)])
            ends[index] = free[unit.resource] = begin + unit.time
        else:
            least = min(least, max(ends.values()))
    return least


def check(units: list[Unit], runs: list[Run]) -> None:
    """Each unit runs once, behind those that it waits for, alone on its resource."""
    by_unit = {run.unit: run for run in runs}
    assert sorted(run.unit for run in runs) == [*range(len(units))]
    for index, unit in enumerate(units):
        run = by_unit[index]
        assert run.end == pytest.approx(run.start + unit.time)
        assert all(by_unit[each].end <= run.start for each in unit.after)
    for resource in RESOURCES:
        own = [run for run in runs if units[run.unit].resource == resource]
        own.sort(key=lambda run: (run.start, run.end))
        assert all(a.end <= b.start for a, b in pairwise(own))


def random_units(rng: random.Random, count: int) -> list[Unit]:
    units = []
    for index in range(count):
        after = rng.sample(range(index), min(index, rng.randrange(3)))
        resource = rng.choice(RESOURCES)
        units.append(Unit(str(index), rng.randrange(1, 6), resource, tuple(after)))
    return units


@pytest.mark.parametrize("seed", range(12))
def test_no_order_is_better(seed: int) -> None:
    rng = random.Random(seed)
    units = random_units(rng, rng.randrange(1, 7))
    runs = best_order(units)
    check(units, runs)
    assert makespan(runs) == least_of_all(units)


@pytest.mark.parametrize("seed", range(12))
def test_two_chains_take_what_two_overlapped_ops_take(seed: int) -> None:
    """`together` places the components of two ops by another method (Akers 1956)."""
    rng = random.Random(seed)
    chains = [
        [
            Unit(str(index), rng.randrange(1, 6), rng.choice(RESOURCES))
            for index in range(rng.randrange(1, 8))
        ]
        for _ in range(2)
    ]
    pieces = []
    for chain in chains:
        components = [Component(each.name, each.time, each.resource) for each in chain]
        pieces.append(alone(components, sum(each.time for each in chain)))
    expected = max(placed[-1].end for placed in together(*pieces))
    units = pair_of_units(*chains)
    runs = best_order(units)
    check(units, runs)
    assert makespan(runs) == pytest.approx(expected)


def layer(exchange: float, *, split: bool) -> list[Unit]:
    """A forward and a backward of a layer of experts; where the backward is split, the gradients of
    weights are units of their own.
    """
    back = 1 if split else 2
    forward = [
        Unit("attention", 1),
        Unit("dispatch", exchange, "network"),
        Unit("experts", 1),
        Unit("combine", exchange, "network"),
    ]
    backward = [
        Unit("combine", exchange, "network"),
        Unit("experts", back),
        Unit("dispatch", exchange, "network"),
        Unit("attention", back),
    ]
    weight = [Unit("experts", 1), Unit("attention", 1)] if split else []
    return pair_of_units(forward, backward, weight)


@pytest.mark.core
@pytest.mark.parametrize(
    ("exchange", "whole", "split"), [(1.0, 6.0, 6.0), (1.5, 7.0, 6.5), (2.0, 8.0, 8.0)]
)
def test_a_split_backward_hides_longer_exchanges(
    exchange: float, whole: float, split: float
) -> None:
    """Computing takes 6. Exchanges as long as what computes beside them are hidden; longer ones are
    hidden longer where gradients of weights can wait; in the end the network is the bound.
    """
    assert makespan(best_order(layer(exchange, split=False))) == whole
    assert makespan(best_order(layer(exchange, split=True))) == split


def test_gradients_of_weights_follow_those_of_inputs() -> None:
    with pytest.raises(ValueError, match="no unit `router` in the backward"):
        pair_of_units([Unit("a", 1)], [Unit("a", 1)], [Unit("router", 1)])


def test_units_that_wait_for_each_other_have_no_order() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        best_order([Unit("a", 1, after=(1,)), Unit("b", 1, after=(0,))])
