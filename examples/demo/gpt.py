"""A small GPT over bytes, cut into stages."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.runtime.components import end_component
from schedlang.runtime.model.partition import partition
from schedlang.schedule.layout import Layout

#: Bytes that the model sees at once, where they need not divide into slices.
CONTEXT = 64

#: Blocks of a model that is cut into no more stages.
BLOCKS = 8

_BYTES = 256
_WIDTH = 128
_HEADS = 4


class Embedding(nn.Module):
    """Bytes to vectors: the sum of an embedding of the byte and one of its position."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(_BYTES, _WIDTH)
        self.position = nn.Parameter(torch.randn(context, _WIDTH) * 0.02)

    def forward(self, bytes: Tensor, begin: int = 0) -> Tensor:
        """(rows, length) bytes, of which so many went before, to (rows, length, width)."""
        embedded: Tensor = (
            self.byte(bytes) + self.position[begin : begin + bytes.shape[1]]
        )
        return embedded


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.merge = nn.Linear(_WIDTH, _WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to the same."""
        return self.extend(x, None)[0]

    def extend(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same for a part of a text that follows one with the keys and values `past`; also
        gives the keys and values of both.
        """
        rows, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(
            rows, length, 3 * _HEADS, width // _HEADS
        )
        query, *new = heads.transpose(1, 2).chunk(3, dim=1)
        seen = (
            torch.stack(new)
            if past is None
            else torch.cat([past, torch.stack(new)], dim=3)
        )
        # With 2 bytes that went before and 3 new ones, a new byte sees all before it and itself:
        #
        #     1 1 1 0 0
        #     1 1 1 1 0      `tril(2)`; without any before, `is_causal` says the same and is faster
        #     1 1 1 1 1
        before = seen.shape[3] - length
        mask = (
            torch.ones(length, before + length, dtype=torch.bool, device=x.device).tril(
                before
            )
            if before
            else None
        )
        key, value = seen
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        x = end_component(x)
        fed: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return end_component(x + fed), seen


class Head(nn.Module):
    """Vectors to a score for each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.scores = nn.Linear(_WIDTH, _BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to (rows, length, 256)."""
        scores: Tensor = self.scores(self.norm(x))
        return scores


def joined(
    layers: Iterable[nn.Module],
    inputs: Sequence[Tensor],
    skips: Mapping[int, Tensor] | None = None,
    begin: int = 0,
) -> tuple[Tensor, list[nn.Module]]:
    """What a stage is given by edges and skips as one, and the layers that it goes through. An
    embedding is for the bytes alone, of which so many went before: other models may hand on to a
    first stage as well.
    """
    given, *others = [*inputs, *(skips or {}).values()]
    rest = list(layers)
    if rest and isinstance(rest[0], Embedding):
        given = rest.pop(0)(given, begin)
    return sum(others, start=given), rest


class Sliced(nn.Sequential):
    """The layers of a stage, for one slice of a text after the other: a block sees keys and values
    of all before.
    """

    def forward(
        self,
        *inputs: Tensor,
        past: Sequence[Tensor] | None = None,
        skips: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, and for each block the keys and values so far, (2, rows, heads, length,
        width).
        """
        x, layers = joined(self, inputs, skips, past[0].shape[3] if past else 0)
        before = iter(past or ())
        seen = list[Tensor]()
        for layer in layers:
            if isinstance(layer, Block):
                x, keys_and_values = layer.extend(x, next(before, None))
                seen.append(keys_and_values)
            else:
                x = layer(x)
        return x, seen


class Joining(nn.Sequential):
    """The layers of a stage in a graph, or with skips: what earlier stages give is added up, and
    the output goes to `later` ones by skips.
    """

    def __init__(
        self, layers: OrderedDict[str, nn.Module], later: Sequence[int]
    ) -> None:
        super().__init__(layers)
        self.later = later

    def forward(
        self, *inputs: Tensor, skips: Mapping[int, Tensor] | None = None
    ) -> Any:
        """Run the layers."""
        output, layers = joined(self, inputs, skips)
        for layer in layers:
            output = layer(output)
        return self.give(output)

    def give(self, output: Tensor) -> Any:
        """The output, and if it goes on by skips, what each of these stages gets."""
        return (output, dict.fromkeys(self.later, output)) if self.later else output


class SlicedJoining(Joining, Sliced):
    """The same, for one slice of a text after the other."""

    def forward(
        self,
        *inputs: Tensor,
        past: Sequence[Tensor] | None = None,
        skips: Mapping[int, Tensor] | None = None,
    ) -> Any:
        """What `Joining` gives, and beside it the keys and values that `Sliced` gives."""
        output, seen = Sliced.forward(self, *inputs, past=past, skips=skips)
        return self.give(output), seen


def build_gpt(blocks: int, seed: int, context: int = CONTEXT) -> list[nn.Module]:
    """The layers of a model with so many blocks that sees so many bytes at once, the same for the
    same seed.
    """
    torch.manual_seed(seed)
    return [Embedding(context), *(Block() for _ in range(blocks)), Head()]


def cut_gpt(
    layers: Sequence[nn.Module], layout: Layout, sliced: bool
) -> list[nn.Sequential]:
    """The stages of one pipeline, as even as can be, those frozen that are so in the plan; a
    layer's name is its place in the whole model. In a graph, each stage that takes inputs has the
    embedding, and one that makes a loss the head.

    ValueError for more stages than layers.
    """
    is_graph = bool(layout.graph) or layout.models
    parts = (_of_graph if is_graph else _of_chain)(layers, layout)
    for stage in layout.frozen:
        for layer in parts[stage].values():
            layer.requires_grad_(False)
    if not is_graph and not layout.skips:
        return [(Sliced if sliced else nn.Sequential)(part) for part in parts]
    joining = SlicedJoining if sliced else Joining
    return [
        joining(part, [b for a, b in layout.skips if a == stage])
        for stage, part in enumerate(parts)
    ]


def _of_chain(
    layers: Sequence[nn.Module], layout: Layout
) -> list[OrderedDict[str, nn.Module]]:
    """The layers of each stage of a chain."""
    # Multiplications of a byte: in a block 3 + 1 for attention and 4 + 4 for the rest, each of
    # width x width; an embedding is only looked up.
    blocks = [12 * _WIDTH**2] * (len(layers) - 2)
    cuts = partition([0, *blocks, _BYTES * _WIDTH], layout).cuts
    return [
        OrderedDict((str(place), layers[place]) for place in range(*ends))
        for ends in pairwise(cuts)
    ]


def _of_graph(
    layers: Sequence[nn.Module], layout: Layout
) -> list[OrderedDict[str, nn.Module]]:
    """Those of a graph, or of several models: the blocks in order, as evenly as can be."""
    blocks = len(layers) - 2
    context = len(layers[0].get_parameter("position"))
    parts: list[OrderedDict[str, nn.Module]] = []
    for stage in range(layout.pieces):
        own = range(
            blocks * stage // layout.pieces, blocks * (stage + 1) // layout.pieces
        )
        named = OrderedDict((str(block + 1), layers[block + 1]) for block in own)
        if layout.is_first(stage):
            # The random numbers go on from those of the model, alike in all processes.
            embedding = layers[0] if stage == layout.firsts[0] else Embedding(context)
            named = OrderedDict({"0": embedding} | named)
        if layout.is_last(stage):
            head = Head() if layout.models and stage < layout.pieces - 1 else layers[-1]
            named[str(len(layers) - 1)] = head
        if layout.models:
            # Names of layers are those of checkpoints, and differ between models.
            model = layout.model_of(stage)
            named = OrderedDict(
                (f"{model}_{name}", layer) for name, layer in named.items()
            )
        parts.append(named)
    return parts


def run_gpt(
    stages: Sequence[nn.Module],
    layout: Layout,
    inputs: Mapping[str, Tensor],
    sent: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run all stages one after the other, along the edges and skips of a layout; the stages were
    built without slices and skips. Takes inputs for some models, by their names, and gives what
    these have made; the only one of a plan has none. `sent` makes of a tensor what arrives of it at
    another rank.
    """
    outputs: dict[int, Tensor] = {}
    made: dict[str, Tensor] = {}

    def arrived(earlier: int, later: int) -> Tensor:
        output = outputs[layout.piece(earlier)]
        is_sent = layout.placement[earlier] != layout.placement[later]
        return sent(output) if sent and is_sent else output

    for number, stage in enumerate(stages):
        model = layout.model_of(number)
        if model not in inputs:
            continue
        given = [inputs[model]] if layout.is_first(number) else []
        # With several pipelines, another one may make what the first one takes.
        before = sorted(layout.before[number], key=layout.piece)
        given += [arrived(earlier, number) for earlier in before]
        if not isinstance(stage, Joining):
            # What comes by skips is added to what the stage before has made.
            given = [sum(given[1:], start=given[0])]
        outputs[number] = stage(*given)
        if layout.is_last(number):
            made[model] = outputs[number]
    return made


def next_byte_loss(scores: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy of the bytes that follow, in nats."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def loss_and_bytes(scores: Tensor, following: Tensor) -> dict[str, Any]:
    """The same, with the bytes that it is the mean of."""
    return {"loss": next_byte_loss(scores, following), "bytes": following.numel()}
