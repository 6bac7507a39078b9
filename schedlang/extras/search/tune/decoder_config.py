"""Read the shapes of a decoder from a configuration of transformers or Megatron.

The parts of each layer follow from the configuration's keys and from the row of its family. Keys
that describe anything else are refused by name, and so is a `model_type` without a row.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from attrs import evolve

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted
from schedlang.extras.search.tune import layer_parts
from schedlang.extras.search.tune.decoder_costs import Decoder, Layer
from schedlang.extras.search.tune.families import FAMILIES, OTHER_NAMES, Family
from schedlang.extras.search.tune.layer_parts import Part

#: The family of a file without a `model_type`, such as Megatron's arguments.
_BY_KEYS = Family(has=frozenset({"experts", "latent"}))

#: Patterns of keys that only some kinds of models have, and what these keys say. They are refused
#: unless the model's family `has` the kind.
_KINDS = {
    "experts": (
        r"(num|n|moe_num)_(\w+_)?experts(_per_tok)?|moe_intermediate_size",
        "it is a mixture of experts",
    ),
    "latent": (
        r"(q|kv)_lora_rank|multi_latent_attention",
        "its attention is latent",
    ),
    "recurrence": (
        r"(mamba|ssm|linear|rwkv|lru)_\w+|state_size|layers?_block_types?|attn_layer_\w+|"
        r"hybrid_\w*pattern",
        "some of its layers are not attention",
    ),
    "predictions": (
        "num_nextn_predict_layers",
        "it predicts more than the next token",
    ),
    "encoder": (
        "is_encoder_decoder|add_cross_attention",
        "its decoder is for the output of an encoder",
    ),
    "differ": (
        r"block_configs|block_types|is_hybrid_model|full_attn_idxs|"
        r"cross_attention_layers|\w+_per_layer|num_global_key_value_heads|global_head_dim",
        "its layers are of several kinds",
    ),
    "shared": (
        "num_kv_shared_layers|num_hidden_groups|use_cla|cla_share_factor|total_ut_steps",
        "layers share weights",
    ),
    "more": (
        r"mtp_num_layers|altup_\w+|laurel_rank|attn_output_gate|use_double_wide_mlp|"
        r"hidden_size_per_layer_input|moe_latent_size|index_topk",
        "it has more than its layers",
    ),
}
#: Keys that Megatron's arguments have for any model; `multi_latent_attention` shows such a file.
_OF_ANY = r"(q|kv)_lora_rank|(mamba|linear)_\w+"
#: Entries of `layer_types` that only say which tokens a layer sees, so that its weights are alike.
_LAYER_TYPE = re.compile(r"(full|sliding|chunked|global|local)(_attention)?|attention")
#: Names of a layer's parts, as entries in lists of layers or as letters of a pattern.
_PARTS = {
    "recurrence": ("mamba", "linear_attention", "M"),
    "attention": ("attention", "full_attention", "*"),
    "mlp": ("mlp", "-"),
    "experts": ("moe", "E"),
}
#: Lists with an entry for each layer whose differences do not change weights, or are read.
_LISTS = {"layer_types", "no_rope_layers", "attention_layers"}
_LISTS_OF_PARTS = {
    *("layers_block_type", "attn_layer_indices"),
    *("mlp_layer_types", "moe_layers", "mlp_only_layers", "moe_layer_freq"),
}
#: Keys of a model's parts for other inputs.
_PART = re.compile(r"(vision|visual|image|video|audio|speech|encoder)")
#: Keys of the decoder in a configuration of several models.
_DECODERS = ("text_config", "llm_config", "language_config")


def read_decoder(path: str | Path) -> Decoder:
    """Read the decoder of a configuration, config.json; CompileError if it is wrong or unknown."""
    from schedlang.files.documents import read_document

    try:
        return decoder_of(read_document(path))
    except ValueError as error:
        message = f"the model in `{path}`: {error}"
        help = "or give what its layers were measured to take: --costs FILE"
        raise CompileError(
            [Diagnostic("costs", message, help=help, file=str(path))]
        ) from None


def decoder_of(config: Any) -> Decoder:
    """The decoder of a configuration that was read; ValueError if it is wrong or unknown."""
    if not isinstance(config, dict):
        raise ValueError('it must be an object, such as {"hidden_size": 4096, …}')
    config = _decoder(config)
    name = _family(config)
    family = FAMILIES.get(name, _BY_KEYS)
    _check_kind(config, family)
    config = dict(family.absent) | config
    if name == "":
        family = evolve(family, gated=_says_gated(config))
    hidden = _whole(config, "hidden_size")
    if config.get("word_embed_proj_dim") not in (None, hidden):
        raise ValueError(
            "`word_embed_proj_dim` is not its hidden size: this is not counted"
        )
    dropouts = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop")
    learned = family.positions
    if config.get("position_embedding_type") == "learned_absolute":
        learned = 0
    positions = 0
    if learned is not None:
        positions = _whole(config, "max_position_embeddings") + learned
    # Megatron's key has the opposite meaning.
    is_tied = config.get("untie_embeddings_and_output_weights") is False
    vocabulary = "vocab_size"
    if config.get("padded_vocab_size") is not None:
        vocabulary = "padded_vocab_size"
    predictions = config.get("num_nextn_predict_layers")
    left_out = ""
    if predictions:
        layers = counted(predictions, "layer")
        left_out = f"the {layers} of `num_nextn_predict_layers`, as in transformers"
    return Decoder(
        hidden=hidden,
        layers=_layers(config, name, family, hidden),
        vocabulary=_whole(config, vocabulary),
        dropout=any(config.get(name) for name in dropouts),
        positions=positions,
        tied=is_tied or bool(config.get("tie_word_embeddings")),
        left_out=left_out,
    )


def _layers(
    config: Mapping[str, Any], name: str, family: Family, hidden: int
) -> tuple[Layer, ...]:
    """The parts of each layer."""
    makers: dict[str, Callable[[], Part]] = {
        "attention": lambda: _attention(config, family, hidden),
        "recurrence": lambda: _recurrence(config, family, hidden),
        "mlp": lambda: _mlp(config, name, family, hidden),
        "experts": lambda: _experts(config, family, hidden),
    }
    layers = _names_of_parts(config, name, family)
    made = {word: makers[word]() for word in sorted({*chain(*layers)})}
    return tuple(tuple(made[word] for word in layer) for layer in layers)


def _names_of_parts(
    config: Mapping[str, Any], name: str, family: Family
) -> list[tuple[str, ...]]:
    """The names of the parts of each layer."""
    pattern = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if family.single and pattern:
        return [(_part_called(word),) for word in pattern]
    count = _whole(config, "num_hidden_layers")
    _check_layers(config, count, family)
    mixers = _mixers(config, count, family)
    if family.single:
        return [(mixer,) for mixer in mixers]
    has_experts = "experts" in family.has and _has_experts(config, name)
    return [
        (
            mixer,
            "experts" if has_experts and _is_sparse(config, layer) else "mlp",
        )
        for layer, mixer in enumerate(mixers)
    ]


def _mixers(config: Mapping[str, Any], count: int, family: Family) -> list[str]:
    """For each layer, "attention" or "recurrence"."""
    if "recurrence" not in family.has:
        return ["attention"] * count
    types = config.get("layer_types")
    if types:
        recurrent = _PARTS["recurrence"]
        return ["recurrence" if kind in recurrent else "attention" for kind in types]
    if family.single:
        return ["recurrence"] * count
    if "attn_layer_indices" in config:
        places = set(config["attn_layer_indices"] or ())
    elif config.get("full_attention_interval"):
        interval = _whole(config, "full_attention_interval")
        places = set(range(interval - 1, count, interval))
    elif config.get("attn_layer_period"):
        period = _whole(config, "attn_layer_period")
        places = set(range(config.get("attn_layer_offset", 0) % period, count, period))
    else:
        raise ValueError("it has no `layer_types`: which of its layers are attention")
    return ["attention" if layer in places else "recurrence" for layer in range(count)]


def _part_called(word: str) -> str:
    """The part that a pattern's word or letter stands for."""
    for part, words in _PARTS.items():
        if word in words:
            return part
    raise ValueError(f"a layer of the kind `{word}` is not known here")


def _has_experts(config: Mapping[str, Any], name: str) -> bool:
    """Whether some layers have experts; ValueError if a family's configuration has no such key."""
    keys = [key for key in _names("num_experts") if key in config]
    if not keys and name:
        raise ValueError("it has no `num_experts`, or `num_local_experts`")
    return any(config[key] for key in keys)


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts in place of one MLP; each of these keys may rule them out."""
    if isinstance(config.get("mlp_layer_types"), list):
        return bool(config["mlp_layer_types"][layer] == "sparse")
    if isinstance(config.get("moe_layers"), list):
        return layer in config["moe_layers"]
    frequency = config.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return bool(frequency[layer])
    step = (
        config.get("decoder_sparse_step")
        or config.get("interleave_moe_layer_step")
        or 1
    )
    period = config.get("expert_layer_period") or 1
    last = config.get("moe_layer_end_index")
    return (
        layer % frequency == 0
        and (layer + 1) % step == 0
        and layer % period == (config.get("expert_layer_offset") or 0)
        and (layer + 1) % (config.get("moe_layer_interval") or 1) == 0
        and layer not in (config.get("mlp_only_layers") or ())
        and layer >= (config.get("first_k_dense_replace") or 0)
        and layer >= (config.get("moe_layer_start_index") or 0)
        and (last in (None, -1) or layer <= last)
    )


def _attention(config: Mapping[str, Any], family: Family, hidden: int) -> Part:
    heads = _whole(config, "num_attention_heads")
    # Megatron has these keys for any model.
    has_latent = config.get("multi_latent_attention", "kv_lora_rank" in config)
    if "latent" in family.has and (has_latent or config.get("model_type")):
        query_rank = 0
        if config.get("q_lora_rank") is not None:
            query_rank = _whole(config, "q_lora_rank")
        return layer_parts.latent_attention(
            hidden,
            heads,
            query_rank,
            _whole(config, "kv_lora_rank"),
            _whole(config, "qk_nope_head_dim"),
            _whole(config, "qk_rope_head_dim"),
            _whole(config, "v_head_dim"),
        )
    return layer_parts.attention(
        hidden,
        heads,
        _kv_heads(config, heads),
        _whole(config, "head_dim", hidden // heads),
        "gate" in family.has,
    )


def _recurrence(config: Mapping[str, Any], family: Family, hidden: int) -> Part:
    width = _whole(config, "conv_kernel")
    if family.recurrence == "delta_rule":
        return layer_parts.delta_rule(
            hidden,
            _whole(config, "linear_num_key_heads"),
            _whole(config, "linear_key_head_dim"),
            _whole(config, "linear_num_value_heads"),
            _whole(config, "linear_value_head_dim"),
            width,
        )
    state = _whole(config, "state_size")
    if family.recurrence == "mamba":
        rank = -(-hidden // 16)
        if config.get("time_step_rank", config.get("mamba_dt_rank")) != "auto":
            rank = _whole(config, "time_step_rank", rank)
        inner = hidden * _whole(config, "expand", 2)
        # A model of Mamba alone may give this width itself.
        if family.single:
            inner = _whole(config, "intermediate_size", inner)
        return layer_parts.mamba(hidden, inner, state, rank, width)
    # A model of Mamba-2 alone has no heads of attention, so its keys have no prefix.
    prefix = "" if family.single and "mamba_num_heads" not in config else "mamba_"
    heads = _whole(config, f"{prefix}num_heads")
    size = config.get("mamba_d_head")
    if size == "auto":
        size = hidden * _whole(config, "expand", 2) // heads
    else:
        size = _whole(config, f"{prefix}head_dim")
    groups = _whole(config, "n_groups")
    return layer_parts.mamba2(hidden, heads, size, groups, state, width)


def _mlp(config: Mapping[str, Any], name: str, family: Family, hidden: int) -> Part:
    width = None if family.gated else 4 * hidden
    # In Llama 4, `intermediate_size` is the width of its experts.
    if config.get("intermediate_size_mlp") is not None:
        width = _whole(config, "intermediate_size_mlp")
    # Granite's hybrids without experts have only the shared MLP.
    elif name == "granitemoehybrid":
        width = _whole(config, "shared_intermediate_size")
    else:
        width = _whole(config, "intermediate_size", width)
    # The first Qwen gives the width of both halves of its gated MLP.
    return layer_parts.mlp(
        hidden, width // 2 if name == "qwen" else width, family.gated
    )


def _experts(config: Mapping[str, Any], family: Family, hidden: int) -> Part:
    own = _given(config, "moe_intermediate_size") or "width" in family.has
    width = _whole(config, "moe_intermediate_size" if own else "intermediate_size")
    shared = width * (
        config.get("n_shared_experts", config.get("moe_num_shared_experts")) or 0
    )
    if _given(config, "shared_intermediate_size"):
        shared = _whole(config, "shared_intermediate_size")
    return layer_parts.experts(
        hidden,
        width,
        family.gated,
        _whole(config, "num_experts"),
        _whole(config, "num_experts_per_tok"),
        shared,
    )


def _decoder(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the decoder, which may be a part of the file; ValueError for another
    kind of model, or for one with further parts.
    """
    parts = {key: value for key, value in config.items() if _is_part(key, value)}
    decoder = next((key for key in _DECODERS if key in parts), None)
    for key, value in config.items():
        if isinstance(value, dict):
            name = value.get("model_type")
            if not name and key == decoder:
                name = f"{config.get('model_type', '')}_text"
            _check_kind(value, FAMILIES.get(str(name), Family()), f" in `{key}`")
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
    # Keys of the whole model count for its only part, too, except for the family.
    outside = {key: value for key, value in config.items() if key not in parts}
    family = f"{config.get('model_type', '')}_text"
    whole: dict[str, Any] = outside | {"model_type": family} | parts[decoder]
    return whole


def _is_part(key: str, value: Any) -> bool:
    """Whether a value configures a part of a model, even if it has no sizes."""
    if not isinstance(value, dict) or not value:
        return False
    return _is_model(value) or "model_type" in value or bool(_PART.match(key))


def _is_model(value: Any) -> bool:
    """Whether a value configures a model or a part of one: it has sizes."""
    names = OTHER_NAMES["hidden_size"], OTHER_NAMES["num_hidden_layers"]
    sizes = {"hidden_size", "num_hidden_layers", "depth", *names[0], *names[1]}
    return isinstance(value, dict) and not sizes.isdisjoint(value)


def _check_kind(config: Mapping[str, Any], family: Family, where: str = "") -> None:
    """ValueError for a key of a kind of model that the family does not have."""
    name = config.get("model_type")
    of_any = _OF_ANY if "multi_latent_attention" in config else ""
    for kind, (pattern, says) in _KINDS.items():
        if kind in family.has:
            continue
        for key, value in config.items():
            if not value or re.fullmatch(of_any, str(key)):
                continue
            if re.fullmatch(pattern, str(key)):
                known = f"a `{name}`" if name else "a model without `model_type`"
                raise ValueError(
                    f"`{key}`{where} says that {says}: of {known} this is not known here"
                )


def _family(config: Mapping[str, Any]) -> str:
    """The family of a model, "" if the configuration does not name it; ValueError for an unknown
    one.
    """
    name = config.get("model_type")
    if not name:
        architectures = config.get("architectures")
        if not (isinstance(architectures, list) and architectures):
            return ""
        name = re.sub(r"(ForCausalLM|LMHeadModel|Model)$", "", str(architectures[0]))
        spelt = {family.replace("_", ""): family for family in FAMILIES}
        name = spelt.get(name.lower(), name)
    if name not in FAMILIES:
        raise ValueError(
            f"`model_type` is `{name}`, and how its layers are built is not known here: where they "
            "are like those of another one, give that, such as `llama` (a gated MLP) or `gpt2`"
        )
    return str(name)


def _says_gated(config: Mapping[str, Any]) -> bool:
    """Whether a configuration without a family describes a gated MLP."""
    activation = config.get("hidden_act") or config.get("activation_function") or ""
    is_of_glu = str(activation).endswith("glu")
    return is_of_glu or activation in ("silu", "swish") or bool(config.get("swiglu"))


def _check_layers(config: Mapping[str, Any], layers: int, family: Family) -> None:
    """ValueError for a list that makes layers differ in a way that is not supported."""
    for key, value in config.items():
        if not isinstance(value, list):
            continue
        kinds = sorted(set(map(str, value)))
        is_read = key in _LISTS or (family.has and key in _LISTS_OF_PARTS)
        if key == "layer_types":
            kinds = [kind for kind in kinds if not _is_read(kind, family)]
        elif is_read or len(value) != layers or len(kinds) < 2:
            kinds = []
        if kinds:
            raise ValueError(
                f"`{key}` says that its layers differ, such as by `{kinds[0]}`: the costs of such "
                "a model are not known here"
            )


def _is_read(kind: str, family: Family) -> bool:
    """Whether an entry of `layer_types` is supported for a family."""
    is_recurrent = "recurrence" in family.has and kind in _PARTS["recurrence"]
    return is_recurrent or bool(_LAYER_TYPE.fullmatch(kind))


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """The number of heads of keys and values."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    # Megatron's files have a number of groups even if the model has no groups.
    if config.get("group_query_attention") is False:
        return heads
    return _whole(config, "num_key_value_heads", heads)


def _names(key: str) -> Iterator[str]:
    yield key
    yield from OTHER_NAMES.get(key, ())


def _given(config: Mapping[str, Any], key: str) -> str | None:
    """The name under which a configuration has a key; None if it lacks the key."""
    return next((name for name in _names(key) if config.get(name)), None)


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from 1, by any name of its key; ValueError if it is missing or wrong."""
    given = [name for name in _names(key) if config.get(name) is not None]
    if not given:
        if default is None:
            raise ValueError(f"it has no `{key}`")
        return default
    value = config[given[0]]
    # Not `isinstance`, since bool is a subclass of int.
    if type(value) is not int or value < 1:
        raise ValueError(f"`{given[0]}` is {value!r}, it must be a whole number from 1")
    return value
