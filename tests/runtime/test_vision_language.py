"""Two encoders of transformers side by side before a decoder, as a model of vision and language has
them: trained, saved, and trained on under other schedules, against one process. In one of them the
encoder of images has replicas that share the decoder's microbatches.
"""

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytest.importorskip("transformers", reason="its models are cut")
import torch
from torch import Tensor, nn

from schedlang import Source, compile, read_source
from schedlang.runtime import Pipeline, load_model, load_optimizers, split
from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

#: Under each plan.
STEPS = 5
#: The graph of the gallery's program, in the order of GPipe.
GPIPE = """schedule gpipe_of_two_encoders {
    param ranks = 4
    param microbatches = 4
    edge s in 0 .. 2 from s to 2
    edge s in 2 .. 3 from s to s + 1
    rank r {
        repeat microbatches { F(next) }
        repeat microbatches { B(next) }
    }
}"""
#: The encoder of images has replicas on two ranks. Their microbatches go to one encoder of texts and
#: one decoder in turn, which are on the two other ranks: the two lanes share these.
REPLICAS = """schedule replicas_of_an_encoder {
    param ranks = 4
    param microbatches = 4
    param n = 2
    pipeline lane(i) in 0 .. n runs microbatches / n
        stage s in 0 .. 4 on if s == 0 then i else if s < 3 then n else n + 1
    edge s in 0 .. 2 from s to 2
    edge s in 2 .. 3 from s to s + 1
    rank r {
        if r < n {
            repeat microbatches / n { F(lane(r, 0), next) }
            repeat microbatches / n { B(lane(r, 0), next) }
        } else if r == n {
            for m in 0 .. microbatches { F(lane(m % n, 1), m / n)  F(lane(m % n, 2), m / n) }
            for m in 0 .. microbatches { B(lane(m % n, 2), m / n)  B(lane(m % n, 1), m / n) }
        } else {
            for m in 0 .. microbatches { F(lane(m % n, 3), m / n)  B(lane(m % n, 3), m / n) }
        }
    }
}"""


def encoders_and_decoder(seed: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """CLIP's encoders of images of 8 x 8 pixels and of 6 tokens, and two blocks that read both."""
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPVisionConfig,
        CLIPVisionModel,
    )

    class States(nn.Module):
        """What an encoder of transformers has made of each patch, or token."""

        def forward(self, made: Any) -> Tensor:
            return made.last_hidden_state

    def with_states(name: str, encoder: nn.Module) -> nn.Module:
        return nn.Sequential(
            OrderedDict([(name, encoder), (f"{name}_states", States())])
        )

    torch.manual_seed(seed)
    sizes = {
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attn_implementation": "eager",
    }
    images = CLIPVisionModel(
        CLIPVisionConfig(hidden_size=16, image_size=8, patch_size=4, **sizes)
    )
    texts = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=24,
            vocab_size=32,
            max_position_embeddings=6,
            bos_token_id=0,
            eos_token_id=1,
            **sizes,
        )
    )
    return with_states("images", images), with_states("texts", texts), Decoder()


class Join(nn.Module):
    """Patches and tokens in one sequence, of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.of_images = nn.Linear(16, 20)
        self.of_texts = nn.Linear(24, 20)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return torch.cat([self.of_images(images), self.of_texts(texts)], dim=1)


class Decoder(nn.Module):
    """Blocks that read patches and tokens; at the end, scores of the tokens that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Join()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(20, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(20, 32)

    def forward(self, images: Tensor, texts: Tensor | None = None) -> Tensor:
        states = self.join(images, texts)
        for block in self.blocks:
            states = block(states)
        return self.head(states)


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    of_texts = scores[:, -following.shape[1] :]
    return nn.functional.cross_entropy(of_texts.flatten(0, 1), following.flatten())


def trained(folder: Path) -> list[float]:
    """How far losses are from those of one process: each plan but the first goes on from a folder."""
    whole = encoders_and_decoder(0)
    weights = [weight for part in whole for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    plans = [
        compile(read_source(PROGRAMS / "two_encoders.sched"), {"microbatches": 4}),
        compile(Source("replicas_of_an_encoder.sched", REPLICAS)),
        compile(Source("gpipe_of_two_encoders.sched", GPIPE)),
    ]
    found = []
    for part, plan in enumerate(plans):
        # The weights come from the folder, but for the first time.
        images, texts, decoder = encoders_and_decoder(part)
        stages = split(images, plan, stages=[0])
        stages |= split(texts, plan, stages=[1])
        stages |= split(decoder, plan, ["join", "blocks", "head"], stages=[2, 3])
        pipeline = Pipeline(plan, stages, loss_of)
        ours = torch.optim.AdamW(list(pipeline.parameters()), lr=0.01)
        if part:
            assert load_model(folder, stages) == part * STEPS
            load_optimizers(folder, stages, [ours])
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(part * STEPS + step)
            pixels = torch.rand(8, 3, 8, 8, generator=generator)
            tokens = torch.randint(32, (8, 7), generator=generator)
            inputs = {0: pixels, 1: tokens[:, :-1]}
            losses = pipeline.step(inputs, tokens[:, 1:])
            whole_images, whole_texts, whole_decoder = whole
            right = []
            for some, given, wanted in zip(
                pixels.chunk(4),
                tokens[:, :-1].chunk(4),
                tokens[:, 1:].chunk(4),
                strict=True,
            ):
                loss = loss_of(
                    whole_decoder(whole_images(some), whole_texts(given)), wanted
                )
                (loss / 4).backward()
                right.append(loss.detach())
            if losses is not None:
                found += (losses / torch.stack(right) - 1).abs().tolist()
            for each in (ours, optimizer):
                each.step()
                each.zero_grad()
        pipeline.save_model(folder, (part + 1) * STEPS, [ours])
    return found


def test_encoders_of_images_and_texts_before_a_decoder(
    run_ranks: Run, tmp_path: Path
) -> None:
    found = run_ranks(partial(trained, tmp_path / "model"), 4).results()
    assert [len(each) for each in found] == [0, 0, 0, 3 * 4 * STEPS]
    assert max(found[-1]) < 1e-5
