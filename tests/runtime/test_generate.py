"""Models of transformers that generate in a pipeline, each rank with a cache for its own layers: the
tokens are those of `generate` in one process.
"""

from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from examples import generate as example
from schedlang import compile
from schedlang.runtime import Decoding, split
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

MAX_TOKENS = 10
END = 1
PAD = 0
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
#: Families of transformers: with tied weights, positions that are learned, and windows that are
#: shorter than the texts, on all layers or on every other one.
FAMILIES = {
    "llama": SMALL,
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 64},
    "mistral": {**SMALL, "sliding_window": 6},
    "gemma2": {**SMALL, "sliding_window": 8},
    "qwen3": SMALL,
}


def build(family: str) -> PreTrainedModel:
    """A small model, with weights that make texts differ."""
    tokens = {"vocab_size": 64, "eos_token_id": END, "pad_token_id": PAD}
    config = AutoConfig.for_model(family, **FAMILIES[family], **tokens)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data *= 8 if weight.ndim > 1 else 1
    return model


def alone(family: str, prompts: list[Tensor]) -> list[Tensor]:
    """What transformers generates in one process."""
    model = build(family)
    texts = [
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        for tokens in prompts
    ]
    return [
        text[:, tokens.shape[1] :] for text, tokens in zip(texts, prompts, strict=True)
    ]


def wrong_families() -> list[str]:
    """The families whose texts differ from those of one process."""
    ranks = dist.get_world_size()
    plan = compile("decoding", {"ranks": ranks, "microbatches": 2, "rounds": 4})
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(2, 64, shape, generator=generator) for shape in ((2, 5), (3, 7))
    ]
    wrong = []
    for family in FAMILIES:
        model = build(family)
        stages = split(model, plan, stages=range(ranks))
        config = model.config
        decoding = Decoding(
            plan,
            stages,
            lambda _, config=config: {
                "past_key_values": example.StageCache(config=config)
            },
        )
        texts = decoding.generate(prompts, MAX_TOKENS, END, PAD)
        if not all(map(torch.equal, texts, alone(family, prompts))):
            wrong.append(family)
    return wrong


def test_models_of_transformers_generate_as_they_are(run_ranks: Run) -> None:
    assert run_ranks(wrong_families, 2).results() == [[], []]


def example_differs(ranks: int, rounds: int) -> bool:
    """Whether the texts of the example differ from those of one process."""
    prompts = example.groups_of(ranks)
    texts = example.generate(example.build(), prompts, ranks, rounds)
    return not all(map(torch.equal, texts, example.alone(prompts)))


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 8), (4, 5)])
def test_the_example_generates_from_prompts_that_are_padded(
    run_ranks: Run, ranks: int, rounds: int
) -> None:
    found = run_ranks(partial(example_differs, ranks, rounds), ranks).results()
    assert found == [False] * ranks
