"""Small models of transformers, which `split` cuts."""

from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime import split
from tests.models.families.state import words_loss
from tests.models.model import FEATURES, Feature, Model
from tests.support.models import program

#: The blocks of a model of transformers, in the order of their calls.
BLOCKS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
WORDS = 32
LENGTH = 6

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "gemma3_text",
    "smollm3",
    "starcoder2",
    "stablelm",
)


class Scores(nn.Module):
    """A model that returns its scores alone."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False).logits


def _draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs, targets = torch.randint(
        WORDS, (2, 2 * microbatches, LENGTH), generator=generator
    )
    return inputs, targets


def _build(family: str, stages: int, **more: Any) -> Model:
    # It takes seconds to import.
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        attention_dropout=0.0,
        attn_implementation="eager",
        # Its other ones have no float64.
        experts_implementation="eager",
        **more,
    )
    whole = Scores(AutoModelForCausalLM.from_config(config).double())
    plan = program("1f1b", ranks=stages, microbatches=4)
    parts: dict[int, nn.Module] = {}
    tied: Any = ()
    for rank in range(stages):
        own = split(whole, plan, [f"inner.{each}" for each in BLOCKS], rank=rank)
        parts |= own
        tied = own.tied
    for names in tied:
        # `split` makes copies; alone they are one.
        first, *others = [(parts[stage], name) for stage, name in names.items()]
        for stage, name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(
                stage.get_submodule(owner), attribute, first[0].get_parameter(first[1])
            )
    return Model(
        [parts[number] for number in range(stages)],
        batch=_draw,
        loss=words_loss,
        tied=tied,
    )


for _family in FAMILIES:
    FEATURES[_family.replace("_", " ")] = Feature(
        _family.replace("_", " "),
        "transformers",
        f"`{_family}` of transformers",
        lambda stages, family=_family: _build(
            family, stages, tie_word_embeddings=False
        ),
        not_for=frozenset({"slices", "skips"}),
    )
FEATURES["llama with tied embeddings"] = Feature(
    "llama with tied embeddings",
    "transformers",
    "`llama` of transformers, whose embedding and scores have one weight",
    lambda stages: _build("llama", stages, tie_word_embeddings=True),
    not_for=frozenset({"slices", "skips"}),
)
