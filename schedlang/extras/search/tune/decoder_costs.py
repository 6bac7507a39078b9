"""The costs of a decoder's layers, computed from its configuration, without a run.

Every formula is for one layer and one microbatch; b is its samples, s the sequence length, h the
hidden size. Numbers have 16 bits, so 2 bytes, unless noted.

- **Operations.** A matrix product takes 2 for each weight and token in the forward, as many for the
  gradient of its input, and as many for that of its weights. Attention takes 4 b s² h in the
  forward and twice that for the gradients of its inputs, and has no weights (Narayanan et al. 2021,
  arXiv 2104.04473, appendix; by halves of the backward in Qi et al. 2023, arXiv 2401.10241, table
  1). As there, tokens that a causal mask or a window hides count, too. Only the experts count to
  which a token goes. A recurrence takes 9 operations for each number of its state (Gu and Dao
  2023), 6 in Mamba-2, 8 with the delta rule, and twice that for the gradients of its inputs.
- **Time.** The maximum of two: operations over the rate that the device reaches, and bytes of
  weights and activations over its memory bandwidth (the roofline of Williams et al. 2009). The
  embedding is a copy, so its time is the second one.
- **Activations.** Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, term by term: 34 s b h
  for the layers of that paper. Attention scores are not kept, since its kernels recompute them
  (section 5; Dao et al. 2022, arXiv 2205.14135), and neither are the states of a recurrence. The
  last layer keeps its logits in 32 bits (section 4.3). A checkpointed layer keeps only its input, 2
  s b h, and its forward runs again in the backward.
- **Copies to the host** take the bytes of the activations over the bandwidth of PCIe.
- **Between the halves of a backward.** The inputs of the products, and the gradients of their
  outputs: 32 s b h (Qi et al. 2023, table 1).
- **Weights.** 16 bytes each: 2 for the weight, 2 for its gradient and 12 for Adam's copy and
  moments in 32 bits (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1). If experts are
  sharded over replicas, each rank holds its shard (Lepikhin et al. 2020, arXiv 2006.16668).
"""

from collections.abc import Callable
from functools import cache
from math import gcd

from attrs import frozen

from schedlang.extras.search.tune.layer_parts import Part
from schedlang.schedule.costs import Costs
from schedlang.schedule.costs.devices import Device

_BYTES = 2
#: Bytes of a weight, its gradient, and Adam's state.
_BYTES_PER_WEIGHT = 16
#: Bytes of a logit.
_LOGIT_BYTES = 4


#: A layer: its parts, each after a norm.
Layer = tuple[Part, ...]


@frozen
class Decoder:
    """The shapes of a decoder: its `layers`, and embeddings of `vocabulary` tokens.

    With `dropout`, its masks are kept. A decoder may learn embeddings of `positions`. If it is
    `tied`, its embedding and its head share weights. `left_out` names parts of the configuration
    that are not counted.
    """

    hidden: int
    layers: tuple[Layer, ...]
    vocabulary: int
    dropout: bool = False
    positions: int = 0
    tied: bool = False
    left_out: str = ""

    @property
    def weights_of_embedding(self) -> int:
        """The number of weights of the token embedding, and of the head. If they are tied, each of
        the two stages holds a copy.
        """
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """The number of weights of the model."""
        embeddings = self.weights_of_embedding * (1 if self.tied else 2)
        of_layers = sum(self.weights_of(layer) for layer in self.layers)
        return of_layers + embeddings + (self.positions + 1) * self.hidden

    @property
    def active_parameters(self) -> int:
        """The number of weights that a token uses, with only the experts to which it goes."""
        parts = [part for layer in self.layers for part in layer]
        unused = sum(part.weights - part.used_weights for part in parts)
        return self.parameters - unused

    @property
    def experts(self) -> int:
        """The number of experts of a layer, 0 without experts; if layers differ, the greatest
        common divisor.
        """
        parts = [part for layer in self.layers for part in layer]
        return gcd(
            *(
                product.held
                for part in parts
                for product in part.products
                if product.held > 1
            )
        )

    def weights_of(self, layer: Layer) -> int:
        """The number of weights of a layer, with a norm before each part."""
        return sum(part.weights + self.hidden for part in layer)

    def activations_of(self, layer: Layer) -> int:
        """The bytes that a layer keeps for a token from its forward to its backward."""
        numbers = sum(self.hidden + part.given + part.taken for part in layer)
        masks = len(layer) * self.hidden if self.dropout else 0
        return _BYTES * numbers + masks


@frozen
class _Amounts:
    """The operations of a layer's forward and of the halves of its backward, and its bytes."""

    forward: float
    input: float
    weight: float
    weights: int
    activations: float
    kept: float
    moved: float


def layer_costs(
    model: Decoder,
    device: Device,
    sequence: int,
    samples: int,
    checkpointed: bool,
    efficiency: float,
    experts_over: int = 1,
) -> Costs:
    """The costs of each layer for a microbatch of `samples`, in seconds and bytes: first the
    embedding, then the layers, then the head with its loss.

    A `checkpointed` layer keeps only its input, and its forward runs again. `efficiency` is the
    share of the device's operations that a training reaches. Experts are sharded over
    `experts_over` replicas; the time in which tokens go there is not in these costs.
    """
    tokens = samples * sequence
    blocks = [
        _block(model, layer, sequence, tokens, experts_over) for layer in model.layers
    ]
    layers = [_embedding(model, tokens), *blocks, _head(model, tokens)]

    def seconds(operations: Callable[[_Amounts], float]) -> list[float]:
        return [
            max(
                operations(layer) / (efficiency * device.flops),
                layer.moved / device.memory_bandwidth,
            )
            for layer in layers
        ]

    forward = seconds(lambda layer: layer.forward)
    input = seconds(lambda layer: layer.input)
    weight = seconds(lambda layer: layer.weight)
    activations = [layer.activations for layer in layers]
    # Tokens have no gradient.
    input[0] = 0.0
    boundary = float(_BYTES * tokens * model.hidden)
    if checkpointed:
        for index in range(1, len(layers) - 1):
            input[index] += forward[index]
            activations[index] = boundary
    return Costs(
        forward_times=tuple(forward),
        backward_times=tuple(map(sum, zip(input, weight, strict=True))),
        input_times=tuple(input),
        weight_times=tuple(weight),
        offload_times=tuple(
            amount / device.bandwidth_to_host for amount in activations
        ),
        boundary_bytes=(boundary,) * len(layers),
        ranks_per_node=device.per_node,
        bandwidth_in_node=device.bandwidth_in_node,
        bandwidth_between_nodes=device.bandwidth_between_nodes,
        activation_bytes=tuple(activations),
        kept_bytes=tuple(layer.kept for layer in layers),
        weights_bytes=tuple(
            float(_BYTES_PER_WEIGHT * layer.weights) for layer in layers
        ),
    )


def activations_of_one_layer(model: Decoder, sequence: int, samples: int) -> float:
    """The bytes of the largest layer's activations for a microbatch. A rank holds them in addition
    while the forward of a checkpointed layer runs again.
    """
    return float(samples * sequence * max(map(model.activations_of, set(model.layers))))


def bytes_of_experts(model: Decoder) -> tuple[float, ...]:
    """The bytes of the gradients of all experts of each layer, with the embedding and the head."""
    layers = [sum(part.weights_of_experts for part in layer) for layer in model.layers]
    return (0.0, *(float(_BYTES * weights) for weights in layers), 0.0)


def bytes_to_experts(model: Decoder, sequence: int, samples: int) -> tuple[float, ...]:
    """The bytes that each layer sends to experts for a microbatch; experts send as many back."""
    numbers = [sum(part.sent for part in layer) for layer in model.layers]
    tokens = samples * sequence
    return (0.0, *(float(_BYTES * tokens * number) for number in numbers), 0.0)


def gradient_bytes(weights_bytes: float) -> float:
    """The bytes of a stage's gradients, from those of its weights, gradients and Adam's state."""
    return weights_bytes * _BYTES / _BYTES_PER_WEIGHT


@cache
def _block(
    model: Decoder, layer: Layer, sequence: int, tokens: int, experts_over: int
) -> _Amounts:
    products = [product for part in layer for product in part.products]
    of_products = 2.0 * tokens * sum(product.used_weights for product in products)
    pairs = 2.0 * tokens * sequence * sum(part.pairs for part in layer)
    mixed = pairs + float(tokens) * sum(part.steps for part in layer)
    experts = sum(part.weights_of_experts for part in layer)
    weights = model.weights_of(layer) - experts + experts // experts_over
    activations = float(tokens * model.activations_of(layer))
    kept = sum(part.given + part.made for part in layer)
    return _Amounts(
        forward=of_products + mixed,
        input=of_products + 2 * mixed,
        weight=of_products,
        weights=weights,
        activations=activations,
        kept=float(_BYTES * tokens * kept),
        moved=_BYTES * weights + activations,
    )


def _embedding(model: Decoder, tokens: int) -> _Amounts:
    # The rows of the tokens are read, and written as its output.
    numbers = float(_BYTES * tokens * model.hidden)
    masks = float(tokens * model.hidden) if model.dropout else 0.0
    weights = model.weights_of_embedding + model.positions * model.hidden
    return _Amounts(0.0, 0.0, 0.0, weights, masks, 0.0, 2 * numbers)


def _head(model: Decoder, tokens: int) -> _Amounts:
    """The last norm, the product with the vocabulary, and the loss."""
    product = 2.0 * tokens * model.hidden * model.vocabulary
    input = float(_BYTES * tokens * model.hidden)
    logits = float(_LOGIT_BYTES * tokens * model.vocabulary)
    return _Amounts(
        forward=product,
        input=product,
        weight=product,
        weights=model.weights_of_embedding + model.hidden,
        # What goes into the norm and into the product, and the logits.
        activations=2 * input + logits,
        # What goes into the product, and the gradient of the logits.
        kept=input + _BYTES * tokens * float(model.vocabulary),
        moved=_BYTES * model.weights_of_embedding + logits,
    )
