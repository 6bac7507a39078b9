"""What the layers of a transformer cost, from its configuration alone: before anything was trained.

Every formula is of one layer and one microbatch; b is its samples, s the length of a sequence, h
the hidden size. Numbers are held in 16 bits, so in 2 bytes, unless it is said otherwise.

- **Operations.** A product of matrices takes 2 for each weight and token, forward; the gradient of
  its input as many, and so does that of its weights. Attention takes 4 b s² h forward and twice
  that for the gradients of its inputs, and has no weights (Narayanan et al. 2021, arXiv 2104.04473,
  appendix; by halves of the backward in Qi et al. 2023, arXiv 2401.10241, table 1). What a causal
  mask leaves out is counted too, as there.
- **Time.** The larger of two: operations over the device's rate, of which a share is reached, and
  bytes of weights and activations over the bandwidth of its memory (the roofline of Williams et al.
  2009). The embedding is a copy, so the second one decides.
- **Activations.** Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, term by term: 34 s b h
  for the layers of that paper. The scores of attention are not kept, since its kernels make them
  again (section 5; Dao et al. 2022, arXiv 2205.14135). The last layer keeps its logits in 32 bits
  (section 4.3). Of a checkpointed layer only the input is kept, 2 s b h, and its forward runs again
  in the backward.
- **Copies to the host** take the bytes of the activations over the bandwidth of PCIe.
- **Between the halves of a backward.** The inputs of the products, and the gradients of their
  outputs: 32 s b h (Qi et al. 2023, table 1).
- **Weights.** 16 bytes each: 2 for the weight, 2 for its gradient and 12 for Adam's copy and
  moments in 32 bits (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1).
"""

from collections.abc import Callable

from attrs import frozen

from schedlang.extras.search.tune.devices import Device
from schedlang.schedule.costs import Costs

_BYTES = 2
#: Of a weight: itself, its gradient, and what Adam keeps.
_BYTES_PER_WEIGHT = 16
#: Of a logit.
_LOGIT_BYTES = 4


@frozen
class Transformer:
    """The shapes of a decoder: `heads` of `head_size` for queries, `kv_heads` for keys and values;
    the layer between the two products of an MLP has `mlp` numbers, and is `gated` by as many more.
    With `dropout`, its masks are kept. It may learn an embedding for each of so many `positions`;
    if it is `tied`, its embedding is the head as well.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    gated: bool
    vocabulary: int
    dropout: bool
    positions: int = 0
    tied: bool = False

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The products of a layer: how many numbers each takes and gives."""
        queries = self.heads * self.head_size
        keys_and_values = 2 * self.kv_heads * self.head_size
        return {
            "queries, keys and values": (self.hidden, queries + keys_and_values),
            "attention's output": (queries, self.hidden),
            "up": (self.hidden, self.mlp * (2 if self.gated else 1)),
            "down": (self.mlp, self.hidden),
        }

    @property
    def weights_of_layer(self) -> int:
        """How many weights a layer has: its matrices, and two norms."""
        return (
            sum(given * made for given, made in self.matrices.values())
            + 2 * self.hidden
        )

    @property
    def weights_of_embedding(self) -> int:
        """How many weights the embedding of tokens has, and the head as many: also where they are
        one, each of the two stages holds it.
        """
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        embeddings = self.weights_of_embedding * (1 if self.tied else 2)
        of_layers = self.layers * self.weights_of_layer
        return of_layers + embeddings + (self.positions + 1) * self.hidden

    @property
    def activations_of_layer(self) -> int:
        """The bytes that a layer keeps of a token from its forward to its backward."""
        queries = self.heads * self.head_size
        keys_and_values = 2 * self.kv_heads * self.head_size
        norms = 2 * self.hidden
        # What goes into the products; what attention takes; what the activation function takes.
        numbers = norms + sum(given for given, _ in self.matrices.values())
        numbers += queries + keys_and_values
        numbers += self.matrices["up"][1]
        masks = 2 * self.hidden if self.dropout else 0
        return _BYTES * numbers + masks

    @property
    def kept_of_layer(self) -> int:
        """The bytes that a layer keeps of a token between the two halves of its backward."""
        # Queries, keys and values are made of one input, and so are gate and up.
        return _BYTES * sum(given + made for given, made in self.matrices.values())


@frozen
class _Amounts:
    """What a layer does and holds: operations of its forward and of the halves of its backward, and
    bytes.
    """

    forward: float
    input: float
    weight: float
    weights: int
    activations: float
    kept: float
    moved: float


def layer_costs(
    model: Transformer,
    device: Device,
    sequence: int,
    samples: int,
    checkpointed: bool,
    efficiency: float,
) -> Costs:
    """What each layer of a model costs for a microbatch of so many samples, in seconds and bytes:
    first the embedding, then the layers, then the head with its loss.

    Of `checkpointed` layers the input alone is kept, and the forward runs again. `efficiency` is
    the share of the device's operations that is reached.
    """
    tokens = samples * sequence
    block = _block(model, sequence, tokens)
    layers = [_embedding(model, tokens), *[block] * model.layers, _head(model, tokens)]

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


def activations_of_one_layer(model: Transformer, sequence: int, samples: int) -> float:
    """The bytes of one layer's activations for a microbatch: what a rank holds besides while the
    forward of a checkpointed layer runs again.
    """
    return float(samples * sequence * model.activations_of_layer)


def gradient_bytes(weights_bytes: float) -> float:
    """The bytes of the gradients of a stage, from those of its weights with all that belongs to
    them.
    """
    return weights_bytes * _BYTES / _BYTES_PER_WEIGHT


def _block(model: Transformer, sequence: int, tokens: int) -> _Amounts:
    products = (
        2.0 * tokens * sum(given * made for given, made in model.matrices.values())
    )
    attention = 4.0 * tokens * sequence * model.heads * model.head_size
    activations = float(tokens * model.activations_of_layer)
    return _Amounts(
        forward=products + attention,
        input=products + 2 * attention,
        weight=products,
        weights=model.weights_of_layer,
        activations=activations,
        kept=float(tokens * model.kept_of_layer),
        moved=_BYTES * model.weights_of_layer + activations,
    )


def _embedding(model: Transformer, tokens: int) -> _Amounts:
    # The rows of the tokens are read, and written as its output.
    numbers = float(_BYTES * tokens * model.hidden)
    masks = float(tokens * model.hidden) if model.dropout else 0.0
    weights = model.weights_of_embedding + model.positions * model.hidden
    return _Amounts(0.0, 0.0, 0.0, weights, masks, 0.0, 2 * numbers)


def _head(model: Transformer, tokens: int) -> _Amounts:
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
