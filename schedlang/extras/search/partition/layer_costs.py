"""What the layers of a model cost, and what stages made of them do."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from schedlang.diagnostics.arguments import check_number, check_type
from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.fixed_point import added
from schedlang.schedule.layout import Layout


@frozen
class Layer:
    """What a layer of a model costs, of one microbatch (or slice): times in any unit, the same for
    all layers and links, and bytes.

    `input` and `weight` are the halves of its backward, `backward` is a whole one, by default as
    long as both. Of the `activation_bytes` that a forward leaves until the last use, an input half
    leaves `kept_bytes` until its weight half, by default all. `boundary_bytes` is what the layer
    hands on, should it be the last one of a stage. `weights_bytes` is one version of its weights;
    add what the optimizer keeps, if it is to count.

    TypeError or ValueError for what is no number from 0.
    """

    forward: float
    input: float
    weight: float
    backward: float = field()
    activation_bytes: float = 0.0
    kept_bytes: float = field()
    weights_bytes: float = 0.0
    boundary_bytes: float = 0.0
    name: str = ""

    @backward.default
    def _both_halves(self) -> float:
        return self.input + self.weight

    @kept_bytes.default
    def _all_of_it(self) -> float:
        return self.activation_bytes

    def __attrs_post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            check_number(name, value)
            if value < 0:
                raise ValueError(
                    f"`{name}` of a layer is {value:g}: it must be a number from 0"
                )

    @property
    def time(self) -> float:
        """What a microbatch takes in it, forward and backward."""
        return self.forward + max(self.backward, self.input + self.weight)


#: What ops `Costs` and layers call by these names take.
_OPS = ("forward", "input", "weight", "backward")
_NUMBERS = (
    *_OPS,
    "activation_bytes",
    "kept_bytes",
    "weights_bytes",
    "boundary_bytes",
)


def check_layers(layers: Sequence[Layer], stages: int) -> None:
    """TypeError unless these are layers, ValueError unless they are enough for so many stages, and
    take any time.
    """
    check_type("layers", layers, Sequence, "a list of Layer")
    for index, layer in enumerate(layers):
        check_type(f"layers[{index}]", layer, Layer, "a Layer")
    if len(layers) < stages:
        raise ValueError(
            f"{counted(len(layers), 'layer')} for {stages} stages, of which each has one or more: "
            "take a schedule with fewer stages, or cut the model into more layers"
        )
    if not any(layer.time for layer in layers):
        raise ValueError(
            "the layers take no time: give their `forward`, `input` and `weight`"
        )


#: What ops take besides the layers of their stages, where nothing is known of it.
NOTHING = Layer(0.0, 0.0, 0.0)


def costs_of_stages(
    layers: Sequence[Layer],
    sizes: Sequence[int],
    layout: Layout,
    links: Costs = UNIT,
    fixed: Layer = NOTHING,
) -> Costs:
    """What the stages of a layout cost, where stage i of the model has so many layers, `sizes[i]`;
    of two pipelines both have all.

    `fixed` is what the ops of every stage take besides its layers, however many it has, so that
    more stages cost more (`fixed_of_runs`). `links` says how long transfers take (`p2p_time`, or
    latencies and bandwidths, in whose place of `boundary_bytes` those of the layers come), and what
    else is not of layers, such as `update_times`.
    """
    stages = [_together([fixed, *own]) for own in layers_by_stage(layers, sizes)]
    replicas = [stages[layout.piece(stage)] for stage in _stages(layout)]
    bandwidth = links.bandwidth_in_node or links.bandwidth_between_nodes
    has_bytes = any(layer.activation_bytes or layer.weights_bytes for layer in layers)
    costs = evolve(
        links,
        forward_times=[stage.forward for stage in replicas],
        backward_times=[stage.backward for stage in replicas],
        input_times=[stage.input for stage in replicas],
        weight_times=[stage.weight for stage in replicas],
        boundary_bytes=[stage.boundary_bytes for stage in replicas]
        if bandwidth
        else None,
    )
    if not has_bytes:
        return costs
    return evolve(
        costs,
        activation_bytes=[stage.activation_bytes for stage in replicas],
        kept_bytes=[stage.kept_bytes for stage in replicas],
        weights_bytes=[stage.weights_bytes for stage in replicas],
    )


def _stages(layout: Layout) -> range:
    return range(len(layout.placement))


def layers_by_stage(
    layers: Sequence[Layer], sizes: Sequence[int]
) -> list[Sequence[Layer]]:
    """The layers of each stage of the model; ValueError unless these are all layers."""
    if sum(sizes) != len(layers):
        raise ValueError(f"`sizes` has {sum(sizes)} layers, there are {len(layers)}")
    cuts = accumulate(sizes, initial=0)
    return [layers[begin:end] for begin, end in pairwise(cuts)]


def names_by_stage(layers: Sequence[Layer], sizes: Sequence[int]) -> list[list[str]]:
    """The names of the layers by stage: the `layout` that `split` of the runtime takes."""
    return [[layer.name for layer in own] for own in layers_by_stage(layers, sizes)]


def fixed_of_runs(runs: Sequence[tuple[Costs, int]]) -> Layer:
    """What ops take however many layers their stage has: starting kernels, handing on tensors. From
    runs of one model in different numbers of stages, each the costs of its trace (`read_costs`) and
    its number of stages.

    All stages together take as long as all layers, and as often what is fixed as there are stages:
    a line whose slope is looked for (by least squares, where there are more than two runs).
    Measured times scatter, so a slope below 0 is taken for 0. ValueError for runs that all have the
    same number of stages.
    """
    stages = [count for _, count in runs]
    if len(set(stages)) < 2:
        raise ValueError(
            f"`runs` are of {', '.join(map(str, stages)) or 'no'} stages: what is fixed shows in "
            "two runs of different numbers of stages"
        )
    durations = [costs.every_duration(count) for costs, count in runs]

    def slope(op: str) -> float:
        totals = [sum(of_run[op]) for of_run in durations]
        return max(float(np.polyfit(stages, totals, 1)[0]), 0.0)

    times: dict[str, Any] = {op: slope(op) for op in _OPS}
    return Layer(**times)


def layers_of_run(
    costs: Costs,
    sizes: Sequence[int],
    shares: Sequence[float],
    names: Sequence[str],
    fixed: Layer = NOTHING,
) -> list[Layer]:
    """The layers of a model that has run with so many in each stage, where `costs` are those of the
    run (`read_costs` of its trace) and `shares` say how the layers of a stage divide its time, as
    what `measure` of the runtime gives for them; but for what is `fixed` for each op
    (`fixed_of_runs`).

    Where the run had whole backwards only, either half is half of one. Transfers and bytes are not
    of layers: give the run's `p2p_time` as `links`. ValueError unless there are a share and a name
    for each layer, and a cost for each stage.
    """
    if not len(shares) == len(names) == sum(sizes):
        raise ValueError(
            f"{len(shares)} shares and {len(names)} names are given for {sum(sizes)} layers"
        )
    durations = costs.every_duration(len(sizes))
    layers = []
    bounds = accumulate(sizes, initial=0)
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        of_stage = sum(shares[begin:end])
        for place in range(begin, end):
            share = shares[place] / of_stage if of_stage else 1 / (end - begin)
            times: dict[str, Any] = {
                op: share * max(durations[op][stage] - getattr(fixed, op), 0.0)
                for op in _OPS
            }
            layers.append(Layer(**times, name=names[place]))
    return layers


def _together(layers: Sequence[Layer]) -> Layer:
    """What some layers in a row cost as one."""
    numbers: dict[str, Any] = {
        name: added([getattr(layer, name) for layer in layers])
        for name in _NUMBERS[:-1]
    }
    return Layer(**numbers, boundary_bytes=layers[-1].boundary_bytes)
