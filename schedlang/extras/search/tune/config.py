"""The shapes of a transformer from its configuration, as transformers or Megatron writes it.

A decoder is counted whose layers are alike: attention with a key-value head for each head or for a
group of them, and an MLP, gated or not. What else a key says is refused by that key, and so is a
`model_type` whose layers are not known here: a count of other layers would look like any other.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.extras.search.tune.transformer import Transformer

#: What keys are called elsewhere: in older models, and among Megatron's arguments.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "num_query_groups"),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
}
_TIED = {"tie_word_embeddings": True}
#: The families whose MLP is gated, and what transformers takes for keys that are absent, where that
#: is neither a key-value head for each head, nor the hidden size over the heads, nor an own head.
_GATED: dict[str, dict[str, Any]] = {
    "baichuan": {},
    "bitnet": {"num_key_value_heads": 5},
    "cohere": _TIED,
    "cohere2": _TIED,
    "cwm": {"num_key_value_heads": 8, "head_dim": 128},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128, **_TIED},
    "exaone4": {"num_key_value_heads": 32},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, **_TIED},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, **_TIED},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, **_TIED},
    "glm": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "granite": {},
    "helium": {"num_key_value_heads": 20, "head_dim": 128},
    "hunyuan_v1_dense": {},
    "internlm": {},
    "internlm2": {},
    "llama": {},
    "ministral": {"num_key_value_heads": 8},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
    "mistral": {"num_key_value_heads": 8},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "qwen": {},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_5_vl": {"num_key_value_heads": 8},
    "qwen2_5_vl_text": {"num_key_value_heads": 8},
    "qwen2_vl": {"num_key_value_heads": 8},
    "qwen2_vl_text": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, **_TIED},
    "stablelm": {"num_key_value_heads": 32},
}
#: The families whose MLP is not gated, with the same.
_NOT_GATED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bloom": _TIED,
    "codegen": {},
    "falcon": {"multi_query": True, **_TIED},
    "gpt2": _TIED,
    "gpt_bigcode": {"multi_query": True, **_TIED},
    "gpt_neo": _TIED,
    "gpt_neox": {},
    "gptj": {},
    "nemotron": {},
    "opt": _TIED,
    "persimmon": {},
    "phi": {},
    "starcoder2": {"num_key_value_heads": 2, **_TIED},
}
#: The families that learn an embedding of each position, and the rows of it beside these.
_POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "gpt_neo": 0, "opt": 2}

#: Keys that say that the model is of another kind, and what they say.
_OTHER_KINDS = {
    r"(num|n|moe_num)_(\w+_)?experts(_per_tok)?|moe_intermediate_size": (
        "it is a mixture of experts"
    ),
    "is_encoder_decoder|add_cross_attention": "its decoder is for the output of an encoder",
    r"(q|kv)_lora_rank|multi_latent_attention": "its attention is latent",
    r"block_configs|block_types|hybrid_\w*pattern|is_hybrid_model|layers?_block_types?|"
    r"attn_layer_\w+|full_attn_idxs|cross_attention_layers|\w+_per_layer|"
    r"num_global_key_value_heads|global_head_dim": "its layers are of several kinds",
    r"num_kv_shared_layers|num_hidden_groups|use_cla|cla_share_factor|total_ut_steps": (
        "layers share weights"
    ),
    r"(mamba|ssm|linear|rwkv|lru)_\w+|state_size": "some layers are no attention",
    r"num_nextn_predict_layers|mtp_num_layers|altup_\w+|laurel_rank|attn_output_gate|"
    r"use_double_wide_mlp|hidden_size_per_layer_input": "it has more than its layers",
}
#: Keys that Megatron's arguments have for any model, as they have `multi_latent_attention`.
_OF_ANY = r"(q|kv)_lora_rank|(mamba|linear)_\w+"
#: What an entry of `layer_types` may say: of which tokens a layer sees, and not of its weights.
_LAYER_TYPE = re.compile(r"(full|sliding|chunked|global|local)(_attention)?")
#: What may differ from layer to layer without a difference in weights.
_ATTENTION_OF_LAYERS = {"layer_types", "no_rope_layers", "attention_layers"}
#: What a part of a model for other inputs is called.
_PART = re.compile(r"(vision|visual|image|video|audio|speech|encoder)")
#: What calls the decoder in a configuration of several models.
_DECODERS = ("text_config", "llm_config", "language_config")


def read_transformer(path: str | Path) -> Transformer:
    """The transformer of a configuration, config.json; CompileError says what is wrong with it."""
    from schedlang.files.documents import read_document

    try:
        return transformer_of(read_document(path))
    except ValueError as error:
        message = f"the model in `{path}`: {error}"
        help = "or give what its layers were measured to take: --costs FILE"
        raise CompileError(
            [Diagnostic("costs", message, help=help, file=str(path))]
        ) from None


def transformer_of(config: Any) -> Transformer:
    """The same from an object; ValueError says what is wrong."""
    if not isinstance(config, dict):
        raise ValueError('it must be an object, such as {"hidden_size": 4096, …}')
    config = _decoder(config)
    family = _family(config)
    config = (_GATED | _NOT_GATED).get(family, {}) | config
    hidden = _whole(config, "hidden_size")
    heads = _whole(config, "num_attention_heads")
    layers = _whole(config, "num_hidden_layers")
    _check_layers(config, layers)
    if config.get("word_embed_proj_dim") not in (None, hidden):
        raise ValueError(
            "`word_embed_proj_dim` is not its hidden size: this is not counted"
        )
    is_gated = family in _GATED or (family == "" and _says_gated(config))
    mlp = _whole(config, "intermediate_size", None if is_gated else 4 * hidden)
    dropouts = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop")
    learns = config.get("position_embedding_type") == "learned_absolute"
    positions = 0
    if learns or family in _POSITIONS:
        most = _whole(config, "max_position_embeddings")
        positions = most + _POSITIONS.get(family, 0)
    # Megatron says the opposite.
    is_tied = config.get("untie_embeddings_and_output_weights") is False
    return Transformer(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_size=_whole(config, "head_dim", hidden // heads),
        # The first Qwen counts the two halves of a gated one together.
        mlp=mlp // 2 if family == "qwen" else mlp,
        gated=is_gated,
        vocabulary=_whole(
            config,
            "vocab_size"
            if config.get("padded_vocab_size") is None
            else "padded_vocab_size",
        ),
        dropout=any(config.get(name) for name in dropouts),
        positions=positions,
        tied=is_tied or bool(config.get("tie_word_embeddings")),
    )


def _decoder(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the decoder, which may be a part of the whole; ValueError for a model of
    another kind, or of several parts.
    """
    parts = {key: value for key, value in config.items() if _is_part(key, value)}
    decoder = next((key for key in _DECODERS if key in parts), None)
    _check_kind(config, "")
    for key, value in config.items():
        if isinstance(value, dict):
            _check_kind(value, f" in `{key}`")
    is_decoder = decoder is None or _is_model(config)
    others = [key for key in parts if is_decoder or key != decoder]
    if decoder is None or is_decoder:
        if others:
            raise ValueError(
                f"`{others[0]}` is a part of the model beside its decoder, and not counted: take "
                "it out of the file to count the decoder alone"
            )
        return config
    if others:
        raise ValueError(
            f"its decoder is in `{decoder}`, beside `{others[0]}`, which is not counted here: give "
            f"what stands in `{decoder}` as a file of its own to count the decoder alone"
        )
    # What is said of the whole is said of its one part, but for its family.
    outside = {key: value for key, value in config.items() if key not in parts}
    family = f"{config.get('model_type', '')}_text"
    whole: dict[str, Any] = outside | {"model_type": family} | parts[decoder]
    return whole


def _is_part(key: str, value: Any) -> bool:
    """Whether a value is the configuration of a part of a model, maybe without its sizes."""
    if not isinstance(value, dict) or not value:
        return False
    return _is_model(value) or "model_type" in value or bool(_PART.match(key))


def _is_model(value: Any) -> bool:
    """Whether a value is the configuration of a model, or of a part of one."""
    names = _OTHER_NAMES["hidden_size"], _OTHER_NAMES["num_hidden_layers"]
    sizes = {"hidden_size", "num_hidden_layers", "depth", *names[0], *names[1]}
    return isinstance(value, dict) and not sizes.isdisjoint(value)


def _check_kind(config: Mapping[str, Any], where: str) -> None:
    """ValueError for a key that says that a model is of another kind."""
    of_any = _OF_ANY if "multi_latent_attention" in config else ""
    for pattern, says in _OTHER_KINDS.items():
        for key, value in config.items():
            if (
                value
                and re.fullmatch(pattern, str(key))
                and not re.fullmatch(of_any, key)
            ):
                raise ValueError(
                    f"`{key}`{where} says that {says}: the costs of such a model are not known here"
                )


def _family(config: Mapping[str, Any]) -> str:
    """The family whose layers a model has, "" where nothing says it; ValueError for one that is not
    known here.
    """
    name = config.get("model_type")
    known = {**_GATED, **_NOT_GATED}
    if not name:
        architectures = config.get("architectures")
        if not (isinstance(architectures, list) and architectures):
            return ""
        name = re.sub(r"(ForCausalLM|LMHeadModel|Model)$", "", str(architectures[0]))
        spelt = {family.replace("_", ""): family for family in known}
        name = spelt.get(name.lower(), name)
    if name not in known:
        raise ValueError(
            f"`model_type` is `{name}`, and how its layers are built is not known here: where they "
            "are like those of another one, give that, such as `llama` (a gated MLP) or `gpt2`"
        )
    return str(name)


def _says_gated(config: Mapping[str, Any]) -> bool:
    """Whether a configuration without a family says that its MLP is gated."""
    activation = config.get("hidden_act") or config.get("activation_function") or ""
    is_of_glu = str(activation).endswith("glu")
    return is_of_glu or activation in ("silu", "swish") or bool(config.get("swiglu"))


def _check_layers(config: Mapping[str, Any], layers: int) -> None:
    """ValueError for a key that says that the layers differ in what they have."""
    for key, value in config.items():
        if not isinstance(value, list):
            continue
        kinds = sorted(set(map(str, value)))
        if key == "layer_types":
            kinds = [kind for kind in kinds if not _LAYER_TYPE.fullmatch(kind)]
        elif key in _ATTENTION_OF_LAYERS or len(value) != layers or len(kinds) < 2:
            kinds = []
        if kinds:
            raise ValueError(
                f"`{key}` says that its layers differ, such as by `{kinds[0]}`: the costs of such "
                "a model are not known here"
            )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """How many heads keys and values have."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    # Megatron has a number of groups also where it has no groups.
    if config.get("group_query_attention") is False:
        return heads
    return _whole(config, "num_key_value_heads", heads)


def _names(key: str) -> Iterator[str]:
    yield key
    yield from _OTHER_NAMES.get(key, ())


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of the configuration, from 1."""
    given = [name for name in _names(key) if config.get(name) is not None]
    if not given:
        if default is None:
            raise ValueError(f"it has no `{key}`")
        return default
    value = config[given[0]]
    # Not `isinstance`: for Python, true is a whole number.
    if type(value) is not int or value < 1:
        raise ValueError(f"`{given[0]}` is {value!r}, it must be a whole number from 1")
    return value
