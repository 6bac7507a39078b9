"""Partition layers so that the slowest rank is as fast as possible, within the ranks' memory.
Searches for the best partition begin with it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, permutations

import numpy as np

from schedlang.extras.search.partition.layer_costs import Layer, check_layers
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.arrays import Ints
from schedlang.schedule.costs import UNIT
from schedlang.schedule.cuts import (
    Cuts,
    Limit,
    Load,
    NoCuts,
    best_cuts,
    costs_of_pieces,
    cuts_at_once,
    loads_of_ranks,
)
from schedlang.schedule.kept import keeps_all
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule

#: The bytes of each rank, or the same for all of them.
Capacity = Sequence[float] | float
#: The number of layers of each stage.
Sizes = tuple[int, ...]
#: The share by which the slowest rank may exceed the optimum to make stages more even: the first
#: and the last microbatch go through all stages while other ranks idle.
_MORE = 0.01
#: The limit of cuts at once for the exact partition: with more, a hundred layers take minutes.
_MOST_AT_ONCE = 3


def partition(
    layers: Sequence[Layer], schedule: Schedule, capacity: Capacity | None = None
) -> Sizes:
    """The number of layers of each stage, so that the slowest rank is as fast as possible. Among
    the partitions within 1 % of that, the one with the fastest slowest stage. Every stage has a
    layer.

    A rank's load is the work of all of its stages, at any placement: a V, a loop, or two pipelines,
    which share the microbatches. With a `capacity` in bytes, one number or one for each rank, no
    rank holds more than that: the weights of its stages, and for each stage as many activations as
    it holds in an execution at unit costs. `fit`, which starts here, counts those of its own
    executions.

    The result is optimal with up to two stages on each rank, and for other layouts in which a rank
    has at most three cuts. For more stages it is a local optimum of moving one layer at a time.

    `schedule` is a plan or another schedule. TypeError or ValueError for wrong layers, too few
    layers, or layers that do not fit.
    """
    execution = simulate(schedule, UNIT, ideal=True)
    return balanced(layers, schedule, held_activations(execution), capacity)


def balanced(
    layers: Sequence[Layer],
    schedule: Schedule,
    held: Sequence[int],
    capacity: Capacity | None = None,
) -> Sizes:
    """`partition`, where each stage holds activations of `held` microbatches at its rank's peak."""
    check_layers(layers, schedule.layout.pieces)
    limits = [] if capacity is None else _memory(layers, schedule, held, capacity)
    try:
        return most_even(layers, schedule.layout, limits)
    except NoCuts:
        raise ValueError(_does_not_fit(layers, schedule.layout, capacity)) from None


def most_even(
    layers: Sequence[Layer],
    layout: Layout,
    limits: Sequence[Limit] = (),
    exact_up_to: int = _MOST_AT_ONCE,
) -> Sizes:
    """The partition that `partition` describes, from the layout alone. It is exact for layouts with
    up to `exact_up_to` cuts at once. NoCuts if none keeps the limits.
    """
    loads = loads_of_ranks(layout)
    is_small = cuts_at_once(layout.pieces, loads) <= exact_up_to
    return (_exactly if is_small else _nearly)(layers, layout.pieces, loads, limits)


def _exactly(
    layers: Sequence[Layer], pieces: int, loads: Sequence[Load], limits: Sequence[Limit]
) -> Sizes:
    """The optimal partition, by dynamic programming for the ranks, and then for the stages; NoCuts
    if there is none.
    """
    # The first program minimises the slowest rank. Among the many partitions at that optimum or
    # near it, the second program minimises the slowest stage, since the first and the last
    # microbatch run through one stage after the other.
    costs = [layer.time for layer in layers]
    cuts, most = best_cuts(costs, pieces, loads, limits)
    if any(len(load) > 1 for load in loads):
        stages = [{piece: 1.0} for piece in range(pieces)]
        cuts, _ = best_cuts(
            costs, pieces, stages, limits, [(loads, most * (1 + _MORE))]
        )
    return sizes_of(cuts)


def _nearly(
    layers: Sequence[Layer], pieces: int, loads: Sequence[Load], limits: Sequence[Limit]
) -> Sizes:
    """A partition by local search, for layouts where the exact one would take too long. It starts
    from equal and from the most even stages, and moves one layer at a time, to fit into memory and
    to balance the work. NoCuts if none is found that fits.
    """
    costs = [layer.time for layer in layers]

    def value(sizes: Sizes) -> tuple[float, float, float]:
        cuts = tuple(accumulate(sizes, initial=0))
        work = costs_of_pieces(costs, cuts)
        ranks = [
            sum(share * work[piece] for piece, share in load.items()) for load in loads
        ]
        excess = sum(max(_held(limit, cuts) - limit.most, 0.0) for limit in limits)
        return excess, max(ranks), sum(time * time for time in work)

    starts = evenest_stages(layers, pieces), equal_sizes(len(layers), pieces)
    sizes = min((_descended(start, value) for start in starts), key=value)
    if value(sizes)[0] > 0:
        raise NoCuts("no partition was found that fits")
    return sizes


def _descended(sizes: Sizes, value: Callable[[Sizes], tuple[float, ...]]) -> Sizes:
    """Make the best move of one layer as long as that lowers the value."""
    best = value(sizes)
    while True:
        moved = min(neighbours(sizes), key=value, default=sizes)
        if value(moved) >= best:
            return sizes
        sizes = moved
        best = value(moved)


def evenest_stages(layers: Sequence[Layer], stages: int) -> Sizes:
    """The partition whose slowest stage is as fast as possible."""
    costs = [layer.time for layer in layers]
    cuts, _ = best_cuts(costs, stages, [{stage: 1.0} for stage in range(stages)])
    return sizes_of(cuts)


def equal_sizes(layers: int, stages: int) -> Sizes:
    """Equally many layers in each stage; the remainder goes to the first stages."""
    share, more = divmod(layers, stages)
    return tuple(share + (stage < more) for stage in range(stages))


def _held(limit: Limit, cuts: Cuts) -> float:
    """The memory of all pieces of a limit together."""
    return sum(
        sum(of[cuts[piece] : cuts[piece + 1]]) for piece, of in limit.amounts.items()
    )


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """The partitions with one layer less in one stage and one more in another; stages between them
    shift by a layer.
    """
    for giver, taker in permutations(range(len(sizes)), 2):
        if sizes[giver] > 1:
            moved = list(sizes)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)


def sizes_of(cuts: Cuts) -> Sizes:
    """The number of layers between cuts."""
    return tuple(end - begin for begin, end in pairwise(cuts))


def _memory(
    layers: Sequence[Layer], schedule: Schedule, held: Sequence[int], capacity: Capacity
) -> list[Limit]:
    """For each rank, the memory that each layer would take in its stages, and the rank's limit."""
    layout = schedule.layout
    versions = follow_weights(schedule).held_of
    limits = []
    for rank, most in enumerate(capacities(capacity, len(schedule.ranks))):
        amounts: dict[int, list[float]] = {}
        for stage in layout.stages_of(rank):
            piece = layout.piece(stage)
            before = amounts.get(piece, [0.0] * len(layers))
            amounts[piece] = [
                amount
                + versions[stage] * layer.weights_bytes
                + held[stage] * layer.activation_bytes
                for amount, layer in zip(before, layers, strict=True)
            ]
        limits.append(Limit(amounts, most))
    return limits


def capacities(capacity: Capacity, ranks: int) -> list[float]:
    """The bytes of each rank; ValueError for a wrong number of them."""
    if isinstance(capacity, int | float):
        return [float(capacity)] * ranks
    if len(capacity) != ranks:
        raise ValueError(
            f"`capacity` has {len(capacity)} numbers, there are {ranks} ranks"
        )
    return list(map(float, capacity))


def _does_not_fit(
    layers: Sequence[Layer], layout: Layout, capacity: Capacity | None
) -> str:
    weights = sum(layer.weights_bytes for layer in layers)
    ranks = max(layout.placement) + 1
    return (
        f"no split of the layers fits: their weights are {weights:,.0f} bytes, and the activations "
        f"in flight come on top; `capacity` is {capacity} for {ranks} ranks: give more ranks, or a "
        "schedule that holds fewer activations"
    )


def held_activations(execution: Execution) -> list[int]:
    """For each stage, the number of microbatches whose activations its rank holds at its peak: the
    peak in bytes if the costs have any, otherwise in activations.
    """
    schedule = execution.schedule
    stages = len(schedule.placement)
    counted = UNIT.memory(schedule.layout)
    in_bytes = execution.costs.bytes(schedule.layout)
    sizes = np.array(in_bytes[Kind.F] if in_bytes else ())
    if not sizes.any():
        sizes = np.ones(stages)
    held = [0] * stages
    for bars in execution.timeline.ranks:
        columns = bars.columns
        kind = np.asarray(columns[0])
        stage = np.asarray(columns[1])
        microbatch = np.asarray(columns[2])
        if not len(kind):
            continue
        # One row for each op of the rank, one column for each stage; the row with the most bytes is
        # the rank's peak:
        #
        #     op      changes     counts      bytes
        #     0F0     +1  0       1  0
        #     3F0      0 +1       1  1        ◄ peak
        #     3B0      0 -1       1  0
        changes: Ints = np.zeros((len(kind), stages), np.int64)
        stays = keeps_all(schedule, kind, stage, microbatch)
        changes[np.arange(len(kind)), stage] = (
            counted.of(kind, stage, microbatch) * stays
        )
        counts = np.cumsum(changes, axis=0)
        fullest = int(np.argmax(counts @ sizes))
        for own in set(stage.tolist()):
            held[own] = int(counts[fullest, own])
    return held


def work_of_ranks(layers: Sequence[Layer], sizes: Sizes, layout: Layout) -> list[float]:
    """The work of each rank for a microbatch."""
    cuts = tuple(accumulate(sizes, initial=0))
    work = costs_of_pieces([layer.time for layer in layers], cuts)
    loads = loads_of_ranks(layout)
    return [sum(share * work[piece] for piece, share in load.items()) for load in loads]
