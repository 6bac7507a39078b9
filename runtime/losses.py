"""Losses that stages add to the loss of the last stage, such as those of earlier prediction heads,
or of a router of experts.

A module adds a loss in its forward:

    add_loss("balance", balance, weight=0.01)

In a pipeline, the stage's backward starts from this loss and from the gradient of its output. In
one process, the caller of the model collects it:

    F   stage 0 ──output──► stage 1 ──output──► loss        B   of stage 0 starts from the
           └─► balance                                          gradients of both
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, frozen
from torch import Tensor

from schedlang.runtime.errors import PipelineError

#: The name of the loss that `loss_fn` computes on the last stage.
LOSS = "loss"


@frozen(eq=False)
class Added:
    """A loss with its name, its weight in the sum of all losses, and whether it was added while
    gradients were enabled.
    """

    name: str
    value: Tensor
    weight: float
    has_graph: bool


#: The lists that collect added losses: that of the running forward last, before it those around it.
_takers: list[list[Added]] = []


class AddedLosses(dict[str, Tensor]):
    """Losses by name; losses with the same name are summed."""

    def __init__(self, added: Sequence[Added] = ()) -> None:
        super().__init__()
        self._added = added
        for each in added:
            self[each.name] = (
                self[each.name] + each.value if each.name in self else each.value
            )

    @property
    def total(self) -> Tensor | float:
        """The sum of all losses, each times its weight; 0.0 without any."""
        return sum((each.weight * each.value for each in self._added), start=0.0)


def add_loss(name: str, value: Tensor, weight: float = 1.0) -> None:
    """Add a loss in a module's forward: in training, `weight` times the value is added to the loss
    of the microbatch.

    `Pipeline.named_losses` reports it by its name, without the weight; losses of one name add up.
    If a script calls the model by itself, `added_losses` collects it; otherwise it is ignored, as
    in a backward, in which a checkpoint may run the forward again. PipelineError for a value that
    is no scalar, or for the name `loss`.
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
    """A context that collects added losses in a list; no generator, since every forward uses it."""

    added: list[Added]

    def __enter__(self) -> None:
        _takers.append(self.added)

    def __exit__(self, *_: object) -> None:
        _takers.pop()


@contextmanager
def no_takers() -> Iterator[None]:
    """A context in which added losses are ignored, as in a backward."""
    takers = _takers.copy()
    _takers.clear()
    try:
        yield
    finally:
        _takers.extend(takers)


@contextmanager
def added_losses() -> Iterator[AddedLosses]:
    """A context that collects the losses that a model adds in one process:

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
    """The sum from which the backward of these losses starts; None if no loss has a graph."""
    total = AddedLosses(added).total
    return total if isinstance(total, Tensor) and total.requires_grad else None


def total_of(added: Sequence[Added]) -> dict[str, Tensor]:
    """Losses by name, detached and in double precision, since many are summed."""
    return {
        name: value.detach().to(torch.float64)
        for name, value in AddedLosses(added).items()
    }
