"""Configurations of models: as many parameters as transformers' own models have, or a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from schedlang.cli.main import main
from schedlang.extras.search.tune.config import _GATED, _NOT_GATED, transformer_of
from tests.support.sizes import sizes

#: Norms and biases are counted as two norms a layer.
TOLERANCE = 1e-3
#: Those that are not in transformers, or are there as a part of another model.
ELSEWHERE = {
    *("baichuan", "internlm", "internlm2", "qwen"),
    *("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
}
#: Sizes that a real model has, as its configuration calls them.
USUAL = {"num_hidden_layers": 4}
SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 1024, "n_head": 16, "n_layer": 4},
    "gpt2": {"n_layer": 4, "n_embd": 1024, "n_head": 16},
    "gpt_bigcode": {"n_layer": 4, "n_embd": 1024, "n_head": 16},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gptj": {"n_layer": 4},
    "codegen": {"n_layer": 4},
    "hunyuan_v1_dense": USUAL | {"head_dim": 128},
    "ministral": USUAL | {"head_dim": 128},
    "nemotron": USUAL | {"num_key_value_heads": 8},
    "opt": USUAL
    | {"hidden_size": 1024, "word_embed_proj_dim": 1024, "num_attention_heads": 16},
}
FAMILIES = sorted({*_GATED, *_NOT_GATED} - ELSEWHERE)
#: One of each way to be counted.
FEW = {"llama", "gpt2", "falcon", "gpt_bigcode", "gemma2", "starcoder2"}


def parameters(config: Any) -> int:
    with torch.device("meta"):
        of_config: Any = AutoModelForCausalLM.from_config
        model = of_config(config)
    return sum(weights.numel() for weights in model.parameters())


@pytest.mark.parametrize("family", sizes(FAMILIES, lambda family: family not in FEW))
def test_parameters_are_those_of_transformers(family: str) -> None:
    chosen = SIZES.get(family, USUAL)
    config = CONFIG_MAPPING[family](**chosen)
    expected = pytest.approx(parameters(config), rel=TOLERANCE)
    written = config.to_dict()
    assert transformer_of(written).parameters == expected
    # A decoder that is a part of a model is written without what is the default of its family.
    defaults = CONFIG_MAPPING[family]().to_dict()
    sized = {
        *("hidden_size", "n_embd", "num_layers", "num_hidden_layers", "n_layer"),
        *("num_attention_heads", "n_head", "num_heads", "intermediate_size"),
        *("ffn_dim", "vocab_size", "max_position_embeddings", "n_positions"),
        "model_type",
    }
    short = {
        key: value
        for key, value in written.items()
        if key in sized or value != defaults[key]
    }
    assert transformer_of(short).parameters == expected
    text = {"text_config": short, "model_type": "of_several"}
    assert transformer_of(text).parameters == expected


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 8, "head_dim": 64}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8, "hidden_size": 4096, "num_attention_heads": 64}),
        ("falcon", {"multi_query": False, "hidden_size": 4096, "num_attention_heads": 64}),
        ("gpt_bigcode", {"multi_query": False, "n_embd": 1024, "n_head": 16}),
        ("qwen2", {"tie_word_embeddings": True, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 2}),
        ("gemma2", {"hidden_act": "gelu", "num_key_value_heads": 8}),
    ],
)  # fmt: skip
def test_keys_that_decide_are_read(family: str, more: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[family](**more | {"num_hidden_layers": 3})
    expected = pytest.approx(parameters(config), rel=TOLERANCE)
    assert transformer_of(config.to_dict()).parameters == expected


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}


def test_what_has_no_key_of_its_own_is_known_of_the_family() -> None:
    """The first Qwen's MLP is gated, and its two halves are counted together."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
    qwen = sizes | {"intermediate_size": 22016, "vocab_size": 151936}
    for name in ({"model_type": "qwen"}, {"architectures": ["QWenLMHeadModel"]}):
        model = transformer_of(qwen | name)
        assert model.gated
        # It is told as a model of 7,721,324,544 parameters.
        assert model.parameters == pytest.approx(7_721_324_544, rel=1e-3)


def test_arguments_of_megatron_are_read() -> None:
    """They are those of Llama 3, 8 B; a file of all arguments has also what is not used."""
    arguments: dict[str, Any] = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "padded_vocab_size": 128256,
        "swiglu": True,
    }
    assert transformer_of(arguments).parameters == 8_030_261_248
    every = {
        "group_query_attention": True,
        "vocab_size": 128000,
        "multi_latent_attention": False,
        "kv_lora_rank": 32,
        "mamba_head_dim": 64,
        "num_experts": None,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
    }
    assert transformer_of(arguments | every).parameters == 8_030_261_248
    ungrouped = arguments | {"group_query_attention": False, "num_query_groups": 1}
    assert transformer_of(ungrouped).kv_heads == 32
    latent = every | {"multi_latent_attention": True}
    with pytest.raises(ValueError, match="multi_latent_attention"):
        transformer_of(arguments | latent)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"block_configs": [{"ffn": {"no_op": True}}] * 4}, "block_configs"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, "layer_types"),
        ({"layer_widths": [1, 2, 1, 2]}, "layer_widths"),
        ({"num_key_value_heads": [1, 2, 1, 2]}, "num_key_value_heads"),
        ({"kv_lora_rank": 512, "q_lora_rank": None}, "kv_lora_rank"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"moe_num_experts": 8}, "moe_num_experts"),
        ({"vision_config": {"depth": 32, "hidden_size": 1280}}, "vision_config"),
        ({"audio_config": {"num_hidden_layers": 32}}, "audio_config"),
        ({"vision_config": {"projection_dim": 2048}}, "vision_config"),
        ({"tower": {"model_type": "siglip_vision_model"}}, "tower"),
        ({"ffn_config": {"moe_num_experts": 16}}, "moe_num_experts"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"model_type": "t5"}, "`model_type` is `t5`"),
        ({"model_type": None, "architectures": ["BertModel"]}, "Bert"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_by_the_key_that_says_so(
    more: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | more))
    command = ["tune", "1f1b", "--model", str(path), "--device", "H100"]
    assert main([*command, "--sequence", "512", "--ranks", "2", "--batch", "2"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        {"num_local_experts": 0, "num_kv_shared_layers": 0, "kv_lora_rank": None},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"no_rope_layers": [1, 0, 1, 0], "is_encoder_decoder": False},
        {"rope_scaling": {"factor": 8.0}, "quantization_config": {"bits": 4}},
        {"architectures": ["LlamaForCausalLM"], "model_type": None},
    ],
)
def test_keys_that_say_nothing_of_layers_change_nothing(more: dict[str, Any]) -> None:
    assert transformer_of(LLAMA | more) == transformer_of(LLAMA)


def test_a_decoder_in_a_part_of_a_configuration() -> None:
    nested = {"model_type": "some_model", "text_config": LLAMA}
    assert transformer_of(nested) == transformer_of(LLAMA)
    beside = nested | {"vision_config": {"depth": 32, "hidden_size": 1280}}
    with pytest.raises(ValueError, match="its decoder is in `text_config`, beside"):
        transformer_of(beside)
    experts = beside | {"text_config": LLAMA | {"num_local_experts": 16}}
    with pytest.raises(ValueError, match="`num_local_experts` in `text_config`"):
        transformer_of(experts)
    # What is in there is of a family, which only the whole names.
    nameless = {key: value for key, value in LLAMA.items() if key != "model_type"}
    with pytest.raises(ValueError, match="some_model_text"):
        transformer_of(nested | {"text_config": nameless})


def test_tune_says_how_many_parameters_it_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    command = ["tune", "1f1b", "--model", str(path), "--device", "H100"]
    command += ["--sequence", "512", "--ranks", "2", "--batch", "2", "-p", "ranks=2"]
    counted = transformer_of(LLAMA).parameters
    path.write_text(json.dumps(LLAMA))
    assert main(command) == 0
    assert f"{counted / 1e6:.1f} M parameters" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == counted
    # Also where nothing fits: a miscount would be the cause.
    assert main([*command, "--memory", "500MB"]) != 0
    assert f"{counted / 1e6:.1f} M parameters" in capsys.readouterr().out
    path.write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
    assert main(command) == 0
    assert "the first and the last stage" in capsys.readouterr().out
