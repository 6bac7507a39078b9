"""Models between whose stages tensors of every kind pass, of which some have a gradient and some
have none.

A stage is a list of words, `reentrant + table + detached`: what it does to the value that goes
through all stages, and what it hands on beside that, along with all that it was given. Every stage
looks at which tensors of those that it is given require a gradient, and computes something else
with each. So a model that is given a gradient too many, or one too few, is trained otherwise.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.model import Feature, Model, chain, linear

#: The name of these models' way of training, see `features.find`.
WAY = "between"


def _without_gradient(stage: "Stage", x: Tensor) -> Tensor:
    with torch.no_grad():
        return stage.part(x)


def _inference(stage: "Stage", x: Tensor) -> Tensor:
    with torch.inference_mode():
        inner = stage.part(x)
    return x + inner.clone()


def _with_one_of_its_own(stage: "Stage", x: Tensor) -> Tensor:
    """As `enable_input_require_grads` of adapters has it."""
    y = stage.part(x)
    return y if y.requires_grad else y.requires_grad_()


def _table(x: Tensor) -> Tensor:
    """As RoPE has it."""
    return torch.arange(x.shape[1], dtype=torch.float64).sin().repeat(x.shape[0], 1)


def _reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)  # type: ignore[no-any-return]


#: What a stage does to the value that goes through all.
LAYERS: Mapping[str, Callable[["Stage", Tensor], Tensor]] = {
    "linear": lambda stage, x: stage.part(x),
    "frozen": lambda stage, x: stage.frozen(x),
    "reentrant": lambda stage, x: _reentrant(stage.part, x),
    "checkpoint": lambda stage, x: checkpoint(stage.part, x, use_reentrant=False),
    "no grad": _without_gradient,
    "cut": lambda stage, x: stage.part(x).detach(),
    "inference": _inference,
    "made to require": _with_one_of_its_own,
    "dropout": lambda _, x: nn.functional.dropout(x),
}

#: What it hands on beside that, made of what it was given and of what it computes.
EXTRAS: Mapping[str, Callable[["Stage", Tensor, Tensor], Tensor]] = {
    "table": lambda _, x, y: _table(x),
    "half table": lambda _, x, y: _table(x).bfloat16(),
    "complex table": lambda _, x, y: torch.polar(torch.ones_like(_table(x)), _table(x)),
    "table that requires": lambda _, x, y: _table(x).requires_grad_(),
    "reentrant table": lambda _, x, y: _reentrant(torch.sin, _table(x)),
    "detached": lambda _, x, y: y.detach() * 2,
    "no grad beside": lambda stage, x, y: _without_gradient(stage, x),
    "integers": lambda _, x, y: y.argmax(-1),
    "mask": lambda _, x, y: y > 0,
    "view": lambda _, x, y: y[..., :2],
    "view of a detached one": lambda _, x, y: y.detach()[..., 1:3],
    "twice": lambda _, x, y: y,
    "expanded": lambda _, x, y: y.mean((1, 2), keepdim=True).expand(-1, 3, 2),
    "complex": lambda _, x, y: torch.fft.fft(y),
    "float32": lambda _, x, y: y.float(),
    "given": lambda _, x, y: x,
    "weight": lambda stage, x, y: stage.part[0].weight,
    "frozen weight": lambda stage, x, y: stage.frozen[0].weight,
    "scalar": lambda _, x, y: y.square().mean(),
    "scalar without": lambda _, x, y: y.detach().mean(),
    "empty": lambda _, x, y: y[:, :0],
}


class Stage(nn.Module):
    """A stage of some words. The last one has a head that is trained, and gives its scores alone."""

    def __init__(self, words: list[str], is_last: bool) -> None:
        super().__init__()
        self.words = words
        self.is_last = is_last
        self.part = linear()
        self.frozen = linear().requires_grad_(False)
        self.head = linear()

    def forward(self, given: Any) -> Any:
        passed = given if isinstance(given, dict) else {"x": given}
        x = passed["x"]
        y = x
        for number, (name, tensor) in enumerate(sorted(passed.items()), 1):
            y = y * (1 + 0.1 * number * tensor.requires_grad)
            if name != "x":
                y = y + 0.1 * _number_of(tensor)
        for word in self.words:
            if word in LAYERS:
                y = LAYERS[word](self, y)
        if self.is_last:
            return self.head(y)
        extras = {
            word: EXTRAS[word](self, x, y) for word in self.words if word in EXTRAS
        }
        return passed | {"x": y} | extras


def _number_of(tensor: Tensor) -> Tensor:
    """One number of a tensor of any type."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double().sum() / max(tensor.numel(), 1)


def feature_of(name: str, stages: list[list[str]]) -> Feature:
    """The model whose stages have these words, where there are more from the first one on again."""
    words = [word for stage in stages for word in stage]
    return Feature(name, WAY, name, partial(_build, stages), draws="dropout" in words)


def _build(words: list[list[str]], stages: int) -> Model:
    model = chain(
        lambda number: Stage(words[number % len(words)], number == stages - 1), stages
    )
    if any("float32" in stage for stage in words):
        model.tolerance = 1e-6
    return model
