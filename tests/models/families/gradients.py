"""Where gradients go: hooks, shared weights, weights without a gradient, frozen stages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from schedlang.runtime import add_loss
from tests.models.families.state import language_model
from tests.models.model import (
    WIDTH,
    Does,
    Model,
    chain,
    feature,
    linear,
    trained,
    weight,
)


def everywhere(stages: int, add: Any) -> Model:
    """Stages with layers of all kinds that a split backward knows, changed by a function."""

    def stage(_: int) -> nn.Module:
        inner = nn.Sequential(nn.LayerNorm(WIDTH), linear(), Product())
        # What a hook notes here is compared as well.
        inner.seen = []  # type: ignore[assignment]
        return add(inner) or inner

    return chain(stage, stages)


class Product(nn.Module):
    """A matrix product, which a split backward leaves to W however small it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


class Adding(nn.Module):
    """Adds a loss of its own, of which the last stage's knows nothing."""

    def __init__(self, runs: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer = linear()
        self.runs = runs

    def _forward(self, x: Tensor) -> Tensor:
        output = self.layer(x).tanh()
        add_loss("size", output.square().mean(), weight=0.1)
        return output

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x) if self.runs is None else self.runs(self._forward, x)


@feature("gradients")
def added_loss(stages: int) -> Model:
    """Losses that stages add to that of the last one"""
    return chain(lambda _: Adding(), stages)


@feature("gradients")
def added_loss_in_a_checkpoint(stages: int) -> Model:
    """Losses that stages add within `checkpoint`, which runs their forward again"""
    return chain(lambda _: Adding(partial(checkpoint, use_reentrant=False)), stages)


@feature("gradients")
def weight_hook(stages: int) -> Model:
    """Hooks of weights that double their gradients"""

    def add(stage: nn.Module) -> None:
        for each in stage.parameters():
            each.register_hook(lambda gradient: 2 * gradient)

    return everywhere(stages, add)


# With slices, hooks of weights see the gradient of each slice.
@feature("gradients", not_for={"slices"})
def clipping_weight_hook(stages: int) -> Model:
    """Hooks of weights that clamp their gradients"""

    def add(stage: nn.Module) -> None:
        for each in stage.parameters():
            each.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))

    return everywhere(stages, add)


@feature("gradients", not_for={"slices"})
def counting_weight_hook(stages: int) -> Model:
    """Hooks of weights that count their calls"""

    def add(stage: Any) -> None:
        stage.seen = [0]
        for each in stage.parameters():

            def count(_: Tensor) -> None:
                stage.seen[0] += 1

            each.register_hook(count)

    return everywhere(stages, add)


@feature("gradients", not_for={"slices"})
def hook_of_a_shared_weight(stages: int) -> Model:
    """A hook of a weight that a stage uses twice, which is not linear"""

    def stage(_: int) -> nn.Module:
        part = linear()
        # Not linear: it must see the sum of the gradients of both uses, and not each by itself.
        part[0].weight.register_hook(
            lambda gradient: gradient.sign() * gradient.square()
        )
        return Does(
            lambda self, x: self.part(self.part(x)) @ self.part[0].weight, part=part
        )

    return chain(stage, stages)


@feature("gradients", not_for={"slices"})
def hook_after_accumulation(stages: int) -> Model:
    """Hooks of weights after their gradients have added up, which scale these"""

    def add(stage: nn.Module) -> None:
        for each in stage.parameters():

            def shrink(weight: Tensor) -> None:
                assert weight.grad is not None
                weight.grad.mul_(0.5)

            each.register_post_accumulate_grad_hook(shrink)

    return everywhere(stages, add)


@feature("gradients", not_for={"slices"})
def counting_after_accumulation(stages: int) -> Model:
    """Hooks of weights after their gradients have added up, which count their calls"""

    def add(stage: Any) -> None:
        stage.seen = [0]
        for each in stage.parameters():

            def count(_: Tensor) -> None:
                stage.seen[0] += 1

            each.register_post_accumulate_grad_hook(count)

    return everywhere(stages, add)


@feature("gradients")
def activation_hook(stages: int) -> Model:
    """Hooks of activations that scale their gradients"""

    def hooked(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 0.5 * gradient)
        return self.second(y)

    return chain(lambda _: Does(hooked, first=linear(), second=linear()), stages)


# What a skip or a slice has is the same tensor, alone.
@feature("gradients", not_for={"slices", "skips"})
def input_hook(stages: int) -> Model:
    """Hooks of a stage's input that scale its gradient"""

    def hooked(self: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.5 * gradient)
        return self.part(x)

    return chain(lambda _: Does(hooked, part=linear()), stages)


@feature("gradients")
def output_hook(stages: int) -> Model:
    """Hooks of a stage's output that scale its gradient"""

    def hooked(self: Any, x: Tensor) -> Tensor:
        y = self.part(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 0.5 * gradient)
        return y

    return chain(lambda _: Does(hooked, part=linear()), stages)


@feature("gradients")
def retained_gradient(stages: int) -> Model:
    """retain_grad of an activation, which a later hook reads"""

    def hooked(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        # Not a hook of a weight: that one would stay, and read those of microbatches under way.
        # A first forward of two has no gradients.
        if x.requires_grad and y.requires_grad:
            y.retain_grad()
            x.register_hook(lambda gradient: gradient + 0.1 * y.grad.mean())
        return self.second(y)

    def stage(number: int) -> nn.Module:
        return Does(hooked, first=linear(), second=linear()) if number else linear()

    return chain(stage, stages)


@feature("gradients")
def forward_hooks(stages: int) -> Model:
    """Forward hooks and pre-hooks of modules, which change what they see"""

    def add(stage: Any) -> None:
        stage[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        stage[1].register_forward_hook(
            lambda module, inputs, output: output + inputs[0]
        )

    return everywhere(stages, add)


@feature("gradients")
def forward_hook_of_a_stage(stages: int) -> Model:
    """A forward hook of the stage itself, which changes its output"""

    def add(stage: nn.Module) -> None:
        stage.register_forward_hook(lambda module, inputs, output: output * 1.5)

    return everywhere(stages, add)


@feature("gradients")
def backward_hooks(stages: int) -> Model:
    """Full backward hooks of modules, which change the gradient of their input"""

    def add(stage: Any) -> None:
        stage[1].register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 0.5,)
        )

    return everywhere(stages, add)


@feature("gradients")
def backward_pre_hooks(stages: int) -> Model:
    """Full backward pre-hooks of modules, which change the gradient of their output"""

    def add(stage: Any) -> None:
        stage[1].register_full_backward_pre_hook(
            lambda module, outputs: (outputs[0] * 0.5,)
        )

    return everywhere(stages, add)


@feature("gradients")
def backward_hook_of_a_stage(stages: int) -> Model:
    """A full backward hook of the stage itself, which counts and notes norms"""

    def add(stage: Any) -> nn.Module:
        stage.seen = [0]

        def count(module: Any, inputs: Any, outputs: Any) -> None:
            stage.seen[0] += 1

        stage.register_full_backward_hook(count)
        return stage

    return everywhere(stages, add)


@feature("gradients")
def backward_hook_of_a_leaf_module(stages: int) -> Model:
    """A full backward hook of a linear layer, which a split backward leaves to W"""

    def add(stage: Any) -> None:
        stage[1][0].register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 0.5,)
        )

    return everywhere(stages, add)


@feature("gradients")
def unused_weight(stages: int) -> Model:
    """A weight that no forward uses: alone it has no gradient, and stays as it is"""
    return chain(
        lambda _: Does(
            lambda self, x: self.part(x), part=linear(), unused=weight(WIDTH)
        ),
        stages,
    )


@feature("gradients")
def weight_used_now_and_then(stages: int) -> Model:
    """A weight that only some microbatches use"""

    def sometimes(self: Any, x: Tensor) -> Tensor:
        y = self.part(x)
        # Not by a sum, which behind a norm is zero but for rounding.
        return y * self.scale if x.detach().flatten()[0] > 0 else y

    return chain(lambda _: Does(sometimes, part=linear(), scale=weight(WIDTH)), stages)


@feature("gradients")
def detached_part(stages: int) -> Model:
    """A layer whose output is used without a gradient"""

    def parted(self: Any, x: Tensor) -> Tensor:
        return self.part(x) + self.other(x).detach()

    return chain(lambda _: Does(parted, part=linear(), other=linear()), stages)


@feature("gradients")
def part_without_gradients(stages: int) -> Model:
    """A layer under torch.no_grad"""

    def parted(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.other(x)
        return self.part(x) + y

    return chain(lambda _: Does(parted, part=linear(), other=linear()), stages)


@feature("gradients")
def part_in_inference_mode(stages: int) -> Model:
    """A layer in torch.inference_mode"""

    def parted(self: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = self.other(x)
        return self.part(x) + y.clone()

    return chain(lambda _: Does(parted, part=linear(), other=linear()), stages)


@feature("gradients")
def detached_input(stages: int) -> Model:
    """A last stage that detaches its input: alone, nothing before it has a gradient"""

    def stage(number: int) -> nn.Module:
        if number < stages - 1:
            return linear()
        return Does(lambda self, x: self.part(x.detach()), part=linear())

    return chain(stage, stages)


@feature("gradients")
def ignored_input(stages: int) -> Model:
    """A last stage that uses the shape of its input only"""

    def stage(number: int) -> nn.Module:
        if number < stages - 1:
            return linear()
        return Does(
            lambda self, x: torch.zeros_like(x) + self.weight, weight=weight(WIDTH)
        )

    return chain(stage, stages)


@feature("gradients")
def input_used_in_part(stages: int) -> Model:
    """Stages that use a half of their input"""
    return chain(
        lambda _: Does(
            lambda self, x: self.part(x[..., :4]).repeat(1, 1, 2), part=linear(4)
        ),
        stages,
    )


def _frozen(stages: int, numbers: Any) -> Model:
    def stage(number: int) -> nn.Module:
        return linear().requires_grad_(number not in numbers)

    return chain(stage, stages)


@feature("gradients")
def frozen_first_stage(stages: int) -> Model:
    """A first stage that is frozen"""
    return _frozen(stages, [0])


@feature("gradients")
def frozen_last_stage(stages: int) -> Model:
    """A last stage that is frozen"""
    return _frozen(stages, [stages - 1])


@feature("gradients")
def frozen_but_the_last(stages: int) -> Model:
    """All stages but the last one are frozen"""
    return _frozen(stages, range(stages - 1))


@feature("gradients")
def frozen_middle(stages: int) -> Model:
    """The second stage is frozen"""
    return _frozen(stages, [1])


@feature("gradients")
def frozen_stage_without_gradients(stages: int) -> Model:
    """A first stage that is frozen, and runs under torch.no_grad"""

    def frozen(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.part(x)

    def stage(number: int) -> nn.Module:
        return linear() if number else Does(frozen, part=linear().requires_grad_(False))

    return chain(stage, stages)


@feature("gradients")
def stage_without_weights(stages: int) -> Model:
    """A stage that has no weights"""
    return chain(lambda number: nn.Tanh() if number == 1 else linear(), stages)


@feature("gradients")
def first_stage_without_weights(stages: int) -> Model:
    """A first stage that has no weights"""
    return chain(lambda number: linear() if number else nn.Tanh(), stages)


@feature("gradients")
def some_weights_frozen(stages: int) -> Model:
    """Weights of which some are frozen in every stage"""

    def stage(_: int) -> nn.Module:
        inner = nn.Sequential(linear(), Product(), nn.LayerNorm(WIDTH))
        inner[0][0].weight.requires_grad_(False)
        inner[2].bias.requires_grad_(False)
        return inner

    return chain(stage, stages)


@feature("gradients")
def tied_embedding(stages: int) -> Model:
    """The embedding and the scores have one weight, given as tied"""
    model = _shared(stages)
    model.tied = [{0: "0.weight", stages - 1: "1.weight"}]
    return model


@feature("gradients")
def tied_embedding_decayed_in_part(stages: int) -> Model:
    """A tied weight that decays as the scores, and not as the embedding"""

    def optimizer(module: nn.Module) -> Optimizer:
        kept = [part for part in module.modules() if isinstance(part, nn.Embedding)]
        weights = [part.weight for part in kept]
        ids = set(map(id, weights))
        others = [each for each in trained(module) if id(each) not in ids]
        groups = [
            {"params": weights, "weight_decay": 0.0},
            {"params": others, "weight_decay": 0.1},
        ]
        return torch.optim.SGD([group for group in groups if group["params"]], 0.1)

    model = tied_embedding(stages)
    model.optimizer = optimizer
    return model


@feature("gradients")
def shared_by_hand(stages: int) -> Model:
    """The embedding and the scores have one weight, and nobody says so"""
    return _shared(stages)


def _shared(stages: int) -> Model:
    model = language_model(stages, nn.Embedding(11, WIDTH))
    scores = nn.Linear(WIDTH, 11, bias=False)
    scores.weight = model.stages[0][0].weight  # type: ignore[index,union-attr]
    model.stages[-1] = nn.Sequential(model.stages[-1][0], scores)  # type: ignore[index]
    return model


@feature("gradients")
def shared_layer_by_hand(stages: int) -> Model:
    """One module in two stages, and nobody says so"""
    shared = linear()
    return chain(
        lambda number: nn.Sequential(shared if number < 2 else linear(), linear()),
        stages,
    )


@feature("gradients")
def weight_of_another_stage(stages: int) -> Model:
    """Stages that use a weight of the first one, which their modules do not have"""
    first = nn.Linear(WIDTH, WIDTH)

    def with_first(self: Any, x: Tensor) -> Tensor:
        return self.part(x) + nn.functional.linear(x, first.weight)

    def stage(number: int) -> nn.Module:
        if number == 0:
            return nn.Sequential(first, nn.Tanh())
        return Does(with_first, part=linear())

    return chain(stage, stages)


@feature("gradients")
def tied_layer(stages: int) -> Model:
    """One weight in all stages, given as tied"""
    shared = nn.Linear(WIDTH, WIDTH)

    def stage(_: int) -> nn.Module:
        own = nn.Linear(WIDTH, WIDTH)
        own.weight = shared.weight
        return nn.Sequential(own, nn.Tanh())

    tied = [dict.fromkeys(range(stages), "0.weight")]
    return chain(stage, stages, tied=tied)


@feature("gradients")
def clipped_to_a_norm(stages: int) -> Model:
    """The norm of all gradients is clipped"""
    return chain(lambda _: linear(), stages, max_norm=0.01)


@feature("gradients")
def loss_with_weights(stages: int) -> Model:
    """A loss that adds the norm of weights of the last stage"""
    model = chain(lambda _: linear(), stages)
    last = model.stages[-1]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        penalty = sum(each.square().sum() for each in last.parameters())
        return nn.functional.mse_loss(output, target) + 0.01 * penalty

    model.loss = loss
    return model


@feature("gradients")
def loss_of_counted_words(stages: int) -> Model:
    """A loss whose mean is over words that are not padding, which microbatches have more or less
    of
    """

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=0
        )

    return language_model(stages, nn.Embedding(11, WIDTH), loss=loss)


@feature("gradients", not_for={"frozen"})
def hooked_optimizer(stages: int) -> Model:
    """A pre-hook of the optimizer, which clips the gradients of each stage"""

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(module.parameters(), 0.1)
        made.register_step_pre_hook(
            lambda *_: clip_grad_norm_(module.parameters(), 0.01) and None
        )
        return made

    return chain(lambda _: linear(), stages, optimizer=optimizer)


@feature("gradients")
def loss_that_counts(stages: int) -> Model:
    """A loss that depends on how often it was computed"""
    model = chain(lambda _: linear(), stages)
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return nn.functional.mse_loss(output, target) * (1 + 0.1 * len(calls))

    model.loss = loss
    return model


@feature("gradients", draws=True)
def loss_that_draws(stages: int) -> Model:
    """A loss with noise"""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target + 0.1 * torch.randn_like(target))

    return chain(lambda _: linear(), stages, loss=loss)


@feature("gradients")
def loss_that_changes_targets(stages: int) -> Model:
    """A loss that changes its targets in place"""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.mul_(0.5).add_(0.1))

    return chain(lambda _: linear(), stages, loss=loss)


@feature("gradients")
def loss_that_changes_the_output(stages: int) -> Model:
    """A loss that changes the output in place"""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sub_(target).square().mean()

    return chain(
        lambda _: nn.Sequential(linear(), nn.Linear(WIDTH, WIDTH)), stages, loss=loss
    )


@feature("gradients", is_mistake=True)
def step_without_gradients(stages: int) -> Model:
    """A step under torch.no_grad"""
    return chain(lambda _: linear(), stages, around=torch.no_grad)


@feature("gradients")
def optimizer_in_the_backward(stages: int) -> Model:
    """Hooks of weights that make the optimizer's step as soon as a gradient is there"""

    def add(stage: nn.Module) -> None:
        for each in stage.parameters():

            def update(weight: Tensor) -> None:
                with torch.no_grad():
                    weight -= 0.1 * weight.grad
                weight.grad = None

            each.register_post_accumulate_grad_hook(update)

    return everywhere(stages, add)
