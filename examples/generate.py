"""Text from a model of transformers in a pipeline: each rank has the layers of its stage, and a
cache of their keys and values.

    torchrun --nproc-per-node 2 examples/generate.py

A small Llama with random weights goes on from prompts of unequal lengths. Rank 0 prints whether the
texts are those of the model's own `generate`.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from schedlang import compile
from schedlang.runtime import Decoding, split

TOKENS = 64
PAD = 0
END = 1
#: Prompts of a group, and the most tokens that follow one.
ROWS = 3
MAX_TOKENS = 20
BLOCKS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


class StageCache(DynamicCache):
    """The keys and values of a stage's layers. Where a model asks a layer of another stage how many
    tokens it has seen, as it does for positions and masks, one of this stage answers.
    """

    def _own(self, layer: int) -> int:
        """The layer, or where another stage has it, the first of the same kind that is here."""
        kind = type(self.layers[layer]) if layer < len(self.layers) else None
        filled = [
            number
            for number, each in enumerate(self.layers)
            if isinstance(each, DynamicLayer)
            and type(each) is kind
            and each.get_seq_length()
        ]
        return layer if layer in filled or not filled else filled[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens that a layer has seen."""
        return super().get_seq_length(self._own(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The length and the offset of a layer's mask."""
        return super().get_mask_sizes(query_length, self._own(layer_idx))


class Llama(LlamaForCausalLM):
    """A Llama whose stages pass tensors."""

    def forward(self, tokens: Tensor, cache: StageCache, mask: Tensor) -> Tensor:
        """The scores of the next token, (rows, length, TOKENS). `mask` is that of the prompts, 0
        where they are padded on the left.
        """
        seen = cache.get_seq_length() + tokens.shape[1]
        chosen = mask.new_ones(len(mask), seen - mask.shape[1])
        mask = torch.cat([mask, chosen], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        output = super().forward(
            tokens,
            attention_mask=mask,
            position_ids=positions[:, -tokens.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits


def config() -> LlamaConfig:
    """That of a small Llama."""
    return LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        eos_token_id=END,
    )


def build() -> Llama:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    model = Llama(config()).eval()
    # Random weights of the usual size would give much the same text for all prompts.
    for weight in model.parameters():
        weight.data *= 8 if weight.ndim > 1 else 1
    return model


def padded(lengths: list[int]) -> Tensor:
    """Random prompts of these lengths, padded on the left, (rows, the longest)."""
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        prompts[row, -length:] = torch.randint(
            2, TOKENS, (length,), generator=generator
        )
    return prompts


def caches(prompts: Tensor) -> dict[str, object]:
    """What the stages of a rank are called with for a group of prompts."""
    return {"cache": StageCache(), "mask": (prompts != PAD).long()}


def generate(
    model: Llama, prompts: list[Tensor], ranks: int, rounds: int
) -> list[Tensor]:
    """The texts that follow some groups of prompts, on all ranks."""
    sizes = {"ranks": ranks, "microbatches": len(prompts), "rounds": rounds}
    plan = compile("decoding", sizes)
    stages = split(model, plan, BLOCKS, stages=range(ranks))
    return Decoding(plan, stages, caches).generate(prompts, MAX_TOKENS, END, PAD)


def alone(prompts: list[Tensor]) -> list[Tensor]:
    """The same, by the `generate` of transformers in one process."""
    model = LlamaForCausalLM(config()).eval()
    model.load_state_dict(build().state_dict())
    return [
        model.generate(
            tokens,
            attention_mask=(tokens != PAD).long(),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )[:, tokens.shape[1] :]
        for tokens in prompts
    ]


def groups_of(count: int) -> list[Tensor]:
    """Groups of prompts of unequal lengths."""
    return [padded([3 + group, 5, 7]) for group in range(count)]


def main() -> None:
    """Generate a text for each prompt, and print them."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    # A group for each rank: while a token of one is on its way back, ranks work on the others.
    prompts = groups_of(ranks)
    texts = generate(build(), prompts, ranks, rounds=8)
    if dist.get_rank() == 0:
        for group, text in enumerate(texts):
            print(f"group {group}: {text.tolist()}")
        are_equal = all(map(torch.equal, texts, alone(prompts)))
        print(f"as in one process: {'yes' if are_equal else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
