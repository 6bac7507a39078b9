"""Models that do more than call their blocks, cut by `inputs`: each stage does what belongs to its
blocks, and all together what the whole model does.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang import compile
from schedlang.runtime import Pipeline, PipelineError, measure, split
from tests.support.models import program
from tests.support.ranks import Run

WIDTH = 8


class Layer(nn.Module):
    """A block that takes more than its input, and returns a tuple, as layers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        made = torch.tanh(self.inner(x))
        return (made if mask is None else made * mask), None


class Model(nn.Module):
    """Tokens, four layers, a head; what is done between them is a method of each kind's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Multiplied(Model):
    """A multiplier after the embedding, a cap after the head (Gemma 2, Granite, Cohere)."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)[0] * 0.5
        return 3.0 * torch.tanh(self.head(x) / 3.0)


class Masked(Model):
    """A mask that depends on the tokens goes into each layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        # Of a tensor that each stage makes and a value, of which it may have a fake one.
        above = torch.full(tokens.shape, 3) < tokens
        mask = (tokens != above * 3).unsqueeze(-1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)[0]
        return self.head(x)


class Placed(Model):
    """Positions of the length of the tokens are added (OPT, GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(32, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        places = torch.arange(length, device=tokens.device).expand(rows, length)
        x = self.embed(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Skipping(Model):
    """What the first layer returns is used by the last one and by the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.layers[0](self.embed(tokens))[0]
        for layer in self.layers[1:-1]:
            x = layer(x)[0]
        x = self.layers[-1](torch.cat([x, first], 1)[:, : x.shape[1]] + first)[0]
        return self.head(x + first)


class Weighted(Model):
    """Weights of the model's own, one at the start, one at the end, and one for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in "1234")
        self.end = nn.Parameter(torch.randn(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.cat([self.start.expand(len(x), 1, WIDTH), x], 1)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x)[0] * scale
        return self.head(x)[:, 1:] + self.end


class Changing(Model):
    """Values are changed in place between layers, also in a part."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * 1.0
        for layer in self.layers:
            x = layer(x)[0] * 1.0
            x += 1.0
            x[:, 0] = x[:, 1] * 2.0
        return self.head(x.contiguous())


class Gated(Model):
    """A module without weights lies between the layers, and an empty block among them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.layers.insert(2, nn.Identity())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            made = layer(self.norm(x))
            x = made[0] if isinstance(made, tuple) else made
        return self.head(x)


class Written(Model):
    """Values are written into tensors that every stage makes by itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.zeros(*tokens.shape, 1)
        mask[:, :, 0] = (tokens != 3).float()
        half = torch.zeros(*tokens.shape, 1)
        torch.mul(mask, 0.5, out=half)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask - half)[0]
        return self.head(x)


class Counting(Model):
    """A norm without weights counts in its buffers, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
            if layer is self.layers[1]:
                x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class Twice(Model):
    """A block is called again, also by stages between which others lie (ALBERT)."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, self.layers[0], *self.layers]:
            x = layer(x)[0]
        return self.head(x)


class Reaching(Model):
    """The weights of two blocks are also used outside of them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0].to(self.layers[3].inner.weight.device)
        x = nn.functional.linear(x, self.layers[2].inner.weight)
        return self.head(x) + x @ self.embed.weight.T


class Checkpointed(Model):
    """Blocks run again in the backward, with the masks that they were given."""

    is_reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 3).unsqueeze(-1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=self.is_reentrant)[0]
        return self.head(x)


class Hooked(Model):
    """Hooks of blocks work on values before and after them, as those of gradient checkpointing and
    of FSDP do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed.register_forward_hook(lambda *given: given[2] * 2.0)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda _, given: (given[0] + 1.0,))


class Counted(Model):
    """Python looks at the data of the inputs, at the start and at the end (LLaVA, Qwen-VL, XLM)."""

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 3).sum(1)
        longest = lengths.max().item()
        if lengths.max() > tokens.shape[1]:
            raise ValueError("a text is longer than it is")
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        places = torch.arange(tokens.shape[1])
        return self.head(x * (places < longest).unsqueeze(-1)) / sum(lengths.tolist())


class Selected(Model):
    """A mask selects tokens, so shapes depend on the data (packed patches of images)."""

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != 3
        counts = torch.zeros(tokens.shape[1], dtype=torch.int64)
        counts += mask.sum(0)
        counts[:1] += 1
        x = self.embed(tokens[mask])
        for layer in self.layers:
            x = layer(x)[0]
        made = torch.zeros(*tokens.shape, WIDTH)
        made[mask] = x
        return self.head(made * counts.unsqueeze(-1))[mask] * counts.tolist()[0]


class Iterated(Model):
    """Python iterates over a value, and over one that has data."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, weight in zip(self.layers, self.embed.weight, strict=False):
            x = layer(x)[0] * weight
        columns = [column for column in x.permute(2, 0, 1)]
        first, *_ = [int(token) for token in tokens[:1, :3].flatten()]
        return self.head(torch.stack(columns, -1)) * first


class Mapped(Model):
    """A mask is made by a function of positions (masks of transformers)."""

    def forward(self, tokens: Tensor) -> Tensor:
        def is_seen(row: Tensor, place: Tensor) -> Tensor:
            return tokens[row, place] != 3

        rows, places = map(torch.arange, tokens.shape)
        of_row = torch.vmap(is_seen, in_dims=(None, 0))
        mask = torch.vmap(of_row, in_dims=(0, None))(rows, places)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask.unsqueeze(-1))[0]
        return self.head(x)


class Asking(Model):
    """Parts are asked for the type of their weights, in each stage."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype))[0]
        kinds = {next(part.parameters()).dtype for part in self.children()}
        return self.head(x.to(kinds.pop()))


class AdaptedLayer(Layer):
    """A block with an adapter for each language."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict(
            {language: nn.Linear(WIDTH, WIDTH) for language in ("de", "en")}
        )

    def forward(self, x: Tensor, languages: Tensor) -> tuple[Tensor, None]:
        made, _ = super().forward(x)
        for number, adapter in enumerate(self.adapters.values()):
            made = made + adapter(made) * (languages == number)[:, None, None]
        return made, None


class Adapted(Model):
    """The number of a language is looked up in the first layer, in each stage (X-MOD)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaptedLayer() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        number = [*self.layers[0].adapters].index("en")
        languages = number * torch.ones(len(tokens))
        for layer in self.layers:
            x = layer(x, languages)[0]
        return self.head(x)


#: What the hooks of `Keeping` have kept.
STATES: list[Tensor] = []


def keep(layer: nn.Module, given: tuple[Tensor, ...], output: tuple[Any, ...]) -> None:
    """A hook as transformers has it for the states of its layers: no more than this."""
    STATES.append(output[0])


class Keeping(Model):
    """Hooks keep what layers return, and the model takes one of them by its place (LLaVA)."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(keep)

    def forward(self, tokens: Tensor) -> Tensor:
        STATES.clear()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x + STATES[-3])


KINDS = [
    Model,
    Multiplied,
    Masked,
    Placed,
    Skipping,
    Weighted,
    Changing,
    Gated,
    Written,
    Counting,
    Twice,
    Reaching,
    Checkpointed,
    Hooked,
    Counted,
    Selected,
    Iterated,
    Mapped,
    Asking,
    Adapted,
    Keeping,
]


def whole_and_inputs(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind(), torch.randint(16, (2, 5))


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_do_together_what_the_model_does(
    kind: type[nn.Module], ranks: int
) -> None:
    """One after the other, at other lengths than the model was cut by, too: what they return and
    all gradients, to the bit.
    """
    model, inputs = whole_and_inputs(kind)
    assert_stages_do_together_what_it_does(model, inputs, ranks)


def assert_stages_do_together_what_it_does(
    model: nn.Module, inputs: Tensor, ranks: int
) -> None:
    """Where the first stage draws the same random numbers as the model, and others draw others."""
    whole = copy.deepcopy(model)
    plan = compile("1f1b", {"ranks": ranks, "microbatches": 2})
    stages: dict[int, nn.Module] = {}
    for rank in range(ranks):
        own = split(model, plan, inputs=inputs, rank=rank)
        stages |= own
    for shape in ((2, 5), (3, 7)):
        tokens = torch.randint(16, shape)
        torch.manual_seed(0)
        expected = whole(tokens)
        expected.square().mean().backward()
        value: Any = tokens
        for stage in sorted(stages):
            torch.manual_seed(stage)
            given = value if isinstance(value, tuple) else (value,)
            value = stages[stage](*given)
        assert torch.equal(value, expected)
        value.square().mean().backward()
    found: dict[str, list[Tensor | None]] = {}
    for stage in stages.values():
        for name, weight in stage.named_parameters():
            found.setdefault(name, []).append(weight.grad)
    names = dict(whole.named_parameters())
    assert found.keys() == names.keys()
    several = {name: len(found[name]) for name in names if len(found[name]) > 1}
    # Each copy of a weight has a part of its gradient, which a pipeline adds up.
    assert several == {next(iter(each.values())): len(each) for each in own.tied}
    for name, (gradient, *others) in found.items():
        if others:
            total = sum(others, gradient)
            assert torch.allclose(total, names[name].grad, rtol=1e-5, atol=1e-9)
        else:
            assert torch.equal(gradient, names[name].grad)
    # One stage has each buffer, and it is that of the whole model.
    counted = [
        (name, buffer)
        for stage in stages.values()
        for name, buffer in stage.named_buffers()
    ]
    buffers = dict(whole.named_buffers())
    assert sorted(name for name, _ in counted) == sorted(buffers)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in counted)


class Deciding(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if x.sum() > 0:
            x = -x
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        pytest.param(Deciding, "if it goes by the data", id="a branch by a value"),
    ],
)
def test_what_cannot_be_cut_is_told_with_its_line(
    kind: type[nn.Module], told: str
) -> None:
    model, inputs = whole_and_inputs(kind)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    with pytest.raises(PipelineError, match=told) as caught:
        split(model, plan, inputs=inputs, rank=0)
    assert f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param({"inputs": "x"}, "`inputs` is a str", id="no tensor"),
        pytest.param({"inputs": ()}, "`inputs` has no tensors", id="nothing"),
        pytest.param(
            {"inputs": torch.zeros(2, 5)}, "its forward fails with them", id="a type"
        ),
        pytest.param(
            {"inputs": torch.ones(2, 5).long(), "options": 3},
            "`options` is 3",
            id="options",
        ),
        pytest.param(
            {"inputs": torch.ones(2, 5).long(), "options": {"a": 1}},
            "unexpected keyword argument 'a'",
            id="an unknown option",
        ),
        pytest.param({}, "or give `inputs`, a microbatch", id="none"),
    ],
)
def test_wrong_inputs_are_told(given: dict[str, Any], told: str) -> None:
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    with pytest.raises((PipelineError, TypeError, ValueError), match=told):
        split(Model(), plan, rank=0, **given)


class Asked(Model):
    """A model of transformers, which has inputs of its own that do not suffice."""

    def __init__(self) -> None:
        super().__init__()
        self.dummy_inputs = {"input_ids": torch.ones(2, 5).long()}

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.embed(tokens) * mask)


def test_inputs_of_the_model_itself_that_do_not_suffice_are_told() -> None:
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    with pytest.raises(PipelineError, match=r"missing 1 .* give `inputs`, a"):
        split(Asked(), plan, rank=0)


class Named(Model):
    """Two inputs that a script gives by name, as a collator makes them."""

    def forward(
        self, *, mask: Tensor, tokens: Tensor, scale: float = 1.0
    ) -> dict[str, Tensor]:
        x = self.embed(tokens) * scale
        for layer in self.layers:
            x = layer(x, mask.unsqueeze(-1))[0]
        return {"logits": self.head(x)}


def test_inputs_may_be_keyword_arguments() -> None:
    """In any order; other names than the model was cut by are told."""
    model, tokens = whole_and_inputs(Named)
    whole = copy.deepcopy(model)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    inputs = {"tokens": tokens, "mask": (tokens != 3).float()}
    options = {"scale": 2.0}
    stages = [
        split(model, plan, inputs=inputs, options=options, rank=rank)[rank]
        for rank in range(2)
    ]
    given = dict(reversed(inputs.items()))
    handed_on = stages[0](given, **options)
    found = stages[1](*handed_on, **options)["logits"]
    assert torch.equal(found, whole(**inputs, **options)["logits"])
    for others in (tokens, {"tokens": tokens}):
        with pytest.raises(PipelineError, match="a dictionary of tokens, mask"):
            stages[0](others, **options)


def test_the_calls_of_their_blocks_are_measured() -> None:
    """As many as `split` shares out; on the meta device too, and the model stays as it is."""
    model, inputs = whole_and_inputs(Twice)
    model.layers[1].inner = nn.Sequential(
        nn.Linear(WIDTH, 2**15), nn.Linear(2**15, WIDTH)
    )
    plan = compile("1f1b", {"ranks": 3, "microbatches": 3})
    for whole in (model, copy.deepcopy(model).to("meta")):
        costs = measure(whole, inputs)
        assert len(costs) == 11
        assert not any(part._forward_hooks for part in whole.modules())
        # The wide layer is called twice.
        assert {*sorted(range(11), key=costs.__getitem__)[-2:]} == {2, 7}
        parts = split(whole, plan, inputs=inputs, costs=costs, rank=0).partition
        assert parts.cuts[1] <= 7


class Looking(Model):
    """A mask is left out where nothing is masked, but when the model is traced, as transformers
    does.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 3).unsqueeze(-1)
        x = self.embed(tokens)
        looks = type(mask) is Tensor and mask.all()
        for layer in self.layers:
            x = layer(x, None if looks else mask)[0]
        return self.head(x)


def test_a_mask_stays_where_nothing_is_masked() -> None:
    """Stages go the way of a traced model for every microbatch, whether it looks at the data or
    not.
    """
    model, inputs = whole_and_inputs(Looking)
    whole = copy.deepcopy(model)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    stages = [split(model, plan, inputs=inputs, rank=rank)[rank] for rank in range(2)]
    for tokens in (torch.ones_like(inputs), inputs, torch.full_like(inputs, 3)):
        assert torch.equal(stages[1](*stages[0](tokens)), whole(tokens))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_around_a_block_of_another_stage_is_told() -> None:
    """It would detach what the stage is handed, and earlier stages would have no gradients."""
    model, inputs = whole_and_inputs(Checkpointed)
    model.is_reentrant = True
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    stages = [split(model, plan, inputs=inputs, rank=rank)[rank] for rank in range(2)]
    handed_on = stages[0](inputs)
    with pytest.raises(PipelineError, match="`use_reentrant=False`") as caught:
        stages[1](*handed_on)
    assert f"{__file__}:" in str(caught.value)
    # Without gradients there is nothing to cut.
    with torch.no_grad():
        stages[1](*handed_on)


class Branching(Model):
    """What is done between blocks depends on data, but on fake tensors it does not."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            is_first = layer is self.layers[0]
            if is_first and type(x) is Tensor and x.sum() > 0:
                x = x * 2.0
            x = layer(x)[0]
        return self.head(x)


def test_what_was_not_recorded_reaches_no_block() -> None:
    """Later stages would train without it."""
    model, inputs = whole_and_inputs(Branching)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    first = split(model, plan, inputs=inputs, rank=0)[0]
    nn.init.constant_(model.embed.weight, -1.0)
    first(inputs)
    nn.init.constant_(model.embed.weight, 1.0)
    with pytest.raises(PipelineError, match="its way must be the same"):
        first(inputs)


class Turning(Model):
    """A model that goes another way for long inputs."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if tokens.shape[1] > 5:
            x = x * 2.0
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


def test_another_way_is_told() -> None:
    """By the stage that has the numbers, and by one that is handed on what it did."""
    model, inputs = whole_and_inputs(Turning)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    first = split(model, plan, inputs=inputs, rank=0)[0]
    second = split(model, plan, inputs=inputs, rank=1)[1]
    value, shape = first(inputs)
    assert second(value, shape).shape == (2, 5, 16)
    with pytest.raises(PipelineError, match="its way must be the same"):
        first(torch.cat([inputs, inputs], 1))
    with pytest.raises(PipelineError, match="its way must be the same"):
        second(value, shape.new_empty(0, 2, 10))


def loss_of(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(
    make: Callable[[], nn.Module], names: list[str], vocabulary: int
) -> dict[str, float]:
    """By schedule, how far losses and gradients of a step are from those of one process."""
    found = {}
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(vocabulary, (16, 6), generator=generator)
    targets = torch.randint(vocabulary, (16, 6), generator=generator)
    whole = make()
    losses = []
    for x, y in zip(inputs.chunk(8), targets.chunk(8), strict=True):
        loss = loss_of(whole(x), y)
        (loss / 8).backward()
        losses.append(loss.detach())
    alone = dict(whole.named_parameters(remove_duplicate=False))
    for name in names:
        plan = program(name, ranks=2, microbatches=8)
        stages = split(make(), plan, inputs=inputs[:2])
        ours = Pipeline(plan, stages, loss_of).step(inputs, targets)
        apart = [0.0]
        if ours is not None:
            apart.append(float((ours - torch.stack(losses)).abs().max()))
        for stage in stages.values():
            for each, weight in stage.named_parameters():
                expected = alone[each].grad
                assert (weight.grad is None) == (expected is None), each
                if expected is not None:
                    apart.append(float((weight.grad - expected).abs().max()))
        found[name] = max(apart)
    return found


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Masked, Skipping, Weighted, Placed, Twice, Reaching])
def test_they_train_in_a_pipeline(run_ranks: Run, kind: type[nn.Module]) -> None:
    """Masks without gradients, values that pass through stages, and tensors without numbers are on
    their way; forwards run again, backwards are split.
    """
    names = ["1f1b", "zb_v", "1f1b_recompute"]
    results = run_ranks(trained, 2, partial(model_of, kind), names, 16).results()
    for found in results:
        assert found.keys() == {*names}
        assert max(found.values()) < 1e-6


#: Models of transformers that do something between their blocks, with their sizes.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def of_transformers(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config).eval()


def families(names: list[str]) -> dict[str, float]:
    found = {}
    for family in names:
        make = partial(of_transformers, family)
        found |= {
            f"{family} {schedule}": apart
            for schedule, apart in trained(make, ["1f1b", "zb_v"], 64).items()
        }
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["bloom", "gemma2"], id="bloom, gemma2"),
        pytest.param(["gpt2", "granite", "opt"], marks=pytest.mark.large, id="gpt2 …"),
        pytest.param(
            ["mpt", "cohere", "xglm", "mamba"], marks=pytest.mark.large, id="mpt …"
        ),
    ],
)
def test_models_of_transformers_are_cut_as_they_are(
    run_ranks: Run, names: list[str]
) -> None:
    """By `split(model, plan)` with a microbatch, without a list of blocks, and with outputs that
    are no tensors but what transformers returns.
    """
    for found in run_ranks(families, 2, names).results():
        assert max(found.values()) < 1e-6
