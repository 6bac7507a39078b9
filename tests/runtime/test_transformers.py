"""Models of transformers in slices, on real processes: they train as in one process."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from schedlang.plan.plan import Plan
from schedlang.runtime import (
    EvenLayers,
    Pipeline,
    load_model,
    load_optimizers,
    measure,
    split,
)
from schedlang.runtime.model.layouts import StageLayout
from tests.support.cut_models import LENGTH, ROWS, VOCABULARY, alone, gradients, loss_of
from tests.support.models import OPTIMIZERS, difference, program, program_with
from tests.support.paths import DOCS
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

#: The blocks of a model of transformers, in the order of their calls.
BLOCKS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
STEPS = 20


class Llama(LlamaForCausalLM):
    """The model of transformers, which returns a tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens, use_cache=False).logits


def llama(tied: bool = False) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
    )
    return Llama(config)


def empty_llama(tied: bool = False) -> Llama:
    """Without weights, but for its positions, which are in no file."""
    # On this device tensors have shapes and no memory.
    with torch.device("meta"):
        model = llama(tied)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Those of 8 microbatches, which count on from some token."""
    begin = torch.randint(
        VOCABULARY, (8 * ROWS, 1), generator=torch.Generator().manual_seed(step)
    )
    drawn = (begin + torch.arange(LENGTH + 1)) % VOCABULARY
    return drawn[:, :-1], drawn[:, 1:]


def save_llama(folder: Path, tied: bool = False) -> None:
    """Write a Llama that no pipeline has written."""
    if dist.get_rank() == 0:
        llama(tied).save_pretrained(folder)
    dist.barrier()


def llamas(folder: Path) -> dict[str, tuple[bool, float, float]]:
    """A Llama of which each rank loads its own slice: as `sequences`, and the share of the weights
    that it holds.
    """
    save_llama(folder)
    whole = llama()
    found = {}
    expected = alone(whole, loss_of, *tokens(0))
    for name in ("zb_v", "dualpipe"):
        plan = program(name, ranks=4, microbatches=8)
        empty = empty_llama()
        stages = split(empty, plan, BLOCKS, measure(empty, tokens(0)[0][:ROWS], BLOCKS))
        assert load_model(folder, stages) == 0
        losses = Pipeline(plan, stages, loss_of).step(*tokens(0))
        pairs = list(gradients(stages, whole))
        # By address, so that a weight with two names counts once.
        held = {
            each.data_ptr(): each.numel()
            for stage in stages.values()
            for each in stage.parameters()
        }
        share = sum(held.values()) / sum(each.numel() for each in whole.parameters())
        same = losses is None or name == "dualpipe" or torch.equal(losses, expected)
        equal = same and all(torch.equal(*each) for each in pairs)
        found[name] = [equal, max(difference(*each) for each in pairs), share]
    return found


def test_a_llama_of_transformers_trains_in_slices(
    run_ranks: Run, tmp_path: Path
) -> None:
    """Each rank loads its own slice alone; of two pipelines it has two."""
    shares = {"zb_v": 0, "dualpipe": 0}
    for found in run_ranks(llamas, 4, tmp_path).results():
        for name, (equal, worst, share) in found.items():
            assert equal or name == "dualpipe"
            assert worst < 1e-5
            assert share < (0.35 if name == "zb_v" else 0.6)
            shares[name] += share
    # All ranks together hold the model once, or once for each pipeline.
    assert shares == {"zb_v": pytest.approx(1), "dualpipe": pytest.approx(2)}


#: Models of transformers that are cut as they are: their names on the page, and in transformers.
FAMILIES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Phi-3": "phi3",
    "OLMo-2": "olmo2",
    "Gemma-3": "gemma3_text",
    "SmolLM3": "smollm3",
    "StarCoder2": "starcoder2",
    "StableLM": "stablelm",
}


def families() -> dict[str, bool]:
    """Whether the stages, one after the other, compute what the whole model does, to the bit."""
    plan = program("zb_v", ranks=2, microbatches=8)
    found = {}
    for name, family in FAMILIES.items():
        config = AutoConfig.for_model(
            family,
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=LENGTH,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        whole = type(model)
        # As `Llama`.
        model.__class__ = type(
            family,
            (whole,),
            {
                "forward": lambda self, x, whole=whole: (
                    whole.forward(self, x, use_cache=False).logits
                )
            },
        )
        x, _ = tokens(0)
        expected = model(x)
        stages = {
            **split(model, plan, BLOCKS, rank=0),
            **split(model, plan, BLOCKS, rank=1),
        }
        for stage in sorted(stages):
            x = stages[stage](x)
        found[name] = torch.equal(x, expected)
    return found


def test_the_models_that_the_page_names_are_cut_as_they_are(run_ranks: Run) -> None:
    (found,) = run_ranks(families, 1).results()
    assert set(found.values()) == {True}
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert [name for name in found if name not in page] == []


def page(folder: Path) -> bool:
    """The program of docs/models.md as it stands there: whether its step is that of one process, to
    the bit.
    """
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    os.chdir(folder)
    whole = llama()
    (inputs, targets) = tokens(0)
    if dist.get_rank() == 0:
        whole.save_pretrained("llama")
    dist.barrier()
    given = {
        "plan": program("zb_v", ranks=2, microbatches=8),
        "config": whole.config,
        "rows": ROWS,
        "loss_fn": loss_of,
        "inputs": inputs,
        "targets": targets,
        "torch": torch,
        "AdamW": AdamW,
        "LlamaForCausalLM": LlamaForCausalLM,
        "LlamaRotaryEmbedding": LlamaRotaryEmbedding,
    }
    exec(
        re.search(r"^```python[^\n]*given=llama\n(.*?)^```", text, re.M | re.S)[1],
        given,
    )
    alone(whole, loss_of, inputs, targets)
    AdamW(whole.parameters()).step()
    trained = llama()
    load_model("trained", {0: trained})
    same = zip(trained.parameters(), whole.parameters(), strict=True)
    return all(torch.equal(*each) for each in same)


def test_the_program_of_the_page_works(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(page, 2, tmp_path).results() == [True, True]


def tied_llamas(folder: Path) -> dict[str, float]:
    """One matrix for input and output: two steps under one plan after the other, from the files of
    the one before.
    """
    begin = folder / "begin"
    save_llama(begin, tied=True)
    whole = llama(tied=True)
    found = {}
    optimizer = OPTIMIZERS["adamw"](list(whole.parameters()))
    for step, name in enumerate(["zb_v", "dualpipe", "1f1b"]):
        stages = split(
            empty_llama(tied=True),
            plan := program(name, ranks=4, microbatches=8),
            BLOCKS,
        )
        load_model(begin, stages)
        optimizers = [
            OPTIMIZERS["adamw"](list(stage.parameters())) for stage in stages.values()
        ]
        if step:
            load_optimizers(begin, stages, optimizers)
        ours = Pipeline(plan, stages, loss_of)
        ours.step(*tokens(step))
        alone(whole, loss_of, *tokens(step))
        found[name] = max(difference(*each) for each in gradients(stages, whole))
        for each in (optimizer, *optimizers):
            each.step()
            each.zero_grad()
        begin = folder / name
        ours.save_model(begin, step + 1, optimizers)
    # The whole of it has one weight by two names again.
    load_model(begin, {0: (loaded := empty_llama(tied=True))})
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    found["end"] = max(
        difference(*each)
        for each in zip(loaded.parameters(), whole.parameters(), strict=True)
    )
    return found


def test_tied_weights_are_found_and_stay_tied(run_ranks: Run, tmp_path: Path) -> None:
    """Wherever their stages are; also from a file in which they have one name."""
    for found in run_ranks(tied_llamas, 4, tmp_path).results():
        assert list(found) == ["zb_v", "dualpipe", "1f1b", "end"]
        # AdamW divides by gradients, of which some are little more than rounding.
        assert found.pop("end") < 1e-2
        assert max(found.values()) < 1e-5


def trained(plan: Plan, begin: Path, steps: range, end: Path) -> list[float]:
    """Train a Llama with AdamW from one folder to another: the losses, on the rank of the last
    stage.
    """
    stages = split(empty_llama(), plan, BLOCKS)
    assert load_model(begin, stages) == steps.start
    optimizers = [
        OPTIMIZERS["adamw"](list(stage.parameters())) for stage in stages.values()
    ]
    if steps.start:
        load_optimizers(begin, stages, optimizers)
    ours = Pipeline(plan, stages, loss_of)
    found = []
    for step in steps:
        losses = ours.step(*tokens(step))
        found += [] if losses is None else [float(losses.mean())]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours.save_model(end, steps.stop, optimizers)
    return found


def first_half(folder: Path) -> list[float]:
    """Under ZB-V on 4 ranks."""
    begin = folder / "begin"
    save_llama(begin)
    return trained(
        program("zb_v", ranks=4, microbatches=8), begin, range(10), folder / "half"
    )


def second_half(folder: Path) -> tuple[list[float], list[float], bool]:
    """Under 1F1B on 2 ranks; then all of it in one process: losses, and whether the weights in the
    end are the same.
    """
    found = trained(
        program("1f1b", ranks=2, microbatches=8),
        folder / "half",
        range(10, STEPS),
        folder / "end",
    )
    whole = llama()
    losses = []
    optimizer = OPTIMIZERS["adamw"](list(whole.parameters()))
    for step in range(STEPS):
        losses.append(float(alone(whole, loss_of, *tokens(step)).mean()))
        optimizer.step()
        optimizer.zero_grad()
    whole.config.save_pretrained(folder / "end")
    ends = dict(Llama.from_pretrained(folder / "end").named_parameters())
    same = all(
        torch.equal(ends[name], weight) for name, weight in whole.named_parameters()
    )
    return found, losses, same


def test_a_run_goes_on_under_another_schedule_and_number_of_ranks(
    run_ranks: Run, tmp_path: Path
) -> None:
    """20 steps with AdamW, to the bit: losses, and the weights as `from_pretrained` reads them in
    the end.
    """
    (first,) = filter(None, run_ranks(first_half, 4, tmp_path).results())
    ours, others = run_ranks(second_half, 2, tmp_path).results()
    losses, expected, same = others
    assert first + losses == expected
    assert len(expected) == 20
    # It learns, so that being the same to the bit says something.
    assert expected[-1] < expected[0] - 0.1
    assert same
    assert ours[0] == []


#: Eight layers in four or eight stages, in each notation; some have no blocks, some no layers.
LAYOUTS: dict[str, StageLayout] = {
    "1f1b": "E|t*3||t*5L",
    "interleaved_1f1b": EvenLayers(first_stage_less=1, last_stage_less=1),
    "zb_v": [
        ["model.embed_tokens", "model.layers.0"],
        ["model.layers.1", "model.layers.2"],
        [],
        [],
        [f"model.layers.{layer}" for layer in (3, 4, 5)],
        ["model.layers.6", "model.layers.7"],
        ["model.norm"],
        ["lm_head"],
    ],
    "dualpipe": "E|t*8||L",
}


def llamas_by_layout(folder: Path) -> dict[str, float]:
    """A step and an update from the same files: how far gradients, and weights that were saved, are
    from those of one process.
    """
    save_llama(folder / "begin")
    whole = llama()
    optimizer = OPTIMIZERS["momentum"](list(whole.parameters()))
    alone(whole, loss_of, *tokens(0))
    found = {}
    for name, layout in LAYOUTS.items():
        plan = program(name, ranks=4, microbatches=8)
        stages = split(empty_llama(), plan, BLOCKS, layout=layout)
        load_model(folder / "begin", stages)
        pipeline = Pipeline(plan, stages, loss_of, audit=name == "zb_v")
        pipeline.step(*tokens(0))
        found[name] = max(
            [0.0, *(difference(*each) for each in gradients(stages, whole))]
        )
        all_weights = [list(stage.parameters()) for stage in stages.values()]
        optimizers = [
            OPTIMIZERS["momentum"](weights) for weights in all_weights if weights
        ]
        for each in optimizers:
            each.step()
        pipeline.save_model(folder / name, 1, optimizers)
        load_optimizers(folder / name, stages, optimizers)
    optimizer.step()
    for name in LAYOUTS:
        load_model(folder / name, {0: (trained := empty_llama())})
        pairs = zip(trained.parameters(), whole.parameters(), strict=True)
        found[f"{name}, saved"] = max(difference(*each) for each in pairs)
    return found


def test_layouts_of_other_trainers(run_ranks: Run, tmp_path: Path) -> None:
    """Also ranks that have no weights at all train, save and load."""
    for found in run_ranks(llamas_by_layout, 4, tmp_path).results():
        assert len(found) == 2 * len(LAYOUTS)
        assert max(found.values()) < 1e-6, found


class Adapter(nn.Module):
    """A linear layer that is frozen, and a product of two narrow ones beside it that is trained
    (LoRA; Hu et al. 2021, arXiv 2106.09685).
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted_llama() -> Llama:
    """A frozen Llama with adapters in its fourth to sixth layers."""
    model = llama().requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers[3:6]:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    return model


def trained_of(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    weights = (weight for stage in stages.values() for weight in stage.parameters())
    return [weight for weight in weights if weight.requires_grad]


def adapters(folder: Path) -> list[float]:
    """Ten steps, saved and resumed under another schedule after five: how far the losses and the
    adapters are from those of one process.
    """
    whole = adapted_llama()
    optimizer = OPTIMIZERS["adamw"](trained_of({0: whole}))
    worst = [0.0]
    # The fourth to sixth layers are in one stage, or in the last two.
    layers = [f"model.layers.{number}" for number in range(8)]
    ends = ["model.norm", "lm_head"]
    layouts = {
        "1f1b": [
            ["model.embed_tokens", *layers[:2]],
            layers[2:4],
            layers[4:6],
            [*layers[6:], *ends],
        ],
        "zb_h1": [
            ["model.embed_tokens"],
            layers[:3],
            layers[3:5],
            [*layers[5:], *ends],
        ],
    }
    frozen = {"1f1b": "frozen 0 .. 1  frozen 3 .. 4", "zb_h1": "frozen 0 .. 2"}
    begin = 0
    for name, layout in layouts.items():
        plan = program_with(name, frozen[name])
        stages = split(adapted_llama(), plan, BLOCKS, layout=layout)
        weights = trained_of(stages)
        optimizers = [OPTIMIZERS["adamw"](weights)] if weights else []
        if begin:
            assert load_model(folder / "half", stages) == begin
            load_optimizers(folder / "half", stages, optimizers)
        ours = Pipeline(plan, stages, loss_of)
        for step in range(begin, begin + STEPS // 4):
            losses = ours.step(*tokens(step))
            expected = alone(whole, loss_of, *tokens(step))
            if losses is not None:
                worst.append(difference(losses, expected))
            for each in (optimizer, *optimizers):
                each.step()
                each.zero_grad()
        begin = step + 1
        ours.save_model(folder / "half", begin, optimizers)
    loaded = adapted_llama()
    load_model(folder / "half", {0: loaded})
    pairs = zip(loaded.parameters(), whole.parameters(), strict=True)
    return [*worst, max(difference(*each) for each in pairs)]


def test_a_frozen_llama_with_adapters(run_ranks: Run, tmp_path: Path) -> None:
    for found in run_ranks(adapters, 4, tmp_path).results():
        assert max(found) < 1e-4
    assert len(found) == 2 + STEPS // 2
