"""What is estimated of a transformer, against the papers' own formulas and known models."""

import pytest
from attrs import evolve

from schedlang.extras.search.tune.config import transformer_of
from schedlang.extras.search.tune.devices import DEVICES
from schedlang.extras.search.tune.transformer import Transformer, layer_costs

#: The layers of the papers: an MLP of four times the hidden size, as many heads for keys, dropout.
H = 4096
A = 32
L = 24
V = 51200
PAPER = Transformer(
    hidden=H,
    layers=L,
    heads=A,
    kv_heads=A,
    head_size=H // A,
    mlp=4 * H,
    gated=False,
    vocabulary=V,
    dropout=True,
)
A100 = DEVICES["A100"]


def test_a_layer_keeps_what_the_papers_say() -> None:
    """34 s b h bytes from forward to backward (Korthikanti et al. 2022, section 4.1, without the
    scores), and 32 s b h between the halves (Qi et al. 2023, table 1).
    """
    s = 1024
    b = 3
    costs = layer_costs(PAPER, A100, s, b, checkpointed=False, efficiency=1)
    assert costs.activation_bytes[1] == 34 * s * b * H
    assert costs.kept_bytes[1] == 32 * s * b * H
    checkpointed = layer_costs(PAPER, A100, s, b, checkpointed=True, efficiency=1)
    assert checkpointed.activation_bytes[1] == 2 * s * b * H


def test_operations_are_those_of_the_papers() -> None:
    """A forward and backward has 72 B s l h² (1 + s / 6h + V / 12 l h) of them: three quarters of
    what Narayanan et al. 2021 have, whose forward runs twice, but for the head's.
    """
    s = 2048
    b = 2
    fast = evolve(A100, memory_bandwidth=1e30)
    costs = layer_costs(PAPER, fast, s, b, checkpointed=False, efficiency=1)
    seconds = sum(costs.forward_times) + sum(costs.backward_times)
    expected = 72 * b * s * L * H**2 * (1 + s / (6 * H) + V / (12 * L * H))
    assert seconds * fast.flops == pytest.approx(expected, rel=1e-6)
    again = layer_costs(PAPER, fast, s, b, checkpointed=True, efficiency=1)
    seconds = sum(again.forward_times) + sum(again.backward_times)
    expected = 96 * b * s * L * H**2 * (1 + s / (6 * H) + V / (16 * L * H))
    assert seconds * fast.flops == pytest.approx(expected, rel=1e-6)
    # The halves of Qi et al. 2023, table 1: sbh (24h + 4s), sbh (24h + 8s), sbh 24h.
    assert costs.forward_times[1] * fast.flops == pytest.approx(
        s * b * H * (24 * H + 4 * s)
    )
    assert costs.input_times[1] * fast.flops == pytest.approx(
        s * b * H * (24 * H + 8 * s)
    )
    assert costs.weight_times[1] * fast.flops == pytest.approx(s * b * H * 24 * H)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        # What transformers counts in Llama-2-7b, Llama-3-8B and Qwen2.5-0.5B's shape untied.
        (
            {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "intermediate_size": 11008,
                "vocab_size": 32000,
                "hidden_act": "silu",
            },
            6_738_415_616,
        ),
        (
            {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "hidden_act": "silu",
            },
            8_030_261_248,
        ),
    ],
)
def test_as_many_weights_as_known_models(
    config: dict[str, object], weights: int
) -> None:
    model = transformer_of(config)
    costs = layer_costs(model, A100, 128, 1, checkpointed=False, efficiency=1)
    assert sum(costs.weights_bytes) == 16 * weights


def test_gpt2_has_other_names() -> None:
    model = transformer_of(
        {
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "vocab_size": 50257,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.1,
        }
    )
    assert model == Transformer(768, 12, 12, 12, 64, 3072, False, 50257, True)


def test_copies_and_lookups_take_the_memory_s_time() -> None:
    costs = layer_costs(PAPER, A100, 1024, 1, checkpointed=False, efficiency=0.5)
    assert costs.forward_times[0] == pytest.approx(4 * 1024 * H / A100.memory_bandwidth)
    assert costs.input_times[0] == 0
    layer = costs.activation_bytes[1]
    assert costs.offload_times[1] == pytest.approx(layer / A100.bandwidth_to_host)


def test_less_is_reached_where_efficiency_is_less() -> None:
    half = layer_costs(PAPER, A100, 1024, 8, checkpointed=False, efficiency=0.5)
    quarter = layer_costs(PAPER, A100, 1024, 8, checkpointed=False, efficiency=0.25)
    assert quarter.forward_times[1] == pytest.approx(2 * half.forward_times[1])
