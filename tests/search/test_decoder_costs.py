"""What is estimated of a transformer, against the papers' own formulas and known models."""

import pytest
from attrs import evolve

from schedlang.extras.search.tune import layer_parts
from schedlang.extras.search.tune.decoder_config import decoder_of
from schedlang.extras.search.tune.decoder_costs import Decoder, layer_costs
from schedlang.schedule.costs.devices import DEVICES

#: The layers of the papers: an MLP of four times the hidden size, as many heads for keys, dropout.
H = 4096
A = 32
L = 24
V = 51200
LAYER = (layer_parts.attention(H, A, A, H // A), layer_parts.mlp(H, 4 * H, False))
PAPER = Decoder(hidden=H, layers=(LAYER,) * L, vocabulary=V, dropout=True)
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
    model = decoder_of(config)
    costs = layer_costs(model, A100, 128, 1, checkpointed=False, efficiency=1)
    assert sum(costs.weights_bytes) == 16 * weights


def test_gpt2_has_other_names() -> None:
    model = decoder_of(
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
    layer = (layer_parts.attention(768, 12, 12, 64), layer_parts.mlp(768, 3072, False))
    assert model == Decoder(768, (layer,) * 12, 50257, dropout=True)


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


HELD = 8
USED = 2
MIXTURE = evolve(
    PAPER,
    layers=(
        (LAYER[0], layer_parts.experts(H, 2 * H, True, HELD, USED, shared=H)),
        LAYER,
    ),
)
#: The weights of one expert.
EXPERT = 3 * H * 2 * H


def test_a_token_computes_with_the_experts_that_it_goes_to() -> None:
    fast = evolve(A100, memory_bandwidth=1e30)
    costs = layer_costs(MIXTURE, fast, 1024, 1, checkpointed=False, efficiency=1)
    router = H * HELD
    used = 4 * H * H + router + USED * EXPERT + 3 * H * H
    attention = 4 * 1024 * H
    expected = 1024 * (2 * used + attention)
    assert costs.forward_times[1] * fast.flops == pytest.approx(expected)
    held = used + (HELD - USED) * EXPERT + 2 * H
    assert costs.weights_bytes[1] == 16 * held
    assert MIXTURE.parameters - MIXTURE.active_parameters == (HELD - USED) * EXPERT
    # Input and output of each product; each of two experts has its own.
    outside = (H + 3 * H) + (H + H) + (H + HELD) + (H + 2 * H) + (H + H)
    of_expert = (H + 4 * H) + (2 * H + H)
    assert costs.kept_bytes[1] == 2 * 1024 * (outside + USED * of_expert)


def test_replicas_hold_their_share_of_the_experts() -> None:
    whole, shared = (
        layer_costs(MIXTURE, A100, 1024, 1, False, 0.5, experts_over=over)
        for over in (1, 4)
    )
    left = whole.weights_bytes[1] - shared.weights_bytes[1]
    assert left == 16 * HELD * EXPERT * 3 / 4
    assert whole.weights_bytes[2] == shared.weights_bytes[2]
    assert whole.activation_bytes == shared.activation_bytes


def test_a_recurrence_grows_with_the_length_and_not_with_its_square() -> None:
    parts = {
        "mamba": layer_parts.mamba(H, 2 * H, 16, 256, 4),
        "mamba2": layer_parts.mamba2(H, 128, 64, 8, 128, 4),
        "delta_rule": layer_parts.delta_rule(H, 16, 128, 32, 128, 4),
    }
    for part in parts.values():
        model = evolve(PAPER, layers=((part,),))
        short, long = (
            layer_costs(model, A100, sequence, 1, False, 0.5).forward_times[1]
            for sequence in (4096, 8192)
        )
        assert long == pytest.approx(2 * short, rel=0.01)


def test_latent_attention_attends_with_whole_keys() -> None:
    """DeepSeek-V3's: the attention of a head is between 192 numbers, over values of 128."""
    part = layer_parts.latent_attention(7168, 128, 1536, 512, 128, 64, 128)
    assert part.pairs == 128 * (192 + 128)
    assert part.weights == 187_107_328
