"""The parts of a layer: attention, MLP, experts, recurrence; their weights, activations and work.

A layer is a list of parts, each after a norm. A part has matrix products, and further activations
and operations; costs follow from these alone. A new kind of part is one function here.

Sizes are numbers of elements for one token: a product has `given` inputs and `made` outputs.
"""

from attrs import frozen


@frozen
class Product:
    """A product with a matrix of weights. There are `held` such matrices, of which a token uses
    `used`: a layer has many experts, and a token goes to a few.
    """

    given: int
    made: int
    held: int = 1
    used: int = 1

    @property
    def weights(self) -> int:
        """The number of weights of all matrices."""
        return self.held * self.given * self.made

    @property
    def used_weights(self) -> int:
        """The number of weights that a token uses."""
        return self.used * self.given * self.made


@frozen
class Part:
    """A part of a layer.

    `taken` is the number of activations that are kept for the backward besides the inputs of the
    products, such as queries, keys and values. `vectors` are weights outside the matrices.
    Attention multiplies each pair of tokens `pairs` times in the forward: the sizes of all queries
    and values. A recurrence takes `steps` operations for a token.
    """

    products: tuple[Product, ...]
    taken: int
    vectors: int = 0
    pairs: int = 0
    steps: int = 0

    @property
    def weights(self) -> int:
        """The number of weights of the part."""
        return self.vectors + sum(product.weights for product in self.products)

    @property
    def used_weights(self) -> int:
        """The number of weights that a token uses."""
        return self.vectors + sum(product.used_weights for product in self.products)

    @property
    def weights_of_experts(self) -> int:
        """The number of weights of experts, which may be sharded over ranks."""
        return sum(product.weights for product in self.products if product.held > 1)

    @property
    def given(self) -> int:
        """The number of inputs of all products for a token."""
        return sum(product.used * product.given for product in self.products)

    @property
    def made(self) -> int:
        """The number of outputs of all products for a token."""
        return sum(product.used * product.made for product in self.products)

    @property
    def sent(self) -> int:
        """The number of elements that a token sends to experts on other ranks."""
        inputs = (
            product.used * product.given
            for product in self.products
            if product.held > 1
        )
        return next(inputs, 0)


def attention(
    hidden: int, heads: int, kv_heads: int, head_size: int, gated: bool = False
) -> Part:
    """Attention with a key-value head for each head, or for a group of heads. If `gated`, its
    output is multiplied with a gate of the size of the queries.
    """
    queries = heads * head_size
    keys_and_values = 2 * kv_heads * head_size
    gate = queries if gated else 0
    return Part(
        (
            Product(hidden, queries + gate + keys_and_values),
            Product(queries, hidden),
        ),
        taken=queries + gate + keys_and_values,
        pairs=2 * queries,
    )


def latent_attention(
    hidden: int,
    heads: int,
    query_rank: int,
    kv_rank: int,
    head_size: int,
    rotary_size: int,
    value_size: int,
) -> Part:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Keys and values are
    computed from a vector of size `kv_rank`, and queries from one of size `query_rank`, or from the
    input if that is 0. A head has `head_size` elements without a position, and `rotary_size` with
    one.
    """
    key = head_size + rotary_size
    first = Product(hidden, (query_rank or heads * key) + kv_rank + rotary_size)
    of_queries = [Product(query_rank, heads * key)] if query_rank else []
    return Part(
        (
            first,
            *of_queries,
            Product(kv_rank, heads * (head_size + value_size)),
            Product(heads * value_size, hidden),
        ),
        # The inputs of both norms; queries, keys and values.
        taken=query_rank + kv_rank + heads * (2 * key + value_size),
        vectors=query_rank + kv_rank,
        pairs=heads * (key + value_size),
    )


def mlp(hidden: int, width: int, gated: bool) -> Part:
    """Two products with an activation function between them; a `gated` MLP has three products."""
    up = width * (2 if gated else 1)
    return Part((Product(hidden, up), Product(width, hidden)), taken=up)


def experts(
    hidden: int, width: int, gated: bool, held: int, used: int, shared: int = 0
) -> Part:
    """A mixture of experts: a token goes to `used` of `held` MLPs, and to one of width `shared`."""
    up = width * (2 if gated else 1)
    products = [
        # The router.
        Product(hidden, held),
        Product(hidden, up, held, used),
        Product(width, hidden, held, used),
    ]
    taken = held + used * up
    if shared:
        each = mlp(hidden, shared, gated)
        products += each.products
        taken += each.taken
    return Part(tuple(products), taken)


def mamba(hidden: int, inner: int, state: int, rank: int, width: int) -> Part:
    """Mamba's selective state space (Gu and Dao 2023, arXiv 2312.00752): each of `inner` channels
    has a `state`; time steps come from a vector of size `rank`; the convolution has a `width`.
    """
    return Part(
        (
            Product(hidden, 2 * inner),
            Product(inner, rank + 2 * state),
            Product(rank, inner),
            Product(inner, hidden),
        ),
        # Input, gate and time steps, and the vectors that read and write the state.
        taken=3 * inner + 2 * state,
        # The convolution with its biases, decays, skips, and the biases of time steps.
        vectors=inner * (width + 1) + inner * (state + 2),
        steps=9 * inner * state,
    )


def mamba2(
    hidden: int, heads: int, head_size: int, groups: int, state: int, width: int
) -> Part:
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a state for each head, read and written by
    vectors that a group of heads shares.
    """
    inner = heads * head_size
    mixed = inner + 2 * groups * state
    projected = inner + mixed + heads
    return Part(
        (Product(hidden, projected), Product(inner, hidden)),
        # The projection, the output of the convolution, and the input of the norm.
        taken=projected + mixed + inner,
        vectors=mixed * (width + 1) + 3 * heads + inner,
        steps=6 * inner * state,
    )


def delta_rule(
    hidden: int, keys: int, key_size: int, values: int, value_size: int, width: int
) -> Part:
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): linear attention with `keys` heads for
    queries and keys, and `values` heads for values, each with a state of key size x value size.
    """
    mixed = 2 * keys * key_size + values * value_size
    inner = values * value_size
    projected = mixed + inner + 2 * values
    return Part(
        (Product(hidden, projected), Product(inner, hidden)),
        taken=projected + mixed + inner,
        vectors=mixed * width + 2 * values + value_size,
        steps=8 * inner * key_size,
    )
