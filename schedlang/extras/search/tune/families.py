"""The supported families of decoders: a row for each `model_type` of transformers.

A row has facts that a configuration omits: the kind of MLP, the defaults of absent keys in
transformers, and the parts of a layer besides attention and MLP. A key that no row reads is refused
(`decoder_config.py`), since wrong costs would not be noticed otherwise.
`tests/search/test_model_config.py` holds each row against the parameters of transformers' model.
"""

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

#: Other names of keys, in other families and among Megatron's arguments.
OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "num_query_groups"),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
    # Latent attention.
    "qk_nope_head_dim": ("qk_head_dim",),
    "qk_rope_head_dim": ("qk_pos_emb_head_dim",),
    # Experts.
    "num_experts": (
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_moe_experts",
    ),
    "num_experts_per_tok": ("moe_k", "moe_router_topk"),
    "moe_intermediate_size": ("moe_ffn_hidden_size",),
    "n_shared_experts": ("moe_num_shared_experts",),
    "shared_intermediate_size": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    # Recurrences.
    "state_size": ("mamba_d_state", "ssm_state_size"),
    "conv_kernel": ("mamba_d_conv", "linear_conv_kernel_dim"),
    "expand": ("mamba_expand",),
    "time_step_rank": ("mamba_dt_rank",),
    "mamba_num_heads": ("mamba_n_heads",),
    "mamba_head_dim": ("mamba_d_head",),
    "n_groups": ("mamba_n_groups",),
}


@frozen
class Family:
    """The architecture of the models of one `model_type`.

    `absent` are the defaults of keys. `positions` is the number of rows of a learned embedding of
    positions beyond `max_position_embeddings`, or None without such an embedding. `has` names the
    parts that its keys may describe: `experts`, which may have their own `width`; `latent`
    attention, or a `gate` after it; a `recurrence`, one of `mamba`, `mamba2` and `delta_rule`; and
    `predictions` of further tokens, which are not counted. A layer is attention or a recurrence,
    followed by an MLP; if layers are `single`, a layer is one of these three.
    """

    gated: bool = True
    absent: Mapping[str, Any] = field(factory=dict)
    positions: int | None = None
    has: frozenset[str] = frozenset()
    recurrence: str | None = None
    single: bool = False


def _plain(**absent: Any) -> Family:
    return Family(absent=absent)


def _ungated(positions: int | None = None, **absent: Any) -> Family:
    return Family(gated=False, absent=absent, positions=positions)


def _sparse(*has: str, **absent: Any) -> Family:
    return Family(absent=absent, has=frozenset({"experts", *has}))


def _recurrent(recurrence: str, *has: str, **absent: Any) -> Family:
    kinds = frozenset({"recurrence", *has})
    return Family(absent=absent, has=kinds, recurrence=recurrence)


#: The embedding and the head share their weights.
_TIED = {"tie_word_embeddings": True}

FAMILIES = {
    # Attention, and a gated MLP.
    "baichuan": _plain(),
    "bitnet": _plain(num_key_value_heads=5),
    "cohere": _plain(**_TIED),
    "cohere2": _plain(**_TIED),
    "cwm": _plain(num_key_value_heads=8, head_dim=128),
    "ernie4_5": _plain(num_key_value_heads=2, head_dim=128, **_TIED),
    "exaone4": _plain(num_key_value_heads=32),
    "gemma": _plain(num_key_value_heads=16, head_dim=256, **_TIED),
    "gemma2": _plain(num_key_value_heads=4, head_dim=256, **_TIED),
    "gemma3_text": _plain(num_key_value_heads=4, head_dim=256, **_TIED),
    "glm": _plain(num_key_value_heads=2, head_dim=128),
    "glm4": _plain(num_key_value_heads=2, head_dim=128),
    "granite": _plain(),
    "helium": _plain(num_key_value_heads=20, head_dim=128),
    "hunyuan_v1_dense": _plain(),
    "internlm": _plain(),
    "internlm2": _plain(),
    "llama": _plain(),
    "ministral": _plain(num_key_value_heads=8),
    "ministral3": _plain(num_key_value_heads=8, head_dim=128),
    "mistral": _plain(num_key_value_heads=8),
    "olmo": _plain(),
    "olmo2": _plain(),
    "olmo3": _plain(),
    "phi3": _plain(),
    "qwen": _plain(),
    "qwen2": _plain(num_key_value_heads=32),
    "qwen2_5_vl": _plain(num_key_value_heads=8),
    "qwen2_5_vl_text": _plain(num_key_value_heads=8),
    "qwen2_vl": _plain(num_key_value_heads=8),
    "qwen2_vl_text": _plain(num_key_value_heads=8),
    "qwen3": _plain(num_key_value_heads=32, head_dim=128),
    "qwen3_vl_text": _plain(num_key_value_heads=32, head_dim=128),
    "seed_oss": _plain(num_key_value_heads=8, head_dim=128),
    "smollm3": _plain(num_key_value_heads=4, **_TIED),
    "stablelm": _plain(num_key_value_heads=32),
    # Attention, and an MLP that is not gated.
    "apertus": _ungated(),
    "arcee": _ungated(),
    "bloom": _ungated(**_TIED),
    "codegen": _ungated(),
    "falcon": _ungated(multi_query=True, **_TIED),
    "gpt2": _ungated(0, **_TIED),
    "gpt_bigcode": _ungated(0, multi_query=True, **_TIED),
    "gpt_neo": _ungated(0, **_TIED),
    "gpt_neox": _ungated(),
    "gptj": _ungated(),
    "nemotron": _ungated(),
    "opt": _ungated(2, **_TIED),
    "persimmon": _ungated(),
    "phi": _ungated(),
    "starcoder2": _ungated(num_key_value_heads=2, **_TIED),
    # Latent attention.
    "minicpm3": Family(has=frozenset({"latent"}), absent=_TIED),
    # Mixtures of experts.
    "deepseek_v2": _sparse("width", "latent"),
    "deepseek_v3": _sparse("width", "latent", "predictions", first_k_dense_replace=3),
    "dots1": _sparse("width"),
    "ernie4_5_moe": _sparse(
        "width", num_key_value_heads=4, moe_layer_start_index=1, **_TIED
    ),
    "glm4_moe": _sparse(
        "width", "predictions", num_key_value_heads=8, first_k_dense_replace=1
    ),
    "gpt_oss": _sparse(num_key_value_heads=8, head_dim=64),
    "granitemoe": _sparse(),
    "granitemoeshared": _sparse(),
    "llama4_text": _sparse(num_key_value_heads=8, head_dim=128, n_shared_experts=1),
    "minimax_m2": _sparse(num_key_value_heads=8, head_dim=128),
    "mixtral": _sparse(num_key_value_heads=8),
    "olmoe": _sparse(),
    "phimoe": _sparse(num_key_value_heads=8),
    "qwen2_moe": _sparse(
        "width", num_key_value_heads=16, shared_intermediate_size=5632
    ),
    "qwen3_moe": _sparse("width", num_key_value_heads=4),
    # Recurrences, alone or beside attention.
    "bamba": _recurrent("mamba2", num_key_value_heads=8),
    "falcon_mamba": evolve(_recurrent("mamba", **_TIED), single=True),
    "granitemoehybrid": _recurrent("mamba2", "experts"),
    "jamba": _recurrent("mamba", "experts", num_key_value_heads=8),
    "mamba": evolve(_recurrent("mamba", **_TIED), single=True),
    "mamba2": evolve(_recurrent("mamba2"), single=True),
    "nemotron_h": evolve(
        _recurrent("mamba2", "experts", "width", num_key_value_heads=8),
        single=True,
        gated=False,
    ),
    "qwen3_next": _recurrent(
        *("delta_rule", "experts", "width", "gate"),
        full_attention_interval=4,
        num_key_value_heads=2,
        head_dim=256,
    ),
}
