"""What scripts do with a model: optimizers, precision, accumulation, averages, evaluation."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.models.families.gradients import Product
from tests.models.model import (
    WIDTH,
    Does,
    Model,
    Side,
    chain,
    feature,
    linear,
    mean_square,
    rows,
    sgd,
    trained,
)

BFLOAT16 = partial(torch.autocast, "cpu", torch.bfloat16)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), linear(), Product())


def _with(optimizer: Any, **options: Any) -> Any:
    def make(stages: int) -> Model:
        own = lambda module: optimizer(trained(module), **options)  # noqa: E731
        return chain(lambda _: normed(), stages, optimizer=own)

    return make


@feature("training")
def adamw(stages: int) -> Model:
    """AdamW"""
    return _with(torch.optim.AdamW, lr=0.01)(stages)


@feature("training")
def fused_adamw(stages: int) -> Model:
    """AdamW, fused=True"""
    return _with(torch.optim.AdamW, lr=0.01, fused=True)(stages)


@feature("training")
def foreach_adam(stages: int) -> Model:
    """Adam, foreach=True, amsgrad"""
    return _with(torch.optim.Adam, lr=0.01, foreach=True, amsgrad=True)(stages)


@feature("training")
def fused_sgd(stages: int) -> Model:
    """SGD, fused=True, with Nesterov's momentum"""
    return _with(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True)(
        stages
    )


@feature("training")
def adafactor(stages: int) -> Model:
    """Adafactor, whose state is made of rows and columns"""
    # By default it divides by a gradient however small, as that of an attention's key bias, which is
    # nothing but rounding.
    return _with(torch.optim.Adafactor, lr=0.01, eps=(1e-8, 1e-3))(stages)


@feature("training")
def options_by_parameter(stages: int) -> Model:
    """Weight decay for matrices only, and another learning rate for biases"""

    def optimizer(module: nn.Module) -> Optimizer:
        matrices = [each for each in module.parameters() if each.ndim > 1]
        others = [each for each in module.parameters() if each.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "lr": 0.01},
        ]
        return torch.optim.SGD(groups, 0.1, momentum=0.9)

    return chain(lambda _: normed(), stages, optimizer=optimizer)


@feature("training")
def decay_of_unused_weights(stages: int) -> Model:
    """Weight decay where some weights have no gradient"""
    return chain(
        lambda _: Does(lambda self, x: self.part(x), part=linear(), unused=linear()),
        stages,
        # The gradient of some biases, as of the keys of attention, is 0 but for rounding, of which
        # Adam makes steps: with a rate of 0.1, they would look like a difference.
        optimizer=lambda module: torch.optim.AdamW(
            trained(module), 0.01, weight_decay=0.5
        ),
    )


@feature("training")
def learning_rate_schedule(stages: int) -> Model:
    """A schedule of learning rates, a step of it after each update"""

    def script(side: Side) -> None:
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.5)
            for each in side.optimizers
        ]
        for step in range(3):
            side.train(step)
            side.update()
            for each in schedulers:
                each.step()

    return chain(lambda _: normed(), stages, script=script)


@feature("training")
def accumulation(stages: int) -> Model:
    """Gradients of two batches add up before each update"""

    def script(side: Side) -> None:
        for step in range(4):
            side.train(step)
            if step % 2:
                side.update()

    return chain(lambda _: normed(), stages, script=script)


@feature("training", draws=True)
def evaluation_between(stages: int) -> Model:
    """Evaluations between training steps, with dropout and BatchNorm"""

    def script(side: Side) -> None:
        for step in range(2):
            side.evaluate(10 + step)
            side.train(step)
            side.evaluate(20 + step)
            side.update()

    def stage(_: int) -> nn.Module:
        norm = Does(lambda self, x: self.norm(x.mT).mT, norm=nn.BatchNorm1d(WIDTH))
        return nn.Sequential(linear(), norm, nn.Dropout(0.2))

    return chain(stage, stages, script=script)


@feature("training")
def average_of_weights(stages: int) -> Model:
    """An average of weights over updates (EMA), which then takes their place"""

    def script(side: Side) -> None:
        averages = [copy.deepcopy(each) for each in side.modules]
        for step in range(3):
            side.train(step)
            side.update()
            for average, module in zip(averages, side.modules, strict=True):
                for mean, weight in zip(
                    average.parameters(), module.parameters(), strict=True
                ):
                    mean.data.lerp_(weight.data, 0.25)
        for average, module in zip(averages, side.modules, strict=True):
            module.load_state_dict(average.state_dict())

    return chain(lambda _: normed(), stages, script=script)


@feature("training")
def weights_loaded_between(stages: int) -> Model:
    """Weights that are put back to where they were after a step"""

    def script(side: Side) -> None:
        states = [copy.deepcopy(each.state_dict()) for each in side.modules]
        side.train(0)
        side.update()
        for state, module in zip(states, side.modules, strict=True):
            module.load_state_dict(state)
        side.train(1)
        side.update()

    return chain(lambda _: normed(), stages, script=script)


@feature("training")
def weights_clamped_between(stages: int) -> Model:
    """Weights that are clamped in place after each step"""

    def script(side: Side) -> None:
        for step in range(3):
            side.train(step)
            side.update()
            with torch.no_grad():
                for module in side.modules:
                    for weight in module.parameters():
                        weight.clamp_(-0.2, 0.2)

    return chain(lambda _: normed(), stages, script=script)


@feature("training")
def thawed_between(stages: int) -> Model:
    """Weights that are frozen at first, and trained from the second step on"""

    def stage(_: int) -> nn.Module:
        inner = normed()
        inner[1].requires_grad_(False)
        return inner

    def script(side: Side) -> None:
        side.train(0)
        side.update()
        for module in side.modules:
            for part in module.modules():
                part.requires_grad_(True)
        side.train(1)
        side.update()

    own = lambda module: torch.optim.SGD(module.parameters(), 0.1)  # noqa: E731
    return chain(stage, stages, script=script, optimizer=own)


@feature("training")
def gradients_kept_as_zeros(stages: int) -> Model:
    """zero_grad(set_to_none=False)"""

    def optimizer(module: nn.Module) -> Optimizer:
        made = sgd(module)
        made.zero_grad = partial(Optimizer.zero_grad, made, set_to_none=False)  # type: ignore[method-assign]
        return made

    return chain(lambda _: normed(), stages, optimizer=optimizer)


@feature("training")
def scaled_loss(stages: int) -> Model:
    """A loss that is scaled up, and gradients that a hook of the optimizer scales down"""

    def optimizer(module: nn.Module) -> Optimizer:
        made = sgd(module)

        def scale_down(*_: object) -> None:
            for weight in module.parameters():
                if weight.grad is not None:
                    weight.grad /= 1024

        made.register_step_pre_hook(scale_down)
        return made

    return chain(lambda _: normed(), stages, optimizer=optimizer, loss_scale=1024.0)


@feature("training", not_for={"updates"})
def gradient_scaler(stages: int) -> Model:
    """torch.amp.GradScaler"""
    # Its scale grows after each step.
    scaler = partial(torch.amp.GradScaler, "cpu", 1024.0, growth_interval=1)
    return chain(lambda _: normed(), stages, scaler=scaler)


def to_float(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output.float(), target.float())


def _typed(dtype: torch.dtype, stages: int, tolerance: float) -> Model:
    return chain(
        lambda _: normed().to(dtype),
        stages,
        batch=rows(4, WIDTH, dtype=dtype),
        loss=to_float,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1),
        tolerance=tolerance,
    )


@feature("training")
def in_float32(stages: int) -> Model:
    """float32"""
    return _typed(torch.float32, stages, 1e-4)


@feature("training")
def in_bfloat16(stages: int) -> Model:
    """bfloat16"""
    return _typed(torch.bfloat16, stages, 0.05)


class Wide(Optimizer):
    """SGD for weights of 16 bits with gradients of 32."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.copy_(weight.float() - group["lr"] * weight.grad)


@feature("training")
def gradients_in_float32(stages: int) -> Model:
    """bfloat16 whose gradients add up in float32 (`grad_dtype`)"""

    def stage(_: int) -> nn.Module:
        made = linear().bfloat16()
        for weight in made.parameters():
            weight.grad_dtype = torch.float32
        return made

    return chain(
        stage,
        stages,
        batch=rows(4, WIDTH, dtype=torch.bfloat16),
        loss=to_float,
        optimizer=lambda module: Wide(trained(module)),
        tolerance=1e-4,
    )


@feature("training")
def in_float16(stages: int) -> Model:
    """float16"""
    return _typed(torch.float16, stages, 0.01)


@feature("training")
def norms_in_float32(stages: int) -> Model:
    """bfloat16 with norms in float32"""

    def stage(_: int) -> nn.Module:
        cast = lambda self, x: self.part(self.norm(x.float()).bfloat16())  # noqa: E731
        return Does(cast, norm=nn.LayerNorm(WIDTH).float(), part=linear().bfloat16())

    return chain(
        stage,
        stages,
        batch=rows(4, WIDTH, dtype=torch.bfloat16),
        loss=to_float,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1),
        tolerance=0.05,
    )


def in_float(stages: int, part: Any, **how: Any) -> Model:
    """Weights in float32, which autocast casts; no momentum, that would make rounding larger."""
    return chain(
        lambda _: part().float(),
        stages,
        batch=rows(4, WIDTH, dtype=torch.float32),
        loss=to_float,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1),
        tolerance=0.02,
        **how,
    )


@feature("training")
def autocast_around(stages: int) -> Model:
    """A step inside torch.autocast"""
    return in_float(stages, normed, around=BFLOAT16)


@feature("training")
def autocast_inside(stages: int) -> Model:
    """Stages that are in torch.autocast"""

    def cast(self: Any, x: Tensor) -> Tensor:
        with BFLOAT16():
            return self.part(x)

    return in_float(stages, lambda: Does(cast, part=normed()))


@feature("training")
def autocast_without_cache(stages: int) -> Model:
    """A step inside torch.autocast, cache_enabled=False"""
    return in_float(stages, normed, around=partial(BFLOAT16, cache_enabled=False))


class Scaled(torch.autograd.Function):
    """A product whose backward multiplies again, outside of autocast if that is where it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = gradient.float().flatten(0, -2)
        by_weight = x.float().flatten(0, -2).T @ flat
        return (gradient.float() @ weight.T).to(x.dtype), by_weight.to(weight.dtype)


@feature("training")
def autocast_and_own_backward(stages: int) -> Model:
    """A step inside torch.autocast, and an autograd function whose backward multiplies"""

    def multiply(self: Any, x: Tensor) -> Tensor:
        return Scaled.apply(self.part(x), self.last.weight)

    def part() -> nn.Module:
        return Does(multiply, part=linear(), last=Product())

    return in_float(stages, part, around=BFLOAT16)


@feature("training")
def scaled_loss_in_float16(stages: int) -> Model:
    """A step inside torch.autocast to float16, with a scaled loss"""
    return in_float(
        stages,
        normed,
        around=partial(torch.autocast, "cpu", torch.float16),
        loss_scale=256.0,
    )
