"""Losses that stages add to that of the last one: of prediction heads at earlier stages, or of what
a router of experts has chosen.

A module adds one where it computes it, in its forward:

    add_loss("balance", balance, weight=0.01)

In a pipeline, the stage's backward begins with it as well as with the gradient of its output. In
one process, whoever calls the model takes it:

    F   stage 0 ──output──► stage 1 ──output──► loss        B   of stage 0 begins with the
           └─► balance                                          gradients of both
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, frozen
from torch import Tensor

from schedlang.runtime.errors import PipelineError

#: The name of the loss that the last stage has by `loss_fn`.
LOSS = "loss"


@frozen(eq=False)
class Added:
    """A loss by its name, what it is multiplied by in the sum of all, and whether it was added
    where torch makes graphs.
    """

    name: str
    value: Tensor
    weight: float
    has_graph: bool


#: Who takes what is added: the forward that runs, and forwards around it.
_takers: list[list[Added]] = []


class AddedLosses(dict[str, Tensor]):
    """Losses by name, of which one that was added several times is the sum."""

    def __init__(self, added: Sequence[Added] = ()) -> None:
        super().__init__()
        self._added = added
        for each in added:
            self[each.name] = (
                self[each.name] + each.value if each.name in self else each.value
            )

    @property
    def total(self) -> Tensor | float:
        """What is added to the loss: all of them, each times its weight; 0.0 where there are
        none.
        """
        return sum((each.weight * each.value for each in self._added), start=0.0)


def add_loss(name: str, value: Tensor, weight: float = 1.0) -> None:
    """Add a loss of the forward that runs: in training, `weight` times the value is added to the
    loss of the microbatch.

    `Pipeline.named_losses` reports it by its name, without the weight; losses of one name add up.
    For what calls the model by itself, `added_losses` takes it; without that, nothing does, as in a
    backward, in which a checkpoint may run the forward again. PipelineError for a value that is no
    scalar, or the name `loss`.
    """
    if not _takers:
        return
    if not isinstance(value, Tensor) or value.ndim or name == LOSS:
        what = f"has the name `{LOSS}`, which is that of `loss_fn`"
        if name != LOSS:
            shape = (
                f"has the shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else ""
            )
            what = (
                f"{shape or f'is a {type(value).__name__}'}, it must be a scalar tensor"
            )
        raise PipelineError(f"the loss `{name}` that a stage adds {what}")
    _takers[-1].append(Added(name, value, weight, torch.is_grad_enabled()))


@define
class Taking:
    """Puts what is added within into a list. It is in every forward, so it is no generator."""

    added: list[Added]

    def __enter__(self) -> None:
        _takers.append(self.added)

    def __exit__(self, *_: object) -> None:
        _takers.pop()


@contextmanager
def no_takers() -> Iterator[None]:
    """Nobody takes what is added within, as in a backward."""
    takers = _takers.copy()
    _takers.clear()
    try:
        yield
    finally:
        _takers.extend(takers)


@contextmanager
def added_losses() -> Iterator[AddedLosses]:
    """The losses that a model adds within, in one process, for the loss of a training:

    with added_losses() as added:
        output = model(inputs)
    loss = loss_fn(output, targets) + added.total
    """
    added: list[Added] = []
    losses = AddedLosses(added)
    with Taking(added):
        yield losses
    losses.update(AddedLosses(added))


def root_of(added: Sequence[Added]) -> Tensor | None:
    """The one tensor from which a backward of some losses begins, if any."""
    total = AddedLosses(added).total
    return total if isinstance(total, Tensor) and total.requires_grad else None


def total_of(added: Sequence[Added]) -> dict[str, Tensor]:
    """Losses by name, without their graph, as sums of many are made."""
    return {
        name: value.detach().to(torch.float64)
        for name, value in AddedLosses(added).items()
    }
