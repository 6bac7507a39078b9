"""Models of transformers with tiny configs: all causal language models, and some models with an
encoder and a decoder, or with towers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from attrs import frozen
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
#: Rows of a microbatch, and tokens of a row.
ROWS = 2
LENGTH = 8

#: Sizes by the names that configs have for them. A config is given those that it has.
SIZES: Mapping[str, Any] = {
    # tokens
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    # widths
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "emb_dim", "lru_width"], 32),
    **dict.fromkeys(["embedding_size", "out_hidden_size", "projection_dim"], 32),
    **dict.fromkeys(["intermediate_size", "d_ff", "n_inner", "ffn_dim"], 64),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"], 64),
    "hidden_size_per_layer_input": 8,
    # layers
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers"], 4),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_decoder_layers"], 4),
    "num_kv_shared_layers": 0,
    # attention
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(["head_dim", "global_head_dim", "d_kv", "v_head_dim"], 8),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"], 8),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["sliding_window", "attention_window_size", "attention_window"], 8),
    "rotary_dim": 4,
    "index_n_heads": 2,
    "index_topk": 4,
    "block_size": 4,
    # positions
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 32),
    **dict.fromkeys(["max_source_positions", "max_target_positions"], 32),
    # experts
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    "moe_num_experts": 4,
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts"], 1),
    "first_k_dense_replace": 1,
    # state spaces and linear attention
    **dict.fromkeys(["state_size", "mamba_d_state", "chunk_size"], 8),
    **dict.fromkeys(["mamba_chunk_size", "mamba_n_heads", "mamba_d_head"], 8),
    **dict.fromkeys(["conv_kernel", "mamba_d_conv"], 4),
    **dict.fromkeys(["time_step_rank", "mamba_dt_rank"], 4),
    **dict.fromkeys(["expand", "mamba_expand", "linear_num_key_heads"], 2),
    "mamba_n_groups": 1,
    "linear_num_value_heads": 4,
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    # images and sounds
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "num_mel_bins": 8,
    "depths": [1],
    "window_size": 4,
    # BERT and its kin are language models as decoders only.
    "is_decoder": True,
}

#: What the configs of some models have to have, or of whole families of them.
OWN: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "local", "local", "local"],
        "local_attn_chunk_length": 4,
    },
    "xmod": {"default_language": "en_XX"},
}


def tiny(config_class: type[PretrainedConfig], **own: Any) -> PretrainedConfig:
    """A config of a class with tiny sizes, without dropout; nested ones are tiny, too."""
    try:
        usual = vars(config_class())
    except Exception:
        # A class that has no config without arguments is given all sizes.
        usual = dict.fromkeys(SIZES)
    aliases = config_class.attribute_map or {}
    given = {
        name: size
        for name, size in SIZES.items()
        if (name in usual or name in aliases) and _may_be_set(config_class, name)
    }
    for alias, name in aliases.items():
        if name in given and name != alias:
            given.pop(alias, None)
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    given |= {
        name: 0.0
        for name, value in usual.items()
        if "drop" in name and isinstance(value, float)
    }
    kinds = usual.get("layer_types")
    if isinstance(kinds, list) and _may_be_set(config_class, "layer_types"):
        given["layer_types"] = ([*dict.fromkeys(kinds)] * 4)[:4]
    for name, nested in (config_class.sub_configs or {}).items():
        kind = type(usual.get(name)) if nested.__name__ == "AutoConfig" else nested
        if issubclass(kind, PretrainedConfig):
            given[name] = tiny(kind).to_dict()
    return config_class(**(given | own))


def _may_be_set(config_class: type[PretrainedConfig], name: str) -> bool:
    attribute = getattr(config_class, name, None)
    return not isinstance(attribute, property) or attribute.fset is not None


#: All causal language models that transformers has.
LANGUAGE_MODELS = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


@frozen
class Tower:
    """A model with an encoder and a decoder, or with towers: its class, what its config has to
    have, and its inputs, for so many rows.
    """

    model: str
    inputs: Callable[[int], dict[str, Tensor]]
    own: Mapping[str, Any] = {}


def _tokens(rows: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY - 4, (rows, length), generator=generator)


def _texts(rows: int) -> dict[str, Tensor]:
    """A text, of which some rows are padded, and its translation."""
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    mask[1::3, LENGTH - 3 :] = 0
    return {
        "input_ids": _tokens(rows),
        "attention_mask": mask,
        "decoder_input_ids": _tokens(rows, 6),
    }


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _sounds(rows: int) -> dict[str, Tensor]:
    features = _numbers(rows, SIZES["num_mel_bins"], 16)
    return {"input_features": features, "decoder_input_ids": _tokens(rows, 6)}


def _images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": _numbers(rows, 3, 8, 8)}


def _pairs(rows: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(rows)} | _images(rows)


def _words(rows: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(rows)}


TOWERS: Mapping[str, Tower] = {
    name: Tower(f"{name}ForConditionalGeneration", _texts, {"is_decoder": False})
    for name in ["T5", "MT5", "Bart", "MBart", "Pegasus", "M2M100", "Blenderbot"]
} | {
    "Marian": Tower("MarianMTModel", _texts, {"is_decoder": False}),
    "LED": Tower(
        "LEDForConditionalGeneration",
        _texts,
        {"is_decoder": False, "attention_window": [8] * 4},
    ),
    "Whisper": Tower(
        "WhisperForConditionalGeneration",
        _sounds,
        {"is_decoder": False, "max_source_positions": 8},
    ),
    "CLIP": Tower("CLIPModel", _pairs),
    "SigLIP": Tower("SiglipModel", _pairs),
    "ViT": Tower("ViTForImageClassification", _images),
    "ALBERT": Tower("AlbertForMaskedLM", _words),
    "BERT": Tower("BertForMaskedLM", _words, {"is_decoder": False}),
    "DeBERTa-v2": Tower("DebertaV2ForMaskedLM", _words),
}


def build(name: str) -> nn.Module:
    """A model, the same in every process, in training mode."""
    torch.manual_seed(0)
    if name in TOWERS:
        kind = getattr(transformers, TOWERS[name].model)
        model = kind(tiny(kind.config_class, **TOWERS[name].own))
    else:
        config = tiny(CONFIG_MAPPING[name], **OWN.get(name, {}))
        model = AutoModelForCausalLM.from_config(config)
    # A forward returns what it computes, and no keys and values.
    model.config.use_cache = False
    trained: nn.Module = model.train()
    return trained


def inputs_of(name: str, rows: int) -> Any:
    """A batch of a model: tokens, or keyword arguments."""
    return TOWERS[name].inputs(rows) if name in TOWERS else _tokens(rows)
