"""What may be tried: programs with their parameters, at all sizes of a training."""

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

#: The most even split is found exactly where each rank has one stage; for a V and a hundred layers
#: that would take a second for each layout, for a loop minutes.
_EXACT_UP_TO = 1


@frozen
class Training:
    """What is to be trained: a model by its layers, at each size of microbatch that may be taken;
    on how many ranks, with how many samples in a batch.

    `memory` is how many bytes a rank may hold. `params` are parameters of the programs that are
    not open, and plans are for a `transport`. With a `jitter` (see `Noise`), what counts is the
    makespan that 95 of 100 runs stay below. Steps whose times differ by no more than the `margin`,
    relative to their size, are a tie: the costs do not know more.
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
    """How a training is divided: into `replicas` of a pipeline of so many `ranks`, each with its
    share of the batch in so many `microbatches` of some `samples`.
    """

    replicas: int
    ranks: int
    microbatches: int
    samples: int


@frozen(eq=False)
class Candidate:
    """A program at a size with the `params` that are given beside it, and the costs of its stages.

    `shares` are how many layers each stage of the model has, and a rank has at most so many
    `chunks`, its stages. Behind the schedule, replicas sum
    gradients for a time `sums`. `bounds` are those of the step, with these sums and all that a rank
    holds.
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
        """The parameters that the program is given."""
        sizes = {"ranks": self.size.ranks, "microbatches": self.size.microbatches}
        return sizes | self.params


def sizes(training: Training, layers: Layers) -> Iterator[Size]:
    """How a training can be divided, with microbatches of a size: every replica has as many ranks,
    and as many microbatches. Pipelines have at most as many ranks as there are layers.
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
    """All that may be tried of a program, by the least time that it may take, and then by the
    fewest bytes; or what of it is known by a `deadline`, as `time.monotonic` counts.
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
    """What follows from where stages are: how the layers are shared out among them, what stages and
    sums of gradients cost, and what no order can beat.
    """

    shares: Sizes
    costs: Costs
    sums: float
    bounds: Bounds


@cache
def _priced(layout: Layout, layers: Layers, size: Size) -> tuple[_Priced, ...]:
    """What follows from a layout, for each way to share out the layers."""
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
    """How many layers each stage may have: so that the slowest rank is as fast as can be, and so
    that the slowest stage is, if that is another way.
    """
    stages = [{piece: 1.0} for piece in range(layout.pieces)]
    cuts, _ = best_cuts(work, layout.pieces, stages)
    layers = [Layer(time, 0.0, 0.0) for time in work]
    by_rank = most_even(layers, layout, exact_up_to=_EXACT_UP_TO)
    return tuple(dict.fromkeys([by_rank, sizes_of(cuts)]))


def _with_few(layout: Layout) -> Layout:
    """A layout with as few microbatches as there can be, each pipeline with the share that it has:
    as far as the layers are concerned, it is the same.
    """
    # So that candidates with other numbers of microbatches share the result from the cache.
    common = gcd(*(pipeline.microbatches for pipeline in layout.pipelines))
    pipelines = [
        evolve(pipeline, microbatches=pipeline.microbatches // common)
        for pipeline in layout.pipelines
    ]
    return evolve(layout, pipelines=tuple(pipelines))


def _per_node(per_node: int, size: Size) -> int:
    """How many ranks of a pipeline are on one node, where nodes hold several replicas, or replicas
    several nodes.

    Where one node holds not all replicas, and neither number divides the other, replicas begin at
    different places of a node. Then every link counts as one between nodes that is so in any of
    them.
    """
    holds_whole = per_node % size.ranks == 0 or size.replicas * size.ranks <= per_node
    return per_node if holds_whole else gcd(per_node, size.ranks)


def _time_of_sums(layers: Layers, shares: Sizes, layout: Layout, size: Size) -> float:
    """How long replicas take to sum their gradients behind the schedule, over the slowest link."""
    costs = layers.costs
    is_one_node = size.replicas * size.ranks <= (costs.ranks_per_node or size.ranks)
    bandwidth = costs.bandwidth_in_node
    if not is_one_node and costs.bandwidth_between_nodes:
        bandwidth = costs.bandwidth_between_nodes
    if not bandwidth:
        return 0.0
    replicas = size.replicas * len(layout.pipelines)
    return max(layers.passed_by_rank(shares, layout, replicas)) / bandwidth
