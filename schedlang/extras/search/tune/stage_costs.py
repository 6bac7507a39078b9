"""What a plan's stages cost, from what the layers of a model cost."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from attrs import evolve, frozen

from schedlang.extras.search.partition.balance import Sizes
from schedlang.schedule.costs import COSTS, Costs
from schedlang.schedule.fixed_point import added, part
from schedlang.schedule.layout import Layout

#: What has a number for each layer. All of them add up over the layers of a stage, but for what it
#: hands on, which is its last layer's.
_PER_LAYER = tuple(
    name for name, cost in COSTS.items() if cost.shape in ("stage", "unit")
)
_HANDED_ON = "boundary_bytes"
#: To how many digits layers are compared.
_DIGITS = 9


@frozen
class Layers:
    """A model's layers at one size of microbatch, of so many `samples`.

    `costs` has a number for each layer where it is said to have one for each stage. Beside what a
    plan counts, a rank holds `beside` bytes. `checkpointed` says that the layers keep their inputs
    only. `summed[i]` are the bytes of the gradients of layer i, which replicas sum.
    """

    costs: Costs
    samples: int = 1
    checkpointed: bool = False
    beside: float = 0.0
    summed: tuple[float, ...] = ()

    @cached_property
    def count(self) -> int:
        """How many layers there are."""
        return layers_in(self.costs)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The part of each layer in the time that a microbatch takes: at sizes that differ only by
        a factor, they are the same.
        """
        durations = self.costs.every_duration(self.count)
        names = ("forward", "backward", "input", "weight")
        times = [
            forward + max(whole, input + weight)
            for forward, whole, input, weight in zip(
                *(durations[name] for name in names), strict=True
            )
        ]
        return tuple(round(time / sum(times), _DIGITS) for time in times)

    def of_stages(self, sizes: Sizes, layout: Layout) -> Costs:
        """The costs of a plan whose stages have so many layers; each of several pipelines has all
        of them.
        """
        cuts = list(accumulate(sizes, initial=0))
        merged: dict[str, Any] = {}
        for name in _PER_LAYER:
            values = getattr(self.costs, name)
            if values is None:
                continue
            if name == _HANDED_ON:
                of_stages = [_at(values, stop - 1) for stop in cuts[1:]]
            else:
                of_stages = [
                    added([_at(values, layer) for layer in range(start, stop)])
                    for start, stop in pairwise(cuts)
                ]
            merged[name] = tuple(of_stages) * len(layout.pipelines)
        return evolve(self.costs, measured_stages=None, **merged)

    def summed_by_rank(self, sizes: Sizes, layout: Layout) -> list[float]:
        """The bytes of the gradients that each rank has a part in summing."""
        of_ranks = [0.0] * (max(layout.placement) + 1)
        if self.summed:
            cuts = list(accumulate(sizes, initial=0))
            of_pieces = [
                added(self.summed[start:stop]) for start, stop in pairwise(cuts)
            ]
            for stage, rank in enumerate(layout.placement):
                of_ranks[rank] += of_pieces[layout.piece(stage)]
        return of_ranks


def _at(values: Sequence[float], index: int) -> float:
    """The value of a layer, where one may stand for all."""
    return values[index] if len(values) > 1 else values[0]


def layers_in(costs: Costs) -> int:
    """How many layers, or stages, costs have numbers for; ValueError unless it is one number."""
    lengths: dict[int, str] = {}
    for name in _PER_LAYER:
        values = getattr(costs, name)
        if values is not None and len(values) > 1:
            lengths.setdefault(len(values), name)
    if len(lengths) > 1:
        (count, name), (other, other_name), *_ = lengths.items()
        raise ValueError(f"`{name}` has {count} numbers, `{other_name}` has {other}")
    return next(iter(lengths), 1)


def divided(costs: Costs, layers: Sequence[int]) -> Costs:
    """The costs of layers, from those of stages which have so many layers each, all alike within a
    stage; one number of layers is for all stages. ValueError for another number of stages.
    """
    stages = layers_in(costs)
    if len(layers) not in (1, stages):
        raise ValueError(
            f"there are costs of {stages} stages, and layers of {len(layers)}"
        )
    counts = list(layers) * (stages if len(layers) == 1 else 1)
    split: dict[str, Any] = {}
    for name in _PER_LAYER:
        values = getattr(costs, name)
        if values is None:
            continue
        of_layers = []
        for stage, count in enumerate(counts):
            share = 1 if name == _HANDED_ON else count
            of_layers += [part(_at(values, stage), share)] * count
        split[name] = tuple(of_layers)
    return evolve(costs, measured_stages=None, **split)
