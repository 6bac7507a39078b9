"""A small GPT over bytes, cut into stages."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Bytes that the model sees at once.
CONTEXT = 64

_BYTES, _WIDTH, _HEADS = 256, 128, 4
_LEAST_BLOCKS = 4


class Embedding(nn.Module):
    """Bytes to vectors: what the byte is, and where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(_BYTES, _WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, _WIDTH) * 0.02)

    def forward(self, bytes: Tensor) -> Tensor:
        """(rows, length) bytes to (rows, length, width)."""
        embedded: Tensor = self.byte(bytes) + self.position[: bytes.shape[1]]
        return embedded


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query_key_value, self.merge = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to the same."""
        x = x + self.attend(self.attention_norm(x))
        fed: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + fed

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        rows, length, width = x.shape
        heads = self.query_key_value(x).view(rows, length, 3 * _HEADS, width // _HEADS).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        return merged


class Head(nn.Module):
    """Vectors to a score for each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to (rows, length, 256)."""
        scores: Tensor = self.scores(self.norm(x))
        return scores


def build_gpt(stages: int, seed: int) -> list[nn.Sequential]:
    """The stages of a model, the same for the same seed: as many blocks in each, at least four in all."""
    torch.manual_seed(seed)
    blocks = -(-_LEAST_BLOCKS // stages)
    layers: list[list[nn.Module]] = [[Block() for _ in range(blocks)] for _ in range(stages)]
    layers[0].insert(0, Embedding())
    layers[-1].append(Head())
    return [nn.Sequential(*each) for each in layers]


def next_byte_loss(scores: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy of the bytes that follow, in nats."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())
