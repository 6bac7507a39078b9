"""The layers of a training, from a model's configuration or from measured costs."""

from collections.abc import Sequence
from itertools import product
from math import gcd

from attrs import evolve

from schedlang.extras.search.partition.layer_costs import divided, layers_in
from schedlang.extras.search.tune.decoder_costs import (
    Decoder,
    activations_of_one_layer,
    bytes_of_experts,
    bytes_to_experts,
    gradient_bytes,
    layer_costs,
)
from schedlang.extras.search.tune.stage_costs import Experts, Layers
from schedlang.schedule.costs import Costs
from schedlang.schedule.costs.devices import Device

#: The default share of a device's operations that a training reaches: 44 to 52 % were measured on
#: A100 (Narayanan et al. 2021, arXiv 2104.04473, table 1).
EFFICIENCY = 0.5


def layers_of_model(
    model: Decoder,
    device: Device,
    sequence: int,
    sizes: Sequence[int],
    memory: float,
    efficiency: float = EFFICIENCY,
    ranks: int = 1,
) -> list[Layers]:
    """The layers of a model for microbatches of these sizes, in samples. For each size there are
    layers with and without checkpointing, and with experts on every rank or sharded over some of
    the ranks. A size is left out if a single layer exceeds the memory.
    """
    choices = []
    common = gcd(model.experts or 1, ranks)
    # Powers of two that divide both.
    shared_over = powers_of_two(common & -common)
    for samples in sizes:
        one_layer = activations_of_one_layer(model, sequence, samples)
        if one_layer > memory:
            break
        sent = bytes_to_experts(model, sequence, samples)
        for checkpointed, over in product((False, True), shared_over):
            costs = layer_costs(
                model, device, sequence, samples, checkpointed, efficiency, over
            )
            assert costs.weights_bytes is not None
            experts = Experts(over, sent, bytes_of_experts(model))
            choices.append(
                Layers(
                    costs,
                    samples,
                    checkpointed,
                    beside=one_layer if checkpointed else 0.0,
                    summed=tuple(map(gradient_bytes, costs.weights_bytes)),
                    experts=experts if model.experts else None,
                )
            )
    return choices


def layers_of_costs(costs: Costs, samples: int, counts: Sequence[int] | None) -> Layers:
    """The layers of a model whose costs are given by stage, for a microbatch of `samples`.

    Each stage counts as one layer, unless `counts` has the number of its layers. ValueError if the
    number of layers is unknown, and for costs that are not of layers.
    """
    if costs.differ_by_microbatch:
        raise ValueError(
            "the costs differ by microbatch: those of layers are the same for all"
        )
    if costs.link_times is not None:
        raise ValueError(
            "`link_times` are of one number of ranks: give `p2p_time`, or latencies and bandwidths"
        )
    if not any(costs.durations(layers_in(costs)).all()):
        raise ValueError("nothing in the costs takes any time")
    costs = evolve(costs, capacity_bytes=None)
    if counts is not None:
        return Layers(divided(costs, counts), samples)
    if layers_in(costs) == 1:
        raise ValueError(
            "the costs are the same for all stages, and do not say how many there are: give a "
            "number for each stage, or say with --layers how many layers the model has"
        )
    return Layers(costs, samples)


def powers_of_two(most: int) -> list[int]:
    """The powers of two from 1 up to `most`."""
    return [2**power for power in range(most.bit_length())]
