"""Layers as they stand in many models, with what is peculiar to their forward or backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    spectral_norm,
    weight_norm,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.models.model import (
    LENGTH,
    WIDTH,
    Does,
    Model,
    chain,
    feature,
    linear,
    rows,
    weight,
)

#: With so many rows and columns a split backward leaves the weights of a linear layer to W.
LONG = 16
WIDE = 192


@feature("layers")
def linear_layers(stages: int) -> Model:
    """Linear layers and tanh"""
    return chain(lambda _: linear(), stages)


@feature("layers")
def wide_linear(stages: int) -> Model:
    """Linear layers that are wide enough for a split backward to leave them to W"""
    return chain(lambda _: linear(WIDE), stages, batch=rows(LONG, WIDE))


@feature("layers")
def norms(stages: int) -> Model:
    """LayerNorm, RMSNorm and GroupNorm around a linear layer"""

    def stage(_: int) -> nn.Module:
        group = Does(
            lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2),
            norm=nn.GroupNorm(2, WIDTH),
        )
        return nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.RMSNorm(WIDTH), group)

    return chain(stage, stages)


def channels_first(inner: nn.Module) -> nn.Module:
    return Does(
        lambda self, x: self.inner(x.transpose(1, 2)).transpose(1, 2), inner=inner
    )


@feature("layers")
def batch_norm(stages: int) -> Model:
    """BatchNorm, whose running statistics are buffers"""
    return chain(
        lambda _: nn.Sequential(linear(), channels_first(nn.BatchNorm1d(WIDTH))), stages
    )


@feature("layers")
def batch_norm_in_evaluation_mode(stages: int) -> Model:
    """BatchNorm whose statistics stay as they are, as in detection models"""
    frozen = lambda: channels_first(nn.BatchNorm1d(WIDTH).eval())  # noqa: E731

    def keep(module: nn.Module) -> nn.Module:
        # `train()` of the whole model leaves it as it is.
        module.train = lambda mode=True: module  # type: ignore[method-assign]
        return module

    return chain(lambda _: nn.Sequential(linear(), keep(frozen())), stages)


class Residual(nn.Module):
    """A block of a ResNet: convolutions, BatchNorm, and ReLU in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        # In place, on what the addition before has made: autograd counts versions of it.
        out += x
        return self.relu(out)


@feature("layers", not_for={"slices"})
def residual_blocks(stages: int) -> Model:
    """The blocks of a ResNet: convolutions, BatchNorm, and ReLU in place"""
    return chain(lambda _: Residual(4), stages, batch=rows(4, 6, 6))


@feature("layers", not_for={"slices"})
def channels_last(stages: int) -> Model:
    """Images in the memory format channels_last"""

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        inputs, targets = rows(4, 6, 6)(step, microbatches)
        return inputs.to(memory_format=torch.channels_last), targets

    def stage(_: int) -> nn.Module:
        conv = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())
        return conv.to(memory_format=torch.channels_last)

    return chain(stage, stages, batch=draw)


@feature("layers", not_for={"slices", "skips"})
def down_and_up(stages: int) -> Model:
    """Strided and transposed convolutions, pooling and upsampling, so that shapes change"""

    def stage(number: int) -> nn.Module:
        if number == 0:
            return nn.Sequential(
                nn.Conv1d(LENGTH, 6, 3, stride=2, padding=1), nn.GELU()
            )
        if number == stages - 1:
            return nn.Sequential(
                nn.ConvTranspose1d(6, LENGTH, 2, stride=2), nn.Upsample(scale_factor=1)
            )
        return nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.MaxPool1d(3, 1, 1))

    return chain(stage, stages)


@feature("layers")
def gru(stages: int) -> Model:
    """GRU"""
    return chain(
        lambda _: Does(
            lambda self, x: self.gru(x)[0], gru=nn.GRU(WIDTH, WIDTH, batch_first=True)
        ),
        stages,
    )


@feature("layers")
def lstm(stages: int) -> Model:
    """LSTM in two directions"""

    def stage(_: int) -> nn.Module:
        inner = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        return Does(lambda self, x: self.lstm(x)[0], lstm=inner)

    return chain(stage, stages)


@feature("layers")
def attention(stages: int) -> Model:
    """An encoder layer of torch, with attention"""
    return chain(
        lambda _: nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True
        ),
        stages,
    )


@feature("layers")
def causal_attention(stages: int) -> Model:
    """scaled_dot_product_attention of one fused projection, cut into views"""

    def attend(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return chain(lambda _: Does(attend, project=nn.Linear(WIDTH, 3 * WIDTH)), stages)


@feature("layers")
def old_weight_norm(stages: int) -> Model:
    """torch.nn.utils.weight_norm, which sets the weight in a forward pre-hook"""

    def stage(_: int) -> nn.Module:
        with warnings_off():
            return nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    return chain(stage, stages)


def warnings_off() -> Any:
    import warnings

    return warnings.catch_warnings(action="ignore")


@feature("layers")
def new_weight_norm(stages: int) -> Model:
    """weight_norm of torch.nn.utils.parametrizations"""
    return chain(
        lambda _: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()
        ),
        stages,
    )


@feature("layers")
def old_spectral_norm(stages: int) -> Model:
    """torch.nn.utils.spectral_norm, whose forward changes a buffer"""
    return chain(
        lambda _: nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
        stages,
    )


@feature("layers")
def new_spectral_norm(stages: int) -> Model:
    """spectral_norm of torch.nn.utils.parametrizations, whose forward changes a buffer"""
    return chain(
        lambda _: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()
        ),
        stages,
    )


@feature("layers")
def orthogonal(stages: int) -> Model:
    """An orthogonal parametrization"""
    return chain(
        lambda _: nn.Sequential(
            parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh()
        ),
        stages,
    )


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@feature("layers")
def cached_parametrization(stages: int) -> Model:
    """A parametrized weight that is used twice, and computed once"""

    def twice(self: Any, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.part(self.part(x).tanh())

    def stage(_: int) -> nn.Module:
        part = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(part, "weight", Symmetric())
        return Does(twice, part=part)

    return chain(stage, stages)


@feature("layers")
def pruned(stages: int) -> Model:
    """Pruned weights: a mask in a buffer, put on in a forward pre-hook"""
    return chain(
        lambda _: nn.Sequential(
            prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5), nn.Tanh()
        ),
        stages,
    )


@feature("layers")
def weight_standardization(stages: int) -> Model:
    """A weight that is standardized in every forward"""

    def standardized(self: Any, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / self.weight.std(
            1, keepdim=True
        )
        return F.linear(x, weight, self.bias).tanh()

    return chain(
        lambda _: Does(standardized, weight=weight(WIDTH, WIDTH), bias=weight(WIDTH)),
        stages,
    )


class Rounded(torch.autograd.Function):
    """Rounds; its gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@feature("layers")
def quantization_aware(stages: int) -> Model:
    """Weights and activations that are rounded, with gradients straight through"""

    def quantized(self: Any, x: Tensor) -> Tensor:
        x = Rounded.apply(x, 1 / 16)
        return F.linear(
            x, Rounded.apply(self.part.weight, 1 / 64), self.part.bias
        ).tanh()

    return chain(lambda _: Does(quantized, part=nn.Linear(WIDTH, WIDTH)), stages)


@feature("layers")
def fake_quantize(stages: int) -> Model:
    """torch's learnable fake quantization, with an observer of ranges in a buffer"""

    def quantized(self: Any, x: Tensor) -> Tensor:
        # A forward that is run again may find a wider range than it had at first.
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        scale = (self.largest / 127).float()
        weight = torch.fake_quantize_per_tensor_affine(
            self.part.weight.float(),
            scale,
            torch.zeros((), dtype=torch.int32),
            -128,
            127,
        )
        return F.linear(x, weight.double(), self.part.bias).tanh()

    return chain(
        lambda _: Does(quantized, part=nn.Linear(WIDTH, WIDTH), largest=torch.ones(())),
        stages,
        tolerance=1e-6,
    )


class Flash(torch.autograd.Function):
    """Attention that saves its inputs alone, and computes the scores again in its backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        scores = (q @ k.transpose(1, 2)).softmax(-1)
        # The derivative of a softmax, row by row.
        of_scores = gradient @ v.transpose(1, 2)
        inner = scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))
        return inner @ k, inner.transpose(1, 2) @ q, scores.transpose(1, 2) @ gradient


@feature("layers")
def own_attention_backward(stages: int) -> Model:
    """Attention by an autograd function that computes its scores again, as flash attention"""

    def attend(self: Any, x: Tensor) -> Tensor:
        return x + Flash.apply(*self.project(x).chunk(3, dim=-1))

    return chain(lambda _: Does(attend, project=nn.Linear(WIDTH, 3 * WIDTH)), stages)


class FusedLinear(torch.autograd.Function):
    """A linear layer with an own backward, which gives the gradients of its weights as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        return gradient @ weight, flat.T @ x.flatten(0, -2), flat.sum(0)


@feature("layers")
def own_linear_backward(stages: int) -> Model:
    """A linear layer by an autograd function of the script"""

    def apply(self: Any, x: Tensor) -> Tensor:
        return FusedLinear.apply(x, self.part.weight, self.part.bias).tanh()

    return chain(lambda _: Does(apply, part=nn.Linear(WIDTH, WIDTH)), stages)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@feature("layers")
def gradient_reversal(stages: int) -> Model:
    """A gradient that is turned round between two layers"""
    return chain(
        lambda _: Does(
            lambda self, x: self.b(Reversed.apply(self.a(x))), a=linear(), b=linear()
        ),
        stages,
    )


@feature("layers", draws=True)
def checkpoint_without_reentry(stages: int) -> Model:
    """torch.utils.checkpoint, use_reentrant=False, around dropout"""
    inner = lambda: nn.Sequential(linear(), nn.Dropout(0.3), linear())  # noqa: E731
    return chain(
        lambda _: Does(
            lambda self, x: checkpoint(self.inner, x, use_reentrant=False),
            inner=inner(),
        ),
        stages,
    )


@feature("layers", draws=True)
def reentrant_checkpoint(stages: int) -> Model:
    """torch.utils.checkpoint, use_reentrant=True, around dropout"""
    inner = lambda: nn.Sequential(linear(), nn.Dropout(0.3), linear())  # noqa: E731
    return chain(
        lambda _: Does(
            lambda self, x: checkpoint(self.inner, self.first(x), use_reentrant=True),
            first=linear(),
            inner=inner(),
        ),
        stages,
    )


@feature("layers", draws=True)
def dropout(stages: int) -> Model:
    """Dropout"""
    return chain(lambda _: nn.Sequential(linear(), nn.Dropout(0.3)), stages)


@feature("layers")
def experts(stages: int) -> Model:
    """A mixture of experts: each row goes to one, and some get none"""

    def route(self: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (picked,) = (chosen == number).nonzero(as_tuple=True)
            # An expert without rows makes no part of the graph, so its weights have no gradient.
            if len(picked):
                out = out.index_add(
                    0, picked, expert(flat[picked]) * weights[picked, None]
                )
        return x + out.view_as(x)

    def stage(_: int) -> nn.Module:
        return Does(
            route,
            router=nn.Linear(WIDTH, 6),
            experts=nn.ModuleList(linear() for _ in range(6)),
        )

    return chain(stage, stages)


@feature("layers", draws=True)
def stochastic_depth(stages: int) -> Model:
    """A block that is left out at random, so that its weights have no gradient then"""

    def maybe(self: Any, x: Tensor) -> Tensor:
        return x + self.part(x) if torch.rand(()) < 0.5 else self.other(x)

    return chain(lambda _: Does(maybe, part=linear(), other=linear()), stages)


@feature("layers")
def module_twice(stages: int) -> Model:
    """A module that a stage calls twice"""
    return chain(
        lambda _: Does(lambda self, x: self.part(self.part(x)), part=linear()), stages
    )


@feature("layers")
def tied_inside_a_stage(stages: int) -> Model:
    """Two layers of a stage that have one weight, under two names"""

    def stage(_: int) -> nn.Module:
        first = linear()
        second = linear()
        second[0].weight = first[0].weight
        return nn.Sequential(first, second)

    return chain(stage, stages)


@feature("layers")
def saved_on_the_host(stages: int) -> Model:
    """torch.autograd.graph.save_on_cpu around a layer"""

    def saved(self: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.part(x)

    return chain(lambda _: Does(saved, part=linear()), stages)


@feature("layers")
def frozen_for_a_call(stages: int) -> Model:
    """A layer that is called twice, and frozen for the second call"""

    def twice(self: Any, x: Tensor) -> Tensor:
        y = self.part(x)
        self.part.requires_grad_(False)
        z = self.part(y)
        self.part.requires_grad_(True)
        return y + z

    return chain(lambda _: Does(twice, part=linear()), stages)


@feature("layers")
def frozen_by_the_third_call(stages: int) -> Model:
    """A layer that its third call freezes for good, beside one that is trained on"""

    def count(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.part.requires_grad_(False)
        return self.other(x) + self.part(x)

    return chain(lambda _: Does(count, part=linear(), other=linear(), calls=0), stages)


@feature("layers")
def thawed_by_the_third_call(stages: int) -> Model:
    """A layer that is frozen, and that its third call thaws, beside one that is trained"""

    def count(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.part.requires_grad_(True)
        return self.other(x) + self.part(x)

    def stage(_: int) -> nn.Module:
        part = linear().requires_grad_(False)
        return Does(count, part=part, other=linear(), calls=0)

    return chain(stage, stages)


@feature("layers")
def frozen_by_a_gradient_hook(stages: int) -> Model:
    """A layer that a hook of another one's gradient freezes for good"""

    def stage(_: int) -> nn.Module:
        made = Does(
            lambda self, x: self.other(x) + self.part(x), part=linear(), other=linear()
        )
        freeze = lambda _: made.part.requires_grad_(False) and None  # noqa: E731
        made.other[0].weight.register_hook(freeze)  # type: ignore[operator]
        return made

    return chain(stage, stages)


@feature("layers")
def matrix_products(stages: int) -> Model:
    """Weights in matmul, einsum, bmm, and broadcast products and sums"""

    def products(self: Any, x: Tensor) -> Tensor:
        x = torch.einsum("rlw,wv->rlv", x @ self.a, self.b).tanh()
        return torch.bmm(x, self.c.expand(len(x), -1, -1)) * self.scale + self.shift

    return chain(
        lambda _: Does(
            products,
            a=weight(WIDTH, WIDTH),
            b=weight(WIDTH, WIDTH),
            c=weight(WIDTH, WIDTH),
            scale=weight(WIDTH),
            shift=weight(WIDTH),
        ),
        stages,
    )


@feature("layers")
def layers_by_other_calls(stages: int) -> Model:
    """Layers with keyword arguments, in lists, in place, and with weights first"""

    def calls(self: Any, x: Tensor) -> Tensor:
        x = F.linear(input=x, weight=self.a, bias=self.shift)
        x = torch.einsum("rlw,wv->rlv", [x, self.b]).tanh()
        x = torch.matmul(self.c, x.mT).mT
        x = torch.add(self.shift, x, alpha=2).tanh()
        flat = torch.addmm(self.scale, x.flatten(0, 1), mat2=self.d, beta=0.5)
        return flat.view_as(x).mul_(self.scale).add_(self.shift)

    def stage(_: int) -> nn.Module:
        square = {name: weight(WIDTH, WIDTH) for name in "abcd"}
        return Does(calls, scale=weight(WIDTH), shift=weight(WIDTH), **square)

    return chain(stage, stages)


@feature("layers")
def weight_in_a_layer_and_beside(stages: int) -> Model:
    """A weight that a layer has, and that is used by itself as well"""

    def both(self: Any, x: Tensor) -> Tensor:
        matrix = self.part.weight
        y = (
            self.part(x) @ matrix
            + matrix.square().sum() * 0.01
            + matrix.diagonal().exp()
        )
        return (y + self.part.bias).tanh()

    return chain(lambda _: Does(both, part=nn.Linear(WIDTH, WIDTH)), stages)


@feature("layers", not_for={"slices", "skips"})
def convolutions(stages: int) -> Model:
    """Convolutions of one, two and three dimensions, grouped, dilated, and transposed"""

    def convolve(self: Any, x: Tensor) -> Tensor:
        x = self.one(x).tanh()
        x = self.two(x.unsqueeze(1)).tanh()
        x = self.three(x.unsqueeze(1)).tanh().squeeze(1)
        return self.back(self.flat(x).squeeze(1))

    def stage(_: int) -> nn.Module:
        return Does(
            convolve,
            one=nn.Conv1d(LENGTH, LENGTH, 3, padding="same", groups=2),
            two=nn.Conv2d(1, 2, 3, padding=2, dilation=2, bias=False),
            three=nn.Conv3d(1, 1, 3, padding=1, padding_mode="circular"),
            flat=nn.ConvTranspose2d(2, 1, 3, padding=1),
            back=nn.ConvTranspose1d(LENGTH, LENGTH, 1),
        )

    return chain(stage, stages)


@feature("layers")
def other_norms(stages: int) -> Model:
    """InstanceNorm with running statistics, a bilinear layer, PReLU"""

    def stage(_: int) -> nn.Module:
        norm = channels_first(
            nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
        )
        pair = Does(
            lambda self, x: self.pair(x, x.tanh()),
            pair=nn.Bilinear(WIDTH, WIDTH, WIDTH),
        )
        return nn.Sequential(linear(), norm, pair, nn.PReLU())

    return chain(stage, stages)


@feature("layers", not_for={"slices", "skips"})
def weighted_bags(stages: int) -> Model:
    """An EmbeddingBag with a weight for each word"""

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        words = torch.randint(11, (2 * microbatches, LENGTH), generator=generator)
        return words, rows(WIDTH)(step, microbatches)[1]

    def bag(self: Any, words: Tensor) -> Tensor:
        return self.part(
            self.bag(words, per_sample_weights=self.weights.expand(len(words), -1))
        )

    first = Does(
        bag,
        part=linear(),
        bag=nn.EmbeddingBag(11, WIDTH, mode="sum"),
        weights=weight(LENGTH),
    )
    return chain(lambda number: linear() if number else first, stages, batch=draw)


class Doubling(TorchFunctionMode):
    """Doubles what every linear layer makes."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is F.linear else result


@feature("layers")
def function_mode_inside(stages: int) -> Model:
    """A TorchFunctionMode in the forward, which changes linear layers"""

    def changed(self: Any, x: Tensor) -> Tensor:
        with Doubling():
            return self.part(x)

    return chain(lambda _: Does(changed, part=linear()), stages)


@feature("layers")
def function_mode_around(stages: int) -> Model:
    """A TorchFunctionMode around the step, which changes linear layers"""
    return chain(lambda _: nn.Sequential(linear(), linear()), stages, around=Doubling)


@feature("layers")
def saved_on_the_host_around(stages: int) -> Model:
    """torch.autograd.graph.save_on_cpu around the step"""
    return chain(lambda _: linear(), stages, around=torch.autograd.graph.save_on_cpu)


def rounding_what_is_saved() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.float() if tensor.is_floating_point() else tensor,
        lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
    )


@feature("layers")
def activations_compressed(stages: int) -> Model:
    """Saved activations that a hook rounds to float32"""

    def compressed(self: Any, x: Tensor) -> Tensor:
        with rounding_what_is_saved():
            return self.part(x)

    return chain(
        lambda _: Does(compressed, part=nn.Sequential(linear(), linear())), stages
    )


@feature("layers")
def anomaly_detection(stages: int) -> Model:
    """torch.autograd.detect_anomaly around the step"""
    around = lambda: torch.autograd.set_detect_anomaly(True)  # noqa: E731
    return chain(lambda _: linear(), stages, around=around)


@feature("layers")
def functional_weights(stages: int) -> Model:
    """Layers whose weights are views and sums of others"""

    def views(self: Any, x: Tensor) -> Tensor:
        a, b = self.both.chunk(2)
        return F.linear(F.linear(x, a).tanh(), b + self.more.T).tanh()

    return chain(
        lambda _: Does(views, both=weight(2 * WIDTH, WIDTH), more=weight(WIDTH, WIDTH)),
        stages,
    )


@feature("layers")
def functional_call_inside(stages: int) -> Model:
    """torch.func.functional_call with weights that a small network makes"""

    def call(self: Any, x: Tensor) -> Tensor:
        scale = self.maker(x.mean((0, 1))).tanh()
        weights = {"weight": self.part.weight * scale[:, None], "bias": scale}
        return torch.func.functional_call(self.part, weights, (x,)).tanh()

    return chain(
        lambda _: Does(
            call, part=nn.Linear(WIDTH, WIDTH), maker=nn.Linear(WIDTH, WIDTH)
        ),
        stages,
    )


@feature("layers")
def vmap_inside(stages: int) -> Model:
    """torch.func.vmap over a layer with weights"""

    def mapped(self: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.part(row).tanh())(x)

    return chain(lambda _: Does(mapped, part=nn.Linear(WIDTH, WIDTH)), stages)


@feature("layers")
def jacobian_inside(stages: int) -> Model:
    """torch.func.jvp in the forward"""

    def differentiated(self: Any, x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(
            lambda y: self.part(y).tanh(), (x,), (torch.ones_like(x),)
        )
        return value + tangent

    return chain(lambda _: Does(differentiated, part=nn.Linear(WIDTH, WIDTH)), stages)


@feature("layers")
def gradient_in_the_forward(stages: int) -> Model:
    """A gradient of a gradient: torch.autograd.grad with create_graph in the forward"""

    def forces(self: Any, x: Tensor) -> Tensor:
        # The first stage's input has no gradient, and one by it is wanted.
        y = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.part(y).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return x + force

    return chain(lambda _: Does(forces, part=linear()), stages)


@feature("layers")
def gradient_wide(stages: int) -> Model:
    """A gradient of a gradient, of layers that a split backward leaves to W"""

    def forces(self: Any, x: Tensor) -> Tensor:
        y = x if x.requires_grad else x.detach().requires_grad_()
        energy = (self.part(y) @ self.weight).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return x + force

    return chain(
        lambda _: Does(forces, part=linear(), weight=weight(WIDTH, WIDTH)), stages
    )


@feature("layers")
def gradient_of_weights(stages: int) -> Model:
    """A gradient by the stage's own weights in the forward, with create_graph"""

    def penalized(self: Any, x: Tensor) -> Tensor:
        y = (self.part(x) @ self.weight).tanh()
        (slope,) = torch.autograd.grad(y.square().sum(), self.weight, create_graph=True)
        return y + 0.1 * slope.sum(0)

    return chain(
        lambda _: Does(penalized, part=linear(), weight=weight(WIDTH, WIDTH)), stages
    )


@feature("layers")
def loss_of_its_own(stages: int) -> Model:
    """A layer that is trained by a loss of its own, with backward() in the forward"""

    def trained(self: Any, x: Tensor) -> Tensor:
        y = (self.part(x.detach()) @ self.weight).tanh()
        if y.requires_grad:
            y.square().mean().backward()
        return x + y.detach()

    def stage(_: int) -> nn.Module:
        own = Does(trained, part=linear(), weight=weight(WIDTH, WIDTH))
        return nn.Sequential(linear(), own, linear())

    return chain(stage, stages)


@feature("layers")
def gradient_in_a_checkpoint(stages: int) -> Model:
    """A gradient of a gradient inside a checkpoint, which is run again in the backward"""

    def forces(self: Any, x: Tensor) -> Tensor:
        energy = (self.part(x) @ self.weight).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + force

    def checkpointed(self: Any, x: Tensor) -> Tensor:
        y = x if x.requires_grad else x.detach().requires_grad_()
        return checkpoint(forces, self, y, use_reentrant=False)

    return chain(
        lambda _: Does(checkpointed, part=linear(), weight=weight(WIDTH, WIDTH)), stages
    )


@feature("layers")
def fixed_point(stages: int) -> Model:
    """Steps along a gradient in the forward, without a graph of them, in a checkpoint"""

    def steps(self: Any, x: Tensor) -> Tensor:
        z = x.detach()
        with torch.enable_grad():
            for _ in range(2):
                z.requires_grad_()
                energy = (self.part(z) @ self.weight).square().sum()
                z = (z - 0.1 * torch.autograd.grad(energy, z)[0]).detach()
        return x + (self.part(z) @ self.weight)

    def checkpointed(self: Any, x: Tensor) -> Tensor:
        return checkpoint(steps, self, x, use_reentrant=False)

    return chain(
        lambda _: Does(checkpointed, part=linear(), weight=weight(WIDTH, WIDTH)), stages
    )


@feature("layers")
def compiled_block(stages: int) -> Model:
    """A block in torch.compile, backend aot_eager"""
    torch._dynamo.reset()
    return chain(
        lambda _: nn.Sequential(linear(), torch.compile(linear(), backend="aot_eager")),
        stages,
    )


@feature("layers")
def low_rank(stages: int) -> Model:
    """LoRA: a frozen layer, and two small ones beside it"""

    def adapted(self: Any, x: Tensor) -> Tensor:
        return (self.base(x) + self.up(self.down(x))).tanh()

    def stage(_: int) -> nn.Module:
        base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        return Does(
            adapted,
            base=base,
            down=nn.Linear(WIDTH, 2, bias=False),
            up=nn.Linear(2, WIDTH, bias=False),
        )

    return chain(stage, stages)


@feature("layers")
def complex_weights(stages: int) -> Model:
    """Complex weights in linear layers"""
    return _complex(stages, WIDTH, LENGTH)


@feature("layers")
def wide_complex_weights(stages: int) -> Model:
    """Complex weights in linear layers that a split backward leaves to W"""
    return _complex(stages, WIDE, LONG)


def _complex(stages: int, width: int, length: int) -> Model:
    def rotated(self: Any, x: Tensor) -> Tensor:
        y = self.first(torch.complex(x, x.roll(1, -1)))
        y = self.second(y * self.scale) @ self.third
        return x + y.real + y.imag

    def stage(_: int) -> nn.Module:
        first, second = (
            nn.Linear(width, width, dtype=torch.complex128) for _ in range(2)
        )
        return Does(
            rotated,
            first=first,
            second=second,
            scale=nn.Parameter(torch.randn(width, dtype=torch.complex128)),
            third=nn.Parameter(
                torch.randn(width, width, dtype=torch.complex128) / width
            ),
        )

    return chain(stage, stages, batch=rows(length, width))
