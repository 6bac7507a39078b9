"""What a model does with values that its ops and the arguments of its blocks do not show: functions
of autograd, random numbers, hooks, what blocks keep. Stages do it as the model does, or the model is
refused with its line.
"""

import copy
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn

from schedlang import compile
from schedlang.runtime import PipelineError, split
from tests.runtime.test_between_blocks import (
    WIDTH,
    Layer,
    Model,
    assert_stages_do_together_what_it_does,
    whole_and_inputs,
)


class Weigh(torch.autograd.Function):
    """Its gradient is none of what its forward computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, weights = ctx.saved_tensors
        return gradients[0] * x * weights, None


class Applying(Model):
    """A function of autograd lies between layers, and takes a mask (gradient reversal, rounding
    with gradients straight through).
    """

    def forward(self, tokens: Tensor) -> Tensor:
        weights = (tokens != 3).float().unsqueeze(-1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = Weigh.apply(layer(x)[0], weights)
        return self.head(x)


class Drawing(Model):
    """Random numbers are drawn once, and all layers and the head take them (one mask of dropout
    for all layers, the noise of a diffusion model).
    """

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.empty(len(tokens), 1, WIDTH).bernoulli_(0.5)
        noise = torch.randn(*tokens.shape, WIDTH)
        x = self.embed(tokens) + noise
        for layer in self.layers:
            x = layer(x, mask)[0] * mask
        return self.head(x - noise)


class Renewing(Model):
    """The first forward makes a part anew (the attention of BigBird)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_new = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))[0]
        if self.is_new:
            self.part = nn.Identity(Layer())
            self.is_new = False
        for layer in self.layers[1:]:
            x = layer(x)[0]
        return self.head(x)


class Hooking(Model):
    """Hooks change gradients between layers, and what the whole model is given and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda model, given: ((given[0] + 1) % 16,))
        self.register_forward_hook(lambda model, given, output: 2 * output)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient / 2)
        return self.head(x)


class Asking(Model):
    """Python asks whether gradients are on, and whether a value has one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
            if torch.is_grad_enabled():
                x = x * 0.5
            if x.requires_grad:
                x = x + 1
        return self.head(x)


class Compiled(Model):
    """Layers are compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="eager")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "kind", [Applying, Drawing, Renewing, Hooking, Asking, Compiled]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_stages_do_together_what_the_model_does(
    kind: type[nn.Module], ranks: int
) -> None:
    model, inputs = whole_and_inputs(kind)
    assert_stages_do_together_what_it_does(model, inputs, ranks)


def test_hooks_of_the_whole_model_know_its_mode() -> None:
    model, inputs = whole_and_inputs(Model)
    model.register_forward_hook(
        lambda model, given, output: output * (2 if model.training else 3)
    )
    whole = copy.deepcopy(model).eval()
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    first, second = (
        split(model, plan, inputs=inputs, rank=rank)[rank].eval() for rank in range(2)
    )
    assert torch.equal(second(first(inputs)), whole(inputs))


class Averaging(Model):
    """A buffer of the model is replaced in each forward, and an attribute is kept for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.log = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        self.mean = 0.5 * self.mean + x.detach().mean((0, 1))
        self.log = x.detach().square().mean()
        return self.head(x - self.mean)


def test_what_a_forward_keeps_has_data() -> None:
    """In the stage that computes it; in others it stays as it was."""
    model, inputs = whole_and_inputs(Averaging)
    whole = copy.deepcopy(model)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    first, second = (
        split(model, plan, inputs=inputs, rank=rank)[rank] for rank in range(2)
    )
    for _ in range(2):
        expected = whole(inputs)
        assert torch.equal(second(first(inputs)), expected)
    assert second.mean.equal(whole.mean)
    assert second.log.equal(whole.log)
    assert not first.mean.any()
    assert not first.log.any()


class OfLayers(Model):
    """A model of layers of one kind."""

    kind: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(4))


class KeepingLayer(Layer):
    """A layer of experts keeps its loss in an attribute."""

    loss: Tensor | None = None

    def forward(self, x: Tensor, *given: Any) -> tuple[Tensor, None]:
        y, _ = super().forward(x)
        self.loss = y.square().mean()
        return y, None


class Keeping(OfLayers):
    kind = KeepingLayer

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x + sum(each.loss for each in self.layers if each.loss is not None)


class AppendingLayer(Layer):
    def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, None]:
        states.append(x.mean())
        return super().forward(x)


class Appending(OfLayers):
    """Layers put something into a list that they are given."""

    kind = AppendingLayer

    def forward(self, tokens: Tensor) -> Tensor:
        states: list[Tensor] = []
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, states)[0]
        return self.head(x) + sum(states)


#: What layers and models keep where others find it.
KEPT: dict[str, Tensor] = {}


class SharingLayer(Layer):
    """Layers read what the first one has kept where all of them find it."""

    def forward(self, x: Tensor, *given: Any) -> tuple[Tensor, None]:
        y, _ = super().forward(x)
        return y + KEPT.setdefault("first", y), None


class Sharing(OfLayers):
    kind = SharingLayer

    def forward(self, tokens: Tensor) -> Tensor:
        KEPT.clear()
        return super().forward(tokens)


class PlacedLayer(Layer):
    def forward(self, x: Tensor, *given: Any) -> tuple[Tensor, None]:
        y, _ = super().forward(x)
        return y * KEPT["mask"], None


class Placing(OfLayers):
    """The model puts a mask where its layers find it."""

    kind = PlacedLayer

    def forward(self, tokens: Tensor) -> Tensor:
        KEPT["mask"] = (tokens != 3).unsqueeze(-1)
        return super().forward(tokens)


@dataclass
class Output:
    logits: Tensor


class Wrapping(Model):
    """What is returned is of a class that torch does not know."""

    def forward(self, tokens: Tensor) -> Output:
        return Output(super().forward(tokens))


class Recurrent(Model):
    """The next forward begins with what this one has come to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 5, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.state
        for layer in self.layers:
            x = layer(x)[0]
        self.state = x.detach()
        return self.head(x)


class Generating(Model):
    """Noise comes from a generator of the model's own, behind each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            noise = torch.randn(*tokens.shape, WIDTH, generator=self.generator)
            x = layer(x)[0] + noise
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Keeping, "makes a tensor that the model uses"),
        (Appending, "changes a list or a dictionary"),
        (Sharing, r"makes a tensor that block `layers\.1` uses"),
        (Placing, "that the model does not give it"),
        (Recurrent, r"changes its `state` behind block `layers\.3`, and reads it"),
        (Generating, "from a generator of its own behind a block"),
        (Wrapping, r"a `Output`, .* `torch\.export\.register_dataclass\(Output\)`"),
    ],
)
def test_what_another_stage_would_not_have_is_told(
    kind: type[nn.Module], told: str
) -> None:
    model, inputs = whole_and_inputs(kind)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    with pytest.raises(PipelineError, match=told) as caught:
        split(model, plan, inputs=inputs, rank=0)
    has_line = f"{__file__}:" in str(caught.value)
    assert has_line == (kind not in (Recurrent, Wrapping))


class Annealed(Model):
    """A number that counts forwards at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens) / (1 + self.count)
        self.count += 1
        return x


def test_a_number_that_earlier_stages_do_not_see_change_is_told() -> None:
    model, inputs = whole_and_inputs(Annealed)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    with pytest.warns(UserWarning, match="changes its `count` behind block `head`"):
        split(model, plan, inputs=inputs, rank=0)


class HookingLate(Model):
    """A hook is put on what the first layer has returned, behind the last one."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.layers[0](self.embed(tokens))[0]
        for layer in self.layers[1:]:
            x = layer(x)[0]
        first.register_hook(lambda gradient: gradient / 2)
        return self.head(x)


def test_a_hook_in_another_stage_is_told() -> None:
    model, inputs = whole_and_inputs(HookingLate)
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    first, second = (
        split(model, plan, inputs=inputs, rank=rank)[rank] for rank in range(2)
    )
    value = first(inputs)
    with pytest.raises(PipelineError, match="an earlier stage makes") as caught:
        second(value)
    assert f"{__file__}:" in str(caught.value)


def test_a_hook_of_the_whole_model_is_no_part_of_a_chain() -> None:
    """Every stage would call it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model.register_forward_pre_hook(lambda model, given: (2 * given[0],))
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    first = split(model, plan, rank=0)[0]
    with pytest.raises(PipelineError, match="or give `inputs`"):
        first(torch.randn(2, WIDTH))
