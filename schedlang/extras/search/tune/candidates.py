"""The candidates of a search: programs with their parameters, at all sizes of a training."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import gcd, inf
from time import monotonic

from attrs import evolve, field, frozen

from schedlang.extras.search.partition.balance import Sizes, most_even, sizes_of
from schedlang.extras.search.partition.layer_costs import Layer
from schedlang.extras.search.tune.bounds import Bounds, bounds_of
from schedlang.extras.search.tune.stage_costs import Layers
from schedlang.extras.search.tune.tried_programs import Program, settings
from schedlang.schedule.costs import Costs
from schedlang.schedule.cuts import best_cuts
from schedlang.schedule.layout import Layout

#: The most even split is exact only with one stage on each rank. For a V and a hundred layers, that
#: would take a second for each layout, and for a loop minutes.
_EXACT_UP_TO = 1


@frozen
class Training:
    """A training: the layers of a model, for each size of microbatch that may be used, the number
    of ranks, and the samples of a batch.

    `memory` is the limit of a rank in bytes. `params` are fixed parameters of the programs, and
    plans are for a `transport`. With a `jitter` (see `Noise`), candidates are ranked by the 95th
    percentile of their makespans. Steps whose times differ by less than the relative `margin` are a
    tie, since costs are not more accurate.
    """

    layers: Sequence[Layers]
    ranks: int
    batch: int
    memory: float
    params: Mapping[str, int]
    transport: str
    jitter: float = 0.0
    margin: float = 0.01


@frozen
class Size:
    """The division of a training: the number of `replicas`, the `ranks` of each replica's pipeline,
    its `microbatches`, and the `samples` of a microbatch.
    """

    replicas: int
    ranks: int
    microbatches: int
    samples: int


@frozen(eq=False)
class Candidate:
    """A program at a size, its other parameters (`params`), and the costs of its stages.

    `shares` are the numbers of layers of the stages, and `chunks` is the largest number of stages
    on a rank. After the schedule, replicas all-reduce their gradients in the time `sums`. `bounds`
    are those of the step with this time, and of a rank's memory.
    """

    program: Program
    params: dict[str, int]
    size: Size
    layers: Layers = field(repr=False)
    shares: Sizes
    chunks: int
    costs: Costs = field(repr=False)
    sums: float
    bounds: Bounds

    @property
    def all_params(self) -> dict[str, int]:
        """All parameters of the program, with its sizes."""
        sizes = {"ranks": self.size.ranks, "microbatches": self.size.microbatches}
        return sizes | self.params


def sizes(training: Training, layers: Layers) -> Iterator[Size]:
    """All divisions of a training into equal replicas, with microbatches of one size. Pipelines
    have at most as many ranks as there are layers.
    """
    for ranks in range(1, min(training.ranks, layers.count) + 1):
        replicas, rest = divmod(training.ranks, ranks)
        if rest or training.batch % (replicas * layers.samples):
            continue
        if layers.experts and replicas % layers.experts.over:
            continue
        microbatches = training.batch // (replicas * layers.samples)
        chosen = {"ranks": ranks, "microbatches": microbatches}
        if all(
            training.params.get(name, value) == value for name, value in chosen.items()
        ):
            yield Size(replicas, ranks, microbatches, layers.samples)


def candidates(
    program: Program, training: Training, deadline: float = inf
) -> list[Candidate]:
    """All candidates of a program, sorted by their lower bounds of time and then of bytes; at the
    `deadline` (of `time.monotonic`) those that are known.
    """
    fixed = {
        name: training.params[name]
        for name in program.parameters
        if name in training.params
    }
    of_program: list[Candidate] = []
    for layers in training.layers:
        for size in sizes(training, layers):
            chosen = {"ranks": size.ranks, "microbatches": size.microbatches}
            for setting in settings(program, chosen, fixed):
                if monotonic() > deadline and of_program:
                    break
                if setting.layout.pieces > layers.count:
                    continue
                for way in _priced(setting.layout, layers, size):
                    candidate = Candidate(
                        program,
                        setting.params,
                        size,
                        layers,
                        way.shares,
                        max(Counter(setting.layout.placement).values()),
                        way.costs,
                        way.sums,
                        way.bounds,
                    )
                    of_program.append(candidate)
    return sorted(of_program, key=lambda each: (each.bounds.time, each.bounds.bytes))


@frozen
class _Priced:
    """The partition of layers for a layout, the costs of its stages, the time of summing gradients,
    and the lower bounds.
    """

    shares: Sizes
    costs: Costs
    sums: float
    bounds: Bounds


@cache
def _priced(layout: Layout, layers: Layers, size: Size) -> tuple[_Priced, ...]:
    """The costs and bounds of a layout, for each partition of the layers."""
    ways = []
    layers = layers.with_exchanges(size.ranks)
    for shares in _shares(layers.work, _with_few(layout)):
        costs = layers.of_stages(shares, layout)
        if costs.ranks_per_node and size.replicas > 1:
            costs = evolve(costs, ranks_per_node=_per_node(costs.ranks_per_node, size))
        sums = _time_of_sums(layers, shares, layout, size)
        bounds = bounds_of(layout, costs)
        all_bounds = Bounds(bounds.time + sums, bounds.bytes + layers.beside)
        ways.append(_Priced(shares, costs, sums, all_bounds))
    return tuple(ways)


@cache
def _shares(work: tuple[float, ...], layout: Layout) -> tuple[Sizes, ...]:
    """Partitions of the layers: the one with the fastest slowest rank, and the one with the fastest
    slowest stage, if it differs.
    """
    stages = [{piece: 1.0} for piece in range(layout.pieces)]
    cuts, _ = best_cuts(work, layout.pieces, stages)
    layers = [Layer(time, 0.0, 0.0) for time in work]
    by_rank = most_even(layers, layout, exact_up_to=_EXACT_UP_TO)
    return tuple(dict.fromkeys([by_rank, sizes_of(cuts)]))


def _with_few(layout: Layout) -> Layout:
    """The layout with the fewest microbatches in the same proportion between pipelines, which has
    the same best partitions.
    """
    # Then candidates that differ only in microbatches share one cached result.
    common = gcd(*(pipeline.microbatches for pipeline in layout.pipelines))
    pipelines = [
        evolve(pipeline, microbatches=pipeline.microbatches // common)
        for pipeline in layout.pipelines
    ]
    return evolve(layout, pipelines=tuple(pipelines))


def _per_node(per_node: int, size: Size) -> int:
    """The number of consecutive ranks of a pipeline on one node, with several replicas on a node,
    or several nodes for a replica.

    If neither number divides the other, replicas begin at different places of a node. Then a link
    counts as one between nodes if it is one in any replica.
    """
    holds_whole = per_node % size.ranks == 0 or size.replicas * size.ranks <= per_node
    return per_node if holds_whole else gcd(per_node, size.ranks)


def _time_of_sums(layers: Layers, shares: Sizes, layout: Layout, size: Size) -> float:
    """The time in which replicas sum their gradients after the schedule, over the slowest link."""
    costs = layers.costs
    is_one_node = size.replicas * size.ranks <= (costs.ranks_per_node or size.ranks)
    bandwidth = costs.bandwidth_in_node
    if not is_one_node and costs.bandwidth_between_nodes:
        bandwidth = costs.bandwidth_between_nodes
    if not bandwidth:
        return 0.0
    replicas = size.replicas * len(layout.pipelines)
    return max(layers.passed_by_rank(shares, layout, replicas)) / bandwidth
