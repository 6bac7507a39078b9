"""Training loops as scripts have them: averages of weights, optimizers of their own, what is done to
gradients before an update, and to weights after it.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.models.families.training import normed
from tests.models.model import (
    LENGTH,
    WIDTH,
    Does,
    Model,
    Side,
    chain,
    feature,
    linear,
    trained,
)

STEPS = 3


def looping(
    stages: int,
    *,
    before: Callable[[Side, int], None] = lambda side, step: None,
    between: Callable[[Side, int], None] = lambda side, step: None,
    after: Callable[[Side, int], None] = lambda side, step: None,
    block: Callable[[int], nn.Module] = lambda _: normed(),
    **how: Any,
) -> Model:
    """A model that is trained for some steps: something is done before each step, between the
    backward and the update, and after the update.
    """

    def script(side: Side) -> None:
        for step in range(STEPS):
            before(side, step)
            side.train(step)
            between(side, step)
            side.update()
            after(side, step)

    return chain(block, stages, script=script, **how)


def weights_of(side: Side) -> list[nn.Parameter]:
    """All weights of the stages that a process has."""
    return [weight for module in side.modules for weight in module.parameters()]


def graded(side: Side) -> list[nn.Parameter]:
    """Those that have a gradient."""
    return [weight for weight in weights_of(side) if weight.grad is not None]


def wave(tensor: Tensor) -> Tensor:
    """Numbers that look random and are the same on every process."""
    count = torch.arange(tensor.numel(), dtype=tensor.dtype)
    return 0.01 * count.sin().view(tensor.shape)


@feature("scripts")
def stochastic_weight_averaging(stages: int) -> Model:
    """torch.optim.swa_utils: AveragedModel, whose weights are loaded in the end, and SWALR"""

    def script(side: Side) -> None:
        averages = [AveragedModel(module) for module in side.modules]
        schedulers = [SWALR(each, 0.02, anneal_epochs=2) for each in side.optimizers]
        for step in range(STEPS):
            side.train(step)
            side.update()
            for average, module in zip(averages, side.modules, strict=True):
                average.update_parameters(module)
            for each in schedulers:
                each.step()
        for average, module in zip(averages, side.modules, strict=True):
            module.load_state_dict(average.module.state_dict())

    return chain(lambda _: normed(), stages, script=script)


@feature("scripts")
def evaluated_with_averages(stages: int) -> Model:
    """An EMA whose weights are copied in for an evaluation, and taken out again"""

    def script(side: Side) -> None:
        averages = [
            AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            for module in side.modules
        ]
        for step in range(STEPS):
            side.train(step)
            side.update()
            kept = [copy.deepcopy(module.state_dict()) for module in side.modules]
            for average, module in zip(averages, side.modules, strict=True):
                average.update_parameters(module)
                module.load_state_dict(average.module.state_dict())
            side.evaluate(10 + step)
            for state, module in zip(kept, side.modules, strict=True):
                module.load_state_dict(state)

    return chain(lambda _: normed(), stages, script=script)


@feature("scripts")
def evaluated_with_swapped_memory(stages: int) -> Model:
    """An average of weights whose memory changes places with theirs for an evaluation"""

    def script(side: Side) -> None:
        averages = [weight.detach().clone() for weight in weights_of(side)]
        for step in range(STEPS):
            side.train(step)
            side.update()
            pairs = [*zip(averages, weights_of(side), strict=True)]
            for average, weight in pairs:
                average.lerp_(weight.data, 0.25)
            _swap(pairs)
            side.evaluate(10 + step)
            _swap(pairs)

    return chain(lambda _: normed(), stages, script=script)


def _swap(pairs: Iterable[tuple[Tensor, nn.Parameter]]) -> None:
    for average, weight in pairs:
        own = weight.data
        weight.data = average.data
        average.data = own


@feature("scripts")
def merged_for_evaluations(stages: int) -> Model:
    """LoRA, merged into the frozen layer for each evaluation"""

    def adapted(self: Any, x: Tensor) -> Tensor:
        y = self.base(x)
        return (y if self.is_merged else y + self.up(self.down(x))).tanh()

    def block(_: int) -> nn.Module:
        return Does(
            adapted,
            base=nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            down=nn.Linear(WIDTH, 2, bias=False),
            up=nn.Linear(2, WIDTH, bias=False),
            is_merged=False,
        )

    def merge(side: Side, step: int) -> None:
        inner = [
            part
            for module in side.stages.values()
            for part in module.modules()
            if hasattr(part, "is_merged")
        ]
        for sign in (1, -1):
            for part in inner:
                part.base.weight.data += (
                    sign * part.up.weight.data @ part.down.weight.data
                )
                part.is_merged = sign == 1
            if sign == 1:
                side.evaluate(10 + step)

    return looping(stages, after=merge, block=block)


@feature("scripts", not_for={"updates"})
def sharpness_aware(stages: int) -> Model:
    """A step up along the gradient of each weight, another backward there, and the update from where
    the weights were
    """

    def climb(side: Side, step: int) -> None:
        ups = [
            (weight, 0.05 * weight.grad / (weight.grad.norm() + 1e-12))
            for weight in graded(side)
        ]
        for weight, up in ups:
            weight.data.add_(up)
        for module in side.modules:
            module.zero_grad()
        side.train(step)
        for weight, up in ups:
            weight.data.sub_(up)

    return looping(stages, between=climb)


@feature("scripts")
def learning_rate_finder(stages: int) -> Model:
    """Steps with growing learning rates, after which weights and states go back"""

    def script(side: Side) -> None:
        owners = [*side.modules, *side.optimizers]
        kept = [copy.deepcopy(each.state_dict()) for each in owners]
        for step in range(2):
            for optimizer in side.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 2
            side.train(step)
            side.update()
        for owner, state in zip(owners, kept, strict=True):
            owner.load_state_dict(state)
        side.train(0)
        side.update()

    return chain(lambda _: normed(), stages, script=script)


@feature("scripts")
def frozen_between(stages: int) -> Model:
    """A layer of each stage that is frozen after the first update"""

    def freeze(side: Side, step: int) -> None:
        for module in side.modules:
            for name, weight in module.named_parameters():
                if name.endswith("1.0.weight"):
                    weight.requires_grad_(False)

    return looping(stages, after=freeze)


@feature("scripts")
def rates_by_layer(stages: int) -> Model:
    """A learning rate for each layer, which a scheduler warms up from nothing"""

    def script(side: Side) -> None:
        warm_up = lambda step: step / 2  # noqa: E731
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(each, warm_up) for each in side.optimizers
        ]
        for step in range(STEPS):
            side.train(step)
            side.update()
            for each in schedulers:
                each.step()

    def optimizer(module: nn.Module) -> Optimizer:
        weights = trained(module)
        groups = [
            {"params": [weight], "lr": 0.01 * 0.9**place}
            for place, weight in enumerate(weights)
        ]
        return torch.optim.AdamW(groups)

    return chain(lambda _: normed(), stages, script=script, optimizer=optimizer)


@feature("scripts")
def one_cycle(stages: int) -> Model:
    """OneCycleLR, which changes rates and momentum"""

    def script(side: Side) -> None:
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(each, 0.2, total_steps=STEPS + 1)
            for each in side.optimizers
        ]
        for step in range(STEPS):
            side.train(step)
            side.update()
            for each in schedulers:
                each.step()

    return chain(lambda _: normed(), stages, script=script)


@feature("scripts", not_for={"updates"})
def noise_in_gradients(stages: int) -> Model:
    """Noise that is added to gradients before the update"""

    def add(side: Side, step: int) -> None:
        for weight in graded(side):
            assert weight.grad is not None
            weight.grad += wave(weight)

    return looping(stages, between=add)


@feature("scripts", not_for={"updates"})
def clipped_by_value(stages: int) -> Model:
    """clip_grad_value_"""

    def clip(side: Side, step: int) -> None:
        # Torch refuses to clip no gradient, which is all that a rank with frozen stages has.
        if graded(side):
            clip_grad_value_(graded(side), 1e-3)

    return looping(stages, between=clip)


@feature("scripts", not_for={"updates"})
def averaged_by_hand(stages: int) -> Model:
    """Gradients of two batches, which the script divides by two"""

    def script(side: Side) -> None:
        for step in range(4):
            side.train(step)
            if step % 2:
                for weight in graded(side):
                    weight.grad = weight.grad / 2
                side.update()

    return chain(lambda _: normed(), stages, script=script)


@feature("scripts", not_for={"updates"})
def trained_in_turns(stages: int) -> Model:
    """Steps that train some weights only: the script drops the gradients of the others"""

    def drop(side: Side, step: int) -> None:
        for module in side.modules:
            for place, weight in enumerate(module.parameters()):
                if place % 2 == step % 2:
                    weight.grad = None

    return looping(stages, between=drop)


@feature("scripts", not_for={"updates"})
def gradients_masked_by_hand(stages: int) -> Model:
    """Gradients that the script multiplies in place by a mask"""

    def mask(side: Side, step: int) -> None:
        for weight in graded(side):
            assert weight.grad is not None
            weight.grad.mul_(wave(weight) > 0)

    return looping(stages, between=mask)


@feature("scripts", not_for={"updates"})
def gradients_kept_elsewhere(stages: int) -> Model:
    """Gradients whose memory a script has made before, and fills with zeros by module.zero_grad"""

    def fill(side: Side, step: int) -> None:
        for weight in weights_of(side):
            weight.grad = torch.zeros_like(weight)

    return looping(stages, before=fill, block=lambda _: linear())


@feature("scripts", not_for={"updates"})
def gradients_in_a_flat_tensor(stages: int) -> Model:
    """Gradients that are views of one flat tensor, by which the script scales them all"""
    flat: dict[int, Tensor] = {}

    def lay_out(side: Side, step: int) -> None:
        for module in side.modules:
            weights = [each for each in module.parameters() if each.requires_grad]
            sizes = [weight.numel() for weight in weights]
            flat[id(module)] = torch.zeros(sum(sizes), dtype=torch.float64)
            parts = flat[id(module)].split(sizes)
            for weight, part in zip(weights, parts, strict=True):
                weight.grad = part.view(weight.shape)

    def scale(side: Side, step: int) -> None:
        for module in side.modules:
            flat[id(module)].mul_(0.5)

    return looping(stages, before=lay_out, between=scale, block=lambda _: linear())


@feature("scripts", not_for={"updates"})
def gradients_added_up_by_hooks(stages: int) -> Model:
    """Hooks that add gradients to totals of the script's own and drop them, as where weights of 16
    bits have gradients of 32
    """
    totals: dict[nn.Parameter, Tensor] = {}

    def block(_: int) -> nn.Module:
        made = normed()
        for weight in made.parameters():

            def add(weight: nn.Parameter) -> None:
                assert weight.grad is not None
                totals[weight] = totals.get(weight, 0) + weight.grad
                weight.grad = None

            weight.register_post_accumulate_grad_hook(add)  # type: ignore[arg-type]
        return made

    def hand_in(side: Side, step: int) -> None:
        for weight in weights_of(side):
            weight.grad = totals.pop(weight, None)

    return looping(stages, between=hand_in, block=block)


@feature("scripts", not_for={"updates"})
def two_optimizers_in_turns(stages: int) -> Model:
    """Two optimizers of the same weights, of which each makes every second update"""

    def script(side: Side) -> None:
        own = [*side.optimizers]
        others = [
            torch.optim.AdamW(
                [weight for group in each.param_groups for weight in group["params"]],
                0.01,
            )
            for each in own
        ]
        for step in range(4):
            side.optimizers[:] = others if step % 2 else own
            side.train(step)
            side.update()

    return chain(lambda _: normed(), stages, script=script)


@feature("scripts")
def normalized_by_an_optimizer_hook(stages: int) -> Model:
    """A post-hook of the optimizer that normalizes the rows of all matrices, as nGPT does"""

    def optimizer(module: nn.Module) -> Optimizer:
        made = torch.optim.SGD(trained(module), 0.1)

        def normalize(*_: object) -> None:
            with torch.no_grad():
                for weight in module.parameters():
                    if weight.ndim == 2:
                        weight.copy_(nn.functional.normalize(weight, dim=-1))

        made.register_step_post_hook(normalize)
        return made

    return looping(stages, optimizer=optimizer)


@feature("scripts")
def teacher_in_the_stage(stages: int) -> Model:
    """A frozen copy of a layer in each stage, which follows it after each update, as in BYOL"""

    def both(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.part(x) + 0.1 * taught

    def block(_: int) -> nn.Module:
        part = linear()
        return Does(both, part=part, teacher=copy.deepcopy(part).requires_grad_(False))

    def follow(side: Side, step: int) -> None:
        for module in side.modules:
            for inner in module.modules():
                if hasattr(inner, "teacher"):
                    for teacher, weight in zip(
                        inner.teacher.parameters(), inner.part.parameters(), strict=True
                    ):
                        teacher.data.lerp_(weight.data, 0.1)

    return looping(stages, after=follow, block=block)


@feature("scripts")
def lookahead(stages: int) -> Model:
    """Slow weights, to which the fast ones go back every second step"""

    def script(side: Side) -> None:
        slow = [weight.detach().clone() for weight in weights_of(side)]
        for step in range(4):
            side.train(step)
            side.update()
            for each, weight in zip(slow, weights_of(side), strict=True):
                if step % 2:
                    each.lerp_(weight.data, 0.5)
                    weight.data.copy_(each)

    return chain(lambda _: normed(), stages, script=script)


@feature("scripts")
def perturbed_weights(stages: int) -> Model:
    """Weights with noise in a step, which is taken out before the update"""

    def shift(sign: int, side: Side, step: int) -> None:
        for weight in weights_of(side):
            weight.data.add_(wave(weight), alpha=sign)

    return looping(stages, before=partial(shift, 1), after=partial(shift, -1))


@feature("scripts")
def decayed_by_hand(stages: int) -> Model:
    """Weight decay by the script, after each update"""

    def decay(side: Side, step: int) -> None:
        with torch.no_grad():
            for weight in weights_of(side):
                if weight.ndim > 1:
                    weight.mul_(0.99)

    return looping(stages, after=decay)


@feature("scripts")
def momentum_that_starts_anew(stages: int) -> Model:
    """The state of the optimizers is dropped after an update"""

    def restart(side: Side, step: int) -> None:
        for optimizer in side.optimizers:
            if step == 1:
                optimizer.state.clear()

    return looping(stages, after=restart)


@feature("scripts")
def group_added_later(stages: int) -> Model:
    """A group of weights that the optimizer is given after an update"""

    def first(module: nn.Module) -> Optimizer:
        matrices = [weight for weight in trained(module) if weight.ndim != 1]
        return torch.optim.SGD(matrices, 0.1, momentum=0.9)

    def add(side: Side, step: int) -> None:
        if step:
            return
        for module, optimizer in zip(side.modules, side.optimizers, strict=True):
            known = {
                id(each) for group in optimizer.param_groups for each in group["params"]
            }
            others = [
                weight
                for weight in module.parameters()
                if id(weight) not in known and weight.requires_grad and weight.ndim == 1
            ]
            if others:
                optimizer.add_param_group({"params": others, "lr": 0.01})

    return looping(stages, after=add, optimizer=first)


@feature("scripts")
def dropout_that_grows(stages: int) -> Model:
    """Attributes of modules that the script changes between steps"""

    def scaled(self: Any, x: Tensor) -> Tensor:
        return self.part(x) * self.factor

    def grow(side: Side, step: int) -> None:
        for module in side.stages.values():
            for part in module.modules():
                if hasattr(part, "factor"):
                    part.factor = 1.0 + 0.1 * step

    return looping(
        stages,
        before=grow,
        block=lambda _: Does(scaled, part=linear(), factor=1.0),
    )


@feature("scripts")
def statistics_that_stop(stages: int) -> Model:
    """BatchNorm that goes into evaluation mode after the first update, while the rest trains"""

    def block(_: int) -> nn.Module:
        norm = Does(lambda self, x: self.norm(x.mT).mT, norm=nn.BatchNorm1d(WIDTH))
        return nn.Sequential(linear(), norm)

    def stop(side: Side, step: int) -> None:
        for module in side.stages.values():
            for part in module.modules():
                if isinstance(part, nn.BatchNorm1d):
                    part.eval()

    return looping(stages, after=stop, block=block)


# It has statistics of each place of a sequence, which slices cut.
@feature("scripts", not_for={"slices"})
def statistics_put_in(stages: int) -> Model:
    """A layer without weights that is replaced by a BatchNorm without weights after an update"""

    def block(_: int) -> nn.Module:
        return nn.Sequential(linear(), nn.Identity())

    def put_in(side: Side, step: int) -> None:
        for stage in side.stages.values():
            for part in [*stage.modules()]:
                for name, layer in part.named_children():
                    if isinstance(layer, nn.Identity):
                        norm = nn.BatchNorm1d(LENGTH, affine=False)
                        setattr(part, name, norm)

    return looping(stages, after=put_in, block=block)


@feature("scripts")
def layer_with_the_same_weights(stages: int) -> Model:
    """A layer that is replaced by another one with the same parameters after an update"""

    def replace(side: Side, step: int) -> None:
        for stage in side.stages.values():
            for part in [*stage.modules()]:
                for name, layer in part.named_children():
                    if isinstance(layer, nn.Linear):
                        another = nn.Linear(WIDTH, WIDTH, device="meta")
                        another.weight = layer.weight
                        another.bias = layer.bias
                        setattr(part, name, another)

    return looping(stages, after=replace, block=lambda _: linear())


@feature("scripts")
def decay_switched_on(stages: int) -> Model:
    """Forwards that make weights smaller by `.data` once the script says so, which no pipeline can"""

    def decayed(self: Any, x: Tensor) -> Tensor:
        if self.is_on:
            self.part[0].weight.data.mul_(0.9)
        return self.part(x)

    def switch_on(side: Side, step: int) -> None:
        for stage in side.stages.values():
            for part in stage.modules():
                if hasattr(part, "is_on"):
                    part.is_on = True

    def block(_: int) -> nn.Module:
        return Does(decayed, part=linear(), is_on=False)

    return looping(stages, after=switch_on, block=block)


class Muon(Optimizer):
    """Momentum that is made orthogonal, for matrices; SGD for what has other shapes."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault(
                    "momentum", torch.zeros_like(weight)
                )
                momentum.mul_(0.9).add_(weight.grad)
                move = momentum
                if weight.ndim == 2:
                    move = momentum / (momentum.norm() + 1e-7)
                    for _ in range(3):
                        move = 1.5 * move - 0.5 * move @ move.T @ move
                weight.add_(move, alpha=-group["lr"])


@feature("scripts")
def muon(stages: int) -> Model:
    """Muon"""
    return looping(stages, optimizer=lambda module: Muon(trained(module), 0.05))


class Masters(Optimizer):
    """SGD on copies of the weights, which take their place: by value, or by their memory."""

    def __init__(self, weights: Iterable[nn.Parameter], by_memory: bool) -> None:
        super().__init__(weights, {"lr": 0.1})
        self._by_memory = by_memory

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "master" not in state:
                    state["master"] = weight.data.clone()
                state["master"].add_(weight.grad, alpha=-group["lr"])
                if self._by_memory:
                    weight.data = state["master"].clone()
                else:
                    weight.data.copy_(state["master"])


@feature("scripts")
def master_weights(stages: int) -> Model:
    """An optimizer with weights of its own, which it copies into those of the model"""
    return looping(stages, optimizer=lambda module: Masters(trained(module), False))


@feature("scripts")
def weights_from_an_optimizer(stages: int) -> Model:
    """An optimizer that gives the weights other memory in each step"""
    return looping(stages, optimizer=lambda module: Masters(trained(module), True))


class Flat(Optimizer):
    """SGD on one flat tensor, of which the weights are views, as in Apex and DeepSpeed."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.1})
        self._weights = [
            each for group in self.param_groups for each in group["params"]
        ]
        self._flat = torch.cat([weight.data.flatten() for weight in self._weights])
        sizes = [weight.numel() for weight in self._weights]
        for weight, part in zip(self._weights, self._flat.split(sizes), strict=True):
            weight.data = part.view(weight.shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [
            (torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten()
            for weight in self._weights
        ]
        self._flat.add_(torch.cat(gradients), alpha=-0.1)


@feature("scripts")
def flat_optimizer(stages: int) -> Model:
    """An optimizer that moves one flat tensor, of which the weights are views"""
    return looping(stages, optimizer=lambda module: Flat(trained(module)))


@feature("scripts")
def copied_after_updates(stages: int) -> Model:
    """A layer whose weights are copied from another one after each update"""

    def copy_weights(side: Side, step: int) -> None:
        for module in side.modules:
            parts = [each for each in module.modules() if type(each) is nn.Linear]
            with torch.no_grad():
                for part in parts[1:]:
                    part.weight.copy_(parts[0].weight)

    return looping(
        stages,
        after=copy_weights,
        block=lambda _: nn.Sequential(linear(), linear()),
    )


@feature("scripts")
def cast_between(stages: int) -> Model:
    """A model that is cast to another type and back after an update"""

    def cast(side: Side, step: int) -> None:
        for module in side.modules:
            module.float().double()

    return looping(stages, after=cast)
