"""Configurations of models: as many parameters as transformers' own models have, or a refusal."""

import json
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from schedlang.cli.main import main
from schedlang.extras.search.tune.decoder_config import decoder_of
from schedlang.extras.search.tune.families import FAMILIES as ROWS
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
    "bamba": USUAL | {"attn_layer_indices": [2]},
    "deepseek_v2": USUAL
    | {
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
    },
    "deepseek_v3": {"num_hidden_layers": 5},
    "dots1": USUAL
    | {
        "n_shared_experts": 2,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "falcon_mamba": USUAL | {"hidden_size": 4096, "time_step_rank": 256},
    "granitemoehybrid": USUAL
    | {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "granitemoeshared": USUAL | {"shared_intermediate_size": 512},
    "jamba": {"num_hidden_layers": 16},
    "llama4_text": USUAL | {"interleave_moe_layer_step": 2},
    "nemotron_h": {"hybrid_override_pattern": "M-M*E-"},
}
FAMILIES = sorted(ROWS.keys() - ELSEWHERE)
#: One of each way to be counted.
FEW = {
    *("llama", "gpt2", "falcon", "gpt_bigcode", "gemma2", "starcoder2"),
    *("deepseek_v3", "jamba", "nemotron_h", "qwen3_next"),
}


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
    assert decoder_of(written).parameters == expected
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
    # What is counted beside attention and MLP must be said: an absent key is no guess.
    with nullcontext() if not ROWS[family].has else suppress(ValueError):
        assert decoder_of(short).parameters == expected
        text = {"text_config": short, "model_type": "of_several"}
        assert decoder_of(text).parameters == expected


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
    assert decoder_of(config.to_dict()).parameters == expected


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}


#: Configurations of public models as their authors wrote them, without what is of no matter here,
#: and how many parameters they are told to have, and a token to use.
PUBLISHED: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "mixtral-8x7b": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000},
        46.70e9,
        12.88e9,
    ),
    "qwen3-30b-a3b": (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936},
        30.53e9,
        3.35e9,
    ),
    "qwen1.5-moe-a2.7b": (
        {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "vocab_size": 151936},
        14.32e9,
        2.69e9,
    ),
    "deepseek-v2-lite": (
        {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400},
        15.71e9,
        2.66e9,
    ),
    "deepseek-v3": (
        {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280},
        671.0e9,
        37.55e9,
    ),
    "minicpm3-4b": (
        {"model_type": "minicpm3", "hidden_size": 2560, "intermediate_size": 6400, "kv_lora_rank": 256, "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 73448},
        4.07e9,
        None,
    ),
    "jamba-v0.1": (
        {"model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_size": 4096, "intermediate_size": 14336, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 65536},
        51.57e9,
        12.1e9,
    ),
    "falcon-mamba-7b": (
        {"model_type": "falcon_mamba", "conv_kernel": 4, "expand": 16, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64, "state_size": 16, "tie_word_embeddings": False, "time_step_rank": 256, "vocab_size": 65024},
        7.27e9,
        None,
    ),
    "nemotron-h-8b": (
        {"model_type": "nemotron_h", "conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504, "mamba_head_dim": 64, "mamba_num_heads": 128, "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8, "ssm_state_size": 128, "vocab_size": 131072},
        8.10e9,
        None,
    ),
    "qwen3-next-80b-a3b": (
        {"model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [], "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "vocab_size": 151936},
        79.67e9,
        3.87e9,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "vocab_size": 201088},
        20.91e9,
        # 3.6 billion are told, without the embedding.
        3.61e9 + 201088 * 2880,
    ),
    "llama-4-scout": (
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "vocab_size": 202048}},
        107.8e9,
        17.2e9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_authors_tell(name: str) -> None:
    config, told, active = PUBLISHED[name]
    model = decoder_of(config)
    assert model.parameters == pytest.approx(told, rel=2e-3)
    assert model.active_parameters == pytest.approx(active or told, rel=1e-2)


def test_what_has_no_key_of_its_own_is_known_of_the_family() -> None:
    """The first Qwen's MLP is gated, and its two halves are counted together."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
    qwen = sizes | {"intermediate_size": 22016, "vocab_size": 151936}
    for name in ({"model_type": "qwen"}, {"architectures": ["QWenLMHeadModel"]}):
        model = decoder_of(qwen | name)
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
    assert decoder_of(arguments).parameters == 8_030_261_248
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
    assert decoder_of(arguments | every).parameters == 8_030_261_248
    ungrouped = arguments | {"group_query_attention": False, "num_query_groups": 1}
    assert decoder_of(ungrouped) == decoder_of(arguments | {"num_query_groups": 32})
    latent = every | {"multi_latent_attention": True}
    with pytest.raises(ValueError, match="it has no `qk_nope_head_dim`"):
        decoder_of(arguments | latent)
    heads = {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    # Per head, 192 numbers of a query; 256 of key and value from 32; 128 of the output.
    of_layer = 4096 * (32 * 192 + 32 + 64) + 32 * 32 * 256 + 32 * 128 * 4096 + 32
    grouped = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    expected = 8_030_261_248 + 32 * (of_layer - grouped)
    assert decoder_of(arguments | latent | heads).parameters == expected
    sparse = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 1024}
    model = decoder_of(arguments | every | sparse)
    assert model.experts == 8
    unused = 32 * 6 * 3 * 4096 * 1024
    assert model.parameters - model.active_parameters == unused


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"block_configs": [{"ffn": {"no_op": True}}] * 4}, "block_configs"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-MX", "state_size": 8}, "`X`"),
        ({"model_type": "qwen3_next", "layer_types": ["rwkv"] * 4}, "rwkv"),
        ({"model_type": "mixtral"}, "num_experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_experts_per_tok"),
        ({"model_type": "granitemoehybrid", "num_local_experts": 0}, "layer_types"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "kv_lora_rank"),
        ({"model_type": "mamba"}, "conv_kernel"),
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
    assert decoder_of(LLAMA | more) == decoder_of(LLAMA)


def test_a_decoder_in_a_part_of_a_configuration() -> None:
    nested = {"model_type": "some_model", "text_config": LLAMA}
    assert decoder_of(nested) == decoder_of(LLAMA)
    beside = nested | {"vision_config": {"depth": 32, "hidden_size": 1280}}
    with pytest.raises(ValueError, match="its decoder is in `text_config`, beside"):
        decoder_of(beside)
    experts = beside | {"text_config": LLAMA | {"num_local_experts": 16}}
    with pytest.raises(ValueError, match="`num_local_experts` in `text_config`"):
        decoder_of(experts)
    # What is in there is of a family, which only the whole names.
    nameless = {key: value for key, value in LLAMA.items() if key != "model_type"}
    with pytest.raises(ValueError, match="some_model_text"):
        decoder_of(nested | {"text_config": nameless})


def test_tune_says_how_many_parameters_it_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    command = ["tune", "1f1b", "--model", str(path), "--device", "H100"]
    command += ["--sequence", "512", "--ranks", "2", "--batch", "2", "-p", "ranks=2"]
    counted = decoder_of(LLAMA).parameters
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
