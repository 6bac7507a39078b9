"""Models of transformers with tiny configs: all causal language models, and some models with an
encoder and a decoder, or with towers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from attrs import frozen
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from schedlang.runtime.model.split import found_blocks

VOCABULARY = 64
#: The token that stands for a patch of an image.
IMAGE = 60
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
    """A model with an encoder and a decoder, or with towers: its class, a microbatch of its inputs
    by number, and what its config has to have.
    """

    model: str
    inputs: Callable[[int], dict[str, Tensor]]
    own: Mapping[str, Any] = {}


def _tokens(number: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * length + number)
    return torch.randint(3, VOCABULARY - 4, (ROWS, length), generator=generator)


def _texts(number: int) -> dict[str, Tensor]:
    """A text, of which a row is padded in most microbatches, and its translation."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    if number != 1:
        mask[1, LENGTH - 3 :] = 0
    return {
        "input_ids": _tokens(number),
        "attention_mask": mask,
        "decoder_input_ids": _tokens(number, 6),
    }


def _numbers(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _sounds(number: int) -> dict[str, Tensor]:
    features = _numbers(number, ROWS, SIZES["num_mel_bins"], 16)
    return {"input_features": features, "decoder_input_ids": _tokens(number, 6)}


def _images(number: int) -> dict[str, Tensor]:
    return {"pixel_values": _numbers(number, ROWS, 3, 8, 8)}


def _pairs(number: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(number)} | _images(number)


def _words(number: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(number)}


def _around_images(number: int) -> dict[str, Tensor]:
    """Tokens, of which four stand for the four patches of an image."""
    tokens = _tokens(number)
    tokens[:, 1:5] = IMAGE
    return {"input_ids": tokens} | _images(number)


def _around_grids(number: int) -> dict[str, Tensor]:
    """Tokens, of which four stand for an image of 4 x 4 patches; every second one is left out of
    the other microbatches, which have more text in its place.
    """
    tokens = _tokens(number)
    tokens[:, 1 + number % 2 : 5 + number % 2] = IMAGE
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": _numbers(number, ROWS * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
    }


#: Configs of language models with images of 8 x 8 pixels in four patches.
AROUND_IMAGES = {"image_token_id": IMAGE, "image_token_index": IMAGE}
OF_QWEN = {
    "image_token_id": IMAGE,
    "vision_config": {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "text_config": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    },
}

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
    "LLaVA": Tower("LlavaForConditionalGeneration", _around_images, AROUND_IMAGES),
    "Gemma-3": Tower(
        "Gemma3ForConditionalGeneration",
        _around_images,
        AROUND_IMAGES | {"mm_tokens_per_image": 4},
    ),
    "BLIP": Tower("BlipForConditionalGeneration", _pairs, AROUND_IMAGES),
    "Qwen2-VL": Tower("Qwen2VLForConditionalGeneration", _around_grids, OF_QWEN),
    "Qwen2.5-VL": Tower("Qwen2_5_VLForConditionalGeneration", _around_grids, OF_QWEN),
}


def _seed(number: int, *_: Any) -> None:
    torch.default_generator.manual_seed(number)


def build(name: str) -> nn.Module:
    """A model, the same in every process, in training mode.

    Each block begins with random numbers of its own, so that routers which draw (Phi-3.5-MoE) draw
    the same numbers in a pipeline, where each rank has a generator, as in one process.
    """
    torch.manual_seed(0)
    if name in TOWERS:
        kind = getattr(transformers, TOWERS[name].model)
        model = kind(tiny(kind.config_class, **TOWERS[name].own))
    else:
        config = tiny(CONFIG_MAPPING[name], **OWN.get(name, {}))
        model = AutoModelForCausalLM.from_config(config)
    # A forward returns what it computes, and no keys and values.
    model.config.use_cache = False
    for number, block in enumerate(found_blocks(model)):
        model.get_submodule(block).register_forward_pre_hook(partial(_seed, number))
    trained: nn.Module = model.train()
    return trained


def microbatch_of(name: str, number: int) -> Any:
    """A microbatch of a model: tokens, or keyword arguments."""
    return TOWERS[name].inputs(number) if name in TOWERS else _tokens(number)
