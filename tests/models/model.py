"""What a feature is: a model in stages, with all that a script does to train it.

A feature is a function from a number of stages to a `Model`, in float64 unless it says otherwise.
It is called on every process with the same random numbers, so that all have the same model. The
families of features stand in modules of their own, see `features.py`.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy
import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from schedlang.runtime.setup import LossFn
from schedlang.runtime.values import Value

ROWS = 2
LENGTH = 4
WIDTH = 8
STEPS = 2


class Side(Protocol):
    """One of the two trainings that are compared: in a pipeline, or alone in one process."""

    #: The stages that this process has, by their numbers; those of them whose weights it has between
    #: two steps, and the optimizers of these.
    stages: dict[int, nn.Module]
    modules: list[nn.Module]
    optimizers: list[Optimizer]
    #: What scales the losses, if the model has it.
    scaler: GradScaler | None

    def train(self, step: int) -> None:
        """Forward and backward of the batch of this number."""

    def update(self) -> None:
        """The optimizer's step, unless the plan has made it, and gradients start anew."""

    def evaluate(self, step: int) -> None:
        """The losses of a batch without gradients, in evaluation mode."""


def train_and_update(side: Side) -> None:
    """What most scripts do."""
    for step in range(STEPS):
        side.train(step)
        side.update()


def sgd(module: nn.Module) -> Optimizer:
    """With all that moves a weight that has a gradient, be it zeros."""
    return torch.optim.SGD(trained(module), 0.1, momentum=0.9, weight_decay=0.01)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is given: for a stage without weights, one that is in no stage."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return weights or [nn.Parameter(torch.zeros(()))]


def rows(
    *shape: int, dtype: torch.dtype | None = None
) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Batches of normal random numbers: inputs and targets of this shape, by step, for so many
    microbatches.
    """

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        sizes = (2, ROWS * microbatches, *shape)
        inputs, targets = torch.randn(sizes, generator=generator, dtype=dtype)
        # Not views of one tensor, or autograd takes a change of one for a change of the other.
        return inputs.clone(), targets.clone()

    return draw


#: What most features are trained on: the stages of several can follow one another.
COMMON = rows(LENGTH, WIDTH)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@define(eq=False)
class Model:
    """A model in stages, and how it is trained."""

    stages: list[nn.Module]
    #: Inputs and targets of a step, for so many microbatches.
    batch: Callable[[int, int], tuple[Value, Value]] = COMMON
    loss: LossFn = mean_square
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    #: What the script does with a side of the comparison.
    script: Callable[[Side], None] = train_and_update
    #: What a step runs in.
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: Names of tied weights by stage.
    tied: Sequence[Mapping[int, str]] = ()
    #: To which norm gradients are clipped before an update.
    max_norm: float | None = None
    #: What a microbatch's loss is multiplied by, beside the mean over microbatches.
    loss_scale: float = 1.0
    #: What scales it further, by another scale after each step.
    scaler: Callable[[], GradScaler] | None = None
    #: Keyword arguments of all modules, by microbatch.
    options: Callable[[int], Mapping[str, Any]] | None = None
    #: What torch makes of a stage on a part of a device mesh.
    spread: Callable[[nn.Module, DeviceMesh], object] | None = None
    #: By how much sums in another order may differ, relative to the largest number.
    tolerance: float = 1e-9


@frozen(eq=False)
class Feature:
    """A row of the table."""

    name: str
    family: str
    words: str
    build: Callable[[int], Model]
    #: Whether it draws random numbers, so that the order of forwards on a rank matters.
    draws: bool = False
    #: What a schedule must not have: "slices" and "skips", which stands for graphs as well, where
    #: more than one tensor of three dimensions passes between stages; "replicas", where two of the
    #: model are not one; "replicas of a loss", where a rank has two last stages, and the weights of
    #: one loss cannot be those of both; "updates", where the script makes them; "frozen", where every stage must
    #: have a gradient.
    not_for: frozenset[str] = frozenset()
    #: Of features on a device mesh, the dimension beside the pipeline's: `dp` has batches of its
    #: own, `tp` a part of each layer.
    mesh: str = ""
    #: Whether it cannot be trained, so that a pipeline that does is wrong.
    is_mistake: bool = False

    def model(self, stages: int) -> Model:
        """The same on every process."""
        torch.set_default_dtype(torch.float64)
        seed_all(0)
        return self.build(stages)


FEATURES: dict[str, Feature] = {}


def feature(
    family: str, not_for: Iterable[str] = (), **how: Any
) -> Callable[[Callable[[int], Model]], Callable[[int], Model]]:
    """Make a function a row of the table: its name, and the first line of its docstring."""

    def add(build: Callable[[int], Model]) -> Callable[[int], Model]:
        name = build.__name__.removesuffix("_").replace("_", " ")
        assert name not in FEATURES
        assert build.__doc__ is not None
        words = build.__doc__.strip().split("\n\n")[0].replace("\n    ", " ")
        FEATURES[name] = Feature(
            name, family, words, build, not_for=frozenset(not_for), **how
        )
        return build

    return add


def chain(block: Callable[[int], nn.Module], stages: int, **how: Any) -> Model:
    """A model whose stages are made by a function of their number."""
    return Model([block(stage) for stage in range(stages)], **how)


def seed_all(seed: int) -> None:
    """Torch's, Python's and numpy's random numbers."""
    # `torch.manual_seed` also keeps a stack trace for each kind of accelerator that is not there.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class Does(nn.Module):
    """A module that computes what a function says, with some parts."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)


def linear(width: int = WIDTH, **how: Any) -> nn.Sequential:
    """A small stage that nothing is special about."""
    return nn.Sequential(nn.Linear(width, width, **how), nn.Tanh())


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)
