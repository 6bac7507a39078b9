"""Models with skips: whole, as one process has them, and their stages."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4
LENGTH = 16
WORDS = 11


class Skipping(nn.Sequential):
    """Layers to whose input is added what earlier stages give, and whose output goes to `later`
    stages.
    """

    def __init__(self, *layers: nn.Module, later: Iterable[int] = ()) -> None:
        super().__init__(*layers)
        self.later = tuple(later)

    def forward(self, x: Tensor, skips: dict[int, Tensor] | None = None) -> Any:
        for each in (skips or {}).values():
            x = x + each
        x = super().forward(x)
        return (x, dict.fromkeys(self.later, x)) if self.later else x


class Summing(Skipping):
    """By slices of the second dimension: every position sees those before."""

    def forward(
        self,
        x: Tensor,
        skips: dict[int, Tensor] | None = None,
        past: Tensor | None = None,
    ) -> Any:
        returned = super().forward(x, skips)
        output, given = returned if self.later else (returned, {})
        seen = output.cumsum(dim=1) + (0 if past is None else past)
        return ((seen.tanh(), given) if self.later else seen.tanh()), seen[:, -1:]


def in_order(stages: Iterable[nn.Module], x: Tensor) -> Tensor:
    """What `Skipping` stages make, one after the other."""
    given: dict[int, dict[int, Tensor]] = {}
    for number, stage in enumerate(stages):
        returned = stage(x, given.pop(number, None))
        if isinstance(stage, Summing):
            returned, _ = returned
        x, gives = returned if stage.later else (returned, {})
        for later, value in gives.items():
            given.setdefault(later, {})[number] = value
    return x


def convolution(inside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(inside, WIDTH, 3, padding=1, dtype=torch.float64), nn.Tanh()
    )


class UNet(nn.Module):
    """Halves the length on its way down, and doubles it on its way up, where it sees again what it
    was.
    """

    def __init__(self, stages: int) -> None:
        super().__init__()
        # As many stages up as down; what is left over is the bottom. With 5 stages:
        #
        #    down 0 ──────────────────────── up 4
        #       └─ down 1 ─────────── up 3 ──┘
        #            └─── bottom 2 ────┘
        self.depth = (stages - 1) // 2
        self.down = nn.ModuleList(convolution(WIDTH) for _ in range(self.depth))
        self.bottom = nn.ModuleList(
            convolution(WIDTH) for _ in range(stages - 2 * self.depth)
        )
        self.up = nn.ModuleList(convolution(2 * WIDTH) for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool1d(x, 2)
        for block in self.bottom:
            x = block(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], dim=1))
        return x

    def stages(self) -> list[nn.Module]:
        last = 2 * self.depth + len(self.bottom) - 1
        down = [Down(block, last - stage) for stage, block in enumerate(self.down)]
        return [
            *down,
            *self.bottom,
            *(Up(block, self.depth - 1 - each) for each, block in enumerate(self.up)),
        ]


class Down(nn.Module):
    """Hands on what it has made at half the length, and gives it whole to its mirror image."""

    def __init__(self, block: nn.Module, later: int) -> None:
        super().__init__()
        self.block = block
        self.later = later

    def forward(self, x: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        whole = self.block(x)
        return F.avg_pool1d(whole, 2), {self.later: whole}


class Up(nn.Module):
    def __init__(self, block: nn.Module, earlier: int) -> None:
        super().__init__()
        self.block = block
        self.earlier = earlier

    def forward(self, x: Tensor, skips: dict[int, Tensor]) -> Tensor:
        return self.block(
            torch.cat([F.interpolate(x, scale_factor=2), skips[self.earlier]], dim=1)
        )


class Translator(nn.Module):
    """All stages of the decoder look at what the encoder has made of the source."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.source, self.target = (
            nn.Embedding(WORDS, WIDTH, dtype=torch.float64) for _ in range(2)
        )
        self.encoder = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(stages // 2)
        )
        self.decoder = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64)
            for _ in range(stages - stages // 2)
        )
        self.scores = nn.Linear(WIDTH, WORDS, dtype=torch.float64)

    def forward(self, words: dict[str, Tensor]) -> Tensor:
        memory = self.source(words["source"])
        x = self.target(words["given"])
        for layer in self.encoder:
            memory = memory + layer(memory).tanh()
        for look in self.decoder:
            x = x + look(x, memory, memory, need_weights=False)[0]
        return self.scores(x)

    def stages(self) -> list[nn.Module]:
        first = len(self.encoder)
        count = len(self.encoder) + len(self.decoder)
        found: list[nn.Module] = []
        for stage, layer in enumerate(self.encoder):
            # The first stage of the decoder is its neighbour, and gets the memory as its input.
            memory_to = range(first + 1, count) if stage == first - 1 else ()
            found.append(
                Encode(layer, self.source if stage == 0 else None, first, memory_to)
            )
        for stage, look in enumerate(self.decoder, first):
            ends = (
                self.target if stage == first else None,
                self.scores if stage == count - 1 else None,
            )
            found.append(Decode(look, *ends, first))
        return found


class Encode(nn.Module):
    """The first one gives the decoder its words; the last one gives what all have made."""

    def __init__(
        self,
        layer: nn.Module,
        embed: nn.Module | None,
        first: int,
        memory_to: Iterable[int],
    ) -> None:
        super().__init__()
        self.layer = layer
        self.embed = embed
        self.first = first
        self.memory_to = memory_to

    def forward(self, x: Any) -> Any:
        gives = {}
        if self.embed is not None:
            gives[self.first] = {"given": x["given"]}
            x = self.embed(x["source"])
        x = x + self.layer(x).tanh()
        gives |= {stage: [x] for stage in self.memory_to}
        return (x, gives) if gives else x


class Decode(nn.Module):
    """The first one is the neighbour of the encoder, whose output it takes, and its words from
    afar.
    """

    def __init__(
        self,
        look: nn.Module,
        embed: nn.Module | None,
        scores: nn.Module | None,
        first: int,
    ) -> None:
        super().__init__()
        self.look = look
        self.embed = embed
        self.scores = scores
        self.first = first

    def forward(self, x: Tensor, skips: dict[int, Any]) -> Tensor:
        if self.embed is not None:
            memory = x
            x = self.embed(skips[0]["given"])
        else:
            (memory,) = skips[self.first - 1]
        x = x + self.look(x, memory, memory, need_weights=False)[0]
        return x if self.scores is None else self.scores(x)
