"""Training loops that are made of words: `clipped & overflow & loss with weights`.

A word stands for something that a script does around a model, in addition to what other words do:
it changes how the model is trained, or does something before or after a step. Any feature can be
trained so, and any model whose stages stand in `between`: `norms | gru || adamw & clipped`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.amp import GradScaler

from tests.models.model import Does, Feature, Model, Side, train_and_update

#: How many steps such a loop has, of which one may overflow.
STEPS = 6
#: In or after this one, scripts do what they do once: not in the first update, by which torch's fused
#: SGD keeps a momentum of whatever was in memory, if it is skipped.
MIDDLE = 2

Step = Callable[[Side, int], None]


def _nothing(side: Side, step: int) -> None:
    pass


@frozen
class Word:
    """What a word does. Of words of one group, a loop has one at most."""

    group: str
    words: str
    #: To the model, before a pipeline is made.
    change: Callable[[Model], None] = lambda model: None
    before_step: Step = _nothing
    #: After the update.
    after_step: Step = _nothing
    #: After so many steps there is an update.
    every: int = 1
    not_for: frozenset[str] = frozenset()
    #: Whether a pipeline must refuse it.
    is_mistake: bool = False


def _scaled(model: Model) -> None:
    """The scale grows after each step that does not overflow."""
    model.scaler = partial(GradScaler, "cpu", 1024.0, growth_interval=1)


def _not_scaled(model: Model) -> None:
    model.scaler = partial(GradScaler, "cpu", enabled=False)


class Burst:
    """Makes the gradient of a weight infinite, while it is on."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient + torch.inf if self.is_on else gradient


def _bursting(place: int, model: Model) -> None:
    """One stage of the model, and so one rank, has a weight whose gradient overflows."""
    _scaled(model)
    stage = model.stages[place]
    weight = next((each for each in stage.parameters() if each.requires_grad), None)
    if weight is not None:
        stage.burst = Burst()  # type: ignore[assignment]
        weight.register_hook(stage.burst)


def _burst(side: Side, step: int) -> None:
    for module in _all_modules(side):
        if isinstance(getattr(module, "burst", None), Burst):
            module.burst.is_on = step == MIDDLE  # type: ignore[union-attr]


def _all_modules(side: Side) -> Iterable[nn.Module]:
    return (each for stage in side.modules for each in stage.modules())


def _another_scale(side: Side, step: int) -> None:
    assert side.scaler is not None
    side.scaler.update(2.0 ** (step + 3))


def _clipped(model: Model) -> None:
    model.max_norm = 0.01


class Temperature(nn.Module):
    """A loss with a weight, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Any, target: Tensor) -> Tensor:
        if isinstance(output, tuple):
            output, temperature = output
        else:
            temperature = self.temperature
        return nn.functional.mse_loss(output * temperature, target)


def _own_loss(model: Model) -> None:
    model.loss = Temperature()


def _registered_loss(model: Model) -> None:
    """As the pages say: the last stage has the weight of the loss."""
    model.loss = Temperature()
    model.stages[-1].register_parameter("temperature", model.loss.temperature)


def _returned_loss(model: Model) -> None:
    """Where weights are late: the last stage returns the weight beside its output."""
    model.loss = Temperature()
    model.stages[-1] = Does(
        lambda self, *given, **how: (self.part(*given, **how), self.temperature),
        part=model.stages[-1],
        temperature=model.loss.temperature,
    )


def _loss_by_name(model: Model) -> None:
    """The loss with other numbers beside it."""
    loss = model.loss

    def with_more(output: Any, target: Any) -> dict[str, Any]:
        return {"loss": loss(output, target), "rows": len(target)}  # type: ignore[operator]

    model.loss = with_more


def _replace_early(model: Model) -> None:
    """All weights are others when the pipeline is made than when the stages were."""
    for stage in model.stages:
        stage.load_state_dict(copy.deepcopy(stage.state_dict()), assign=True)


def _in_the_middle(change: Callable[[nn.Module], None]) -> Step:
    """What is done to one stage of each process, once."""

    def do(side: Side, step: int) -> None:
        if step == MIDDLE:
            change(side.modules[-1])

    return do


def _replace_weight(stage: nn.Module) -> None:
    owner, name = _a_weight(stage)
    setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone()))


def _assign(stage: nn.Module) -> None:
    stage.load_state_dict(copy.deepcopy(stage.state_dict()), assign=True)


def _replace_layer(stage: nn.Module) -> None:
    """A linear layer by another one, or all weights where there is none."""
    for module in stage.modules():
        for name, part in module.named_children():
            own = dict(part.named_parameters(recurse=False))
            if type(part) is nn.Linear and "weight" in own:
                setattr(module, name, copy.deepcopy(part))
                return
    _assign(stage)


def _add_weight(stage: nn.Module) -> None:
    stage.register_parameter("adapter", nn.Parameter(torch.zeros(2)))


def _a_weight(stage: nn.Module) -> tuple[nn.Module, str]:
    """A weight, by its owner and its name there."""
    return next(
        (module, name)
        for module in stage.modules()
        for name, _ in module.named_parameters(recurse=False)
    )


def _other_memory(side: Side, step: int) -> None:
    for module in side.modules:
        for weight in module.parameters():
            weight.data = weight.data.clone()


def _new_optimizers(side: Side, step: int) -> None:
    if step == MIDDLE:
        side.optimizers[:] = [
            torch.optim.SGD(
                [weight for group in each.param_groups for weight in group["params"]],
                0.05,
            )
            for each in side.optimizers
        ]


def _states_loaded(side: Side, step: int) -> None:
    for each in [*side.modules, *side.optimizers]:
        each.load_state_dict(copy.deepcopy(each.state_dict()))


def _evaluate(side: Side, step: int) -> None:
    side.evaluate(10 + step)


#: By the name of a word.
WORDS: Mapping[str, Word] = {
    "scaler": Word("scale", "a GradScaler", _scaled, not_for=frozenset({"updates"})),
    "overflow at the begin": Word(
        "scale",
        "a GradScaler, where gradients of the first stage overflow once",
        partial(_bursting, 0),
        _burst,
        not_for=frozenset({"updates"}),
    ),
    "overflow at the end": Word(
        "scale",
        "a GradScaler, where gradients of the last stage overflow once",
        partial(_bursting, -1),
        _burst,
        not_for=frozenset({"updates"}),
    ),
    "another scale": Word(
        "scale",
        "a GradScaler that is given another scale after each step",
        _scaled,
        after_step=_another_scale,
        not_for=frozenset({"updates"}),
    ),
    "scaler that is off": Word("scale", "GradScaler(enabled=False)", _not_scaled),
    "clipped": Word("norm", "gradients are clipped to a norm", _clipped),
    "accumulated": Word("updates", "gradients of two steps add up", every=2),
    "evaluated": Word("updates", "evaluations after updates", after_step=_evaluate),
    "loss with weights": Word(
        "loss",
        "a loss with a weight, which the last stage has",
        _registered_loss,
        not_for=frozenset({"updates", "replicas of a loss"}),
    ),
    "loss with weights in the output": Word(
        "loss",
        "a loss with a weight, which the last stage returns",
        _returned_loss,
        not_for=frozenset({"slices", "skips"}),
    ),
    "loss with weights of its own": Word(
        "loss", "a loss with a weight that no stage has", _own_loss, is_mistake=True
    ),
    "loss by name": Word("loss", "a loss in a dictionary", _loss_by_name),
    "replaced before": Word(
        "weights", "weights are replaced before the pipeline is made", _replace_early
    ),
    "weight replaced": Word(
        "weights",
        "a weight is replaced after an update",
        after_step=_in_the_middle(_replace_weight),
        is_mistake=True,
    ),
    "weights assigned": Word(
        "weights",
        "weights are loaded after an update, assign=True",
        after_step=_in_the_middle(_assign),
        is_mistake=True,
    ),
    "layer replaced": Word(
        "weights",
        "layers are replaced after an update",
        after_step=_in_the_middle(_replace_layer),
        is_mistake=True,
    ),
    "weight put in": Word(
        "weights",
        "a weight is put in after an update",
        after_step=_in_the_middle(_add_weight),
        is_mistake=True,
    ),
    "other memory": Word(
        "weights",
        "weights get other memory after each update",
        after_step=_other_memory,
    ),
    "other optimizers": Word(
        "weights",
        "other optimizers after an update",
        after_step=_new_optimizers,
        not_for=frozenset({"updates"}),
    ),
    "states loaded": Word(
        "weights",
        "states of modules and optimizers are loaded after each update",
        after_step=_states_loaded,
    ),
}


def looped(feature: Feature, words: list[str]) -> Feature:
    """A feature that is trained in a loop of these words."""
    # What replaces weights comes before what makes more of them.
    parts = sorted(
        (WORDS[word] for word in words), key=lambda part: part.group != "weights"
    )
    return evolve(
        feature,
        name=f"{feature.name} & {' & '.join(words)}",
        family="loops",
        build=partial(_build, feature, parts),
        not_for=feature.not_for.union(*(part.not_for for part in parts)),
        is_mistake=any(part.is_mistake for part in parts),
    )


def _build(feature: Feature, parts: list[Word], stages: int) -> Model:
    model = feature.build(stages)
    assert model.script is train_and_update
    for part in parts:
        part.change(model)
    model.script = partial(_train, parts)
    return model


def _train(parts: list[Word], side: Side) -> None:
    every = max(part.every for part in parts)
    for step in range(STEPS):
        for part in parts:
            part.before_step(side, step)
        side.train(step)
        if (step + 1) % every == 0:
            side.update()
        for part in parts:
            part.after_step(side, step)
