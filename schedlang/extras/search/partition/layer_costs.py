"""The costs of a model's layers, and the costs of stages made of these layers."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.diagnostics.wrong_arguments import check_number, check_type
from schedlang.extras.search.exact_numbers import added, part
from schedlang.schedule.costs import COSTS, UNIT, Costs
from schedlang.schedule.layout import Layout


@frozen
class Layer:
    """The costs of a layer for one microbatch (or slice): times, in one unit for all layers and
    links, and bytes.

    `input` and `weight` are the halves of its backward; `backward` is the whole one, by default as
    long as both. A forward keeps `activation_bytes` until the last use; after the input half,
    `kept_bytes` of these remain until the weight half, by default all. `boundary_bytes` is the size
    of the layer's output, which is sent if the layer is the last one of a stage. `weights_bytes` is
    the size of one version of its weights; add the optimizer's state if that should count.

    TypeError or ValueError unless all are numbers from 0.
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
        """The time of a microbatch in this layer, forward and backward."""
        return self.forward + max(self.backward, self.input + self.weight)


#: The times of ops, as `Layer` names them; `Costs` has a field with the ending `_times` for each.
_OPS = ("forward", "input", "weight", "backward")
_BYTES = ("activation_bytes", "kept_bytes", "weights_bytes")
_OF_MESSAGES = ("boundary_bytes", "message_memory")
_NUMBERS = (*_OPS, *_BYTES, "boundary_bytes")
#: The fields of `Costs` with a number for each stage, or here for each layer. A stage's number is
#: the sum over its layers; but what messages take is said by the last layer.
PER_LAYER = tuple(
    name for name, cost in COSTS.items() if cost.shape in ("stage", "unit")
)


def check_layers(layers: Sequence[Layer], stages: int) -> None:
    """TypeError unless these are layers; ValueError if there are fewer layers than stages, or if no
    layer takes any time.
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


#: No fixed costs of ops besides those of layers.
NOTHING = Layer(0.0, 0.0, 0.0)


def costs_of_stages(
    layers: Sequence[Layer],
    sizes: Sequence[int],
    layout: Layout,
    links: Costs = UNIT,
    fixed: Layer = NOTHING,
) -> Costs:
    """The costs of a layout's stages, if stage i of the model has `sizes[i]` layers. With two
    pipelines, each has all layers.

    `fixed` are costs of each stage's ops besides those of its layers, so that more stages cost more
    (`fixed_of_runs`). `links` has the costs of transfers: `p2p_time`, or latencies and bandwidths,
    which are used with the `boundary_bytes` of the layers. It also has costs that do not depend on
    layers, such as `update_times`.
    """
    layers_by_stage(layers, sizes)
    fields = {f"{op}_times": op for op in _OPS}
    has_bytes = any(layer.activation_bytes or layer.weights_bytes for layer in layers)
    if has_bytes:
        fields |= {name: name for name in _BYTES}
    if has_bytes or links.bandwidth_in_node or links.bandwidth_between_nodes:
        fields["boundary_bytes"] = "boundary_bytes"
    of_layers: dict[str, Any] = {
        name: [getattr(layer, number) for layer in layers]
        for name, number in fields.items()
    }
    costs = evolve(links, **{"boundary_bytes": None} | of_layers)
    costs = merged(costs, sizes, layout, fields)
    with_fixed: dict[str, Any] = {}
    for op in _OPS:
        times = getattr(costs, f"{op}_times")
        with_fixed[f"{op}_times"] = [added([getattr(fixed, op), t]) for t in times]
    return evolve(costs, **with_fixed)


def merged(
    costs: Costs,
    sizes: Sequence[int],
    layout: Layout,
    names: Iterable[str] = PER_LAYER,
) -> Costs:
    """The costs of stages with `sizes[i]` layers each. The fields `names` of the given costs have a
    number for each layer. With several pipelines, each has all layers.
    """
    cuts = list(accumulate(sizes, initial=0))
    of_stages: dict[str, Any] = {}
    for name in names:
        values = getattr(costs, name)
        if values is None:
            continue
        if name in _OF_MESSAGES:
            numbers = [of_layer(values, stop - 1) for stop in cuts[1:]]
        else:
            numbers = [
                added([of_layer(values, layer) for layer in range(start, stop)])
                for start, stop in pairwise(cuts)
            ]
        of_stages[name] = tuple(numbers[piece] for piece in layout.piece_of)
    return evolve(costs, measured_stages=None, **of_stages)


def divided(costs: Costs, layers: Sequence[int]) -> Costs:
    """Divide the costs of stages among their layers, in equal parts. `layers` has the number of
    layers of each stage, or one number for all. ValueError for another number of stages.
    """
    stages = layers_in(costs)
    if len(layers) not in (1, stages):
        raise ValueError(
            f"there are costs of {stages} stages, and layers of {len(layers)}"
        )
    counts = list(layers) * (stages if len(layers) == 1 else 1)
    split: dict[str, Any] = {}
    for name in PER_LAYER:
        values = getattr(costs, name)
        if values is None:
            continue
        of_layers = []
        for stage, count in enumerate(counts):
            share = 1 if name in _OF_MESSAGES else count
            of_layers += [part(of_layer(values, stage), share)] * count
        split[name] = tuple(of_layers)
    return evolve(costs, measured_stages=None, **split)


def layers_in(costs: Costs) -> int:
    """The number of layers, or stages, in these costs; ValueError if fields differ in it."""
    lengths: dict[int, str] = {}
    for name in PER_LAYER:
        values = getattr(costs, name)
        if values is not None and len(values) > 1:
            lengths.setdefault(len(values), name)
    if len(lengths) > 1:
        (count, name), (other, other_name), *_ = lengths.items()
        raise ValueError(f"`{name}` has {count} numbers, `{other_name}` has {other}")
    return next(iter(lengths), 1)


def of_layer(values: Sequence[float], index: int) -> float:
    """The number of a layer; a single number stands for all layers."""
    return values[index] if len(values) > 1 else values[0]


def layers_by_stage(
    layers: Sequence[Layer], sizes: Sequence[int]
) -> list[Sequence[Layer]]:
    """The layers of each stage of the model; ValueError unless the sizes add up to all layers."""
    if sum(sizes) != len(layers):
        raise ValueError(f"`sizes` has {sum(sizes)} layers, there are {len(layers)}")
    cuts = accumulate(sizes, initial=0)
    return [layers[begin:end] for begin, end in pairwise(cuts)]


def names_by_stage(layers: Sequence[Layer], sizes: Sequence[int]) -> list[list[str]]:
    """The names of the layers by stage: the `layout` that `split` of the runtime takes."""
    return [[layer.name for layer in own] for own in layers_by_stage(layers, sizes)]


def fixed_of_runs(runs: Sequence[tuple[Costs, int]]) -> Layer:
    """The fixed times of ops, such as starting kernels and passing on tensors, which do not depend
    on the number of layers. They are computed from runs of one model in different numbers of
    stages: for each run, the costs of its trace (`read_costs`), and its number of stages.

    The time of all stages together is that of all layers, plus the fixed time once for each stage:
    a line with the fixed time as its slope, found by least squares. Measured times scatter, so a
    negative slope counts as 0. ValueError if all runs have the same number of stages.
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
    """The costs of a model's layers, from a run with `sizes[i]` layers in stage i. `costs` are
    those of the run (`read_costs` of its trace), without the `fixed` times of ops
    (`fixed_of_runs`). `shares` say how the layers of a stage share its time, such as the times from
    `measure` of the runtime.

    If the run had only whole backwards, each half counts as half of one. Layers get no transfers
    and no bytes: give the run's `p2p_time` as `links`. ValueError unless there are a share and a
    name for each layer, and a cost for each stage.
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
