"""How the command trains: an optimizer and its learning rate."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from attrs import frozen
from torch import nn
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.late_updates import error_feedback
from schedlang.runtime.parts.versions import delays

#: By name, and the learning rate that suits the model where gradients are in time.
_OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], float]] = {
    "sgd": (torch.optim.SGD, 0.1),
    "adam": (torch.optim.Adam, 0.003),
    "adamw": (torch.optim.AdamW, 0.003),
}
_MOMENTUM = 0.9


@frozen
class Recipe:
    """An optimizer by its name, and its learning rate; where that is None, one that suits the plan.

    By default SGD. Not Adam: it divides by the gradient's own size, so rounding errors of tiny
    gradients would grow to full steps, and two orders of the same additions would part.
    """

    optimizer: str = "sgd"
    rate: float | None = None
    error_feedback: bool = False

    def make(self, weights: Iterable[nn.Parameter], plan: Plan) -> Optimizer:
        """The optimizer of some weights."""
        make, _ = _OPTIMIZERS[self.optimizer]
        if self.has_momentum(plan):
            make = partial(make, momentum=_MOMENTUM)
        optimizer = make(weights, lr=self.learning_rate(plan))
        return error_feedback(optimizer) if self.error_feedback else optimizer

    def has_momentum(self, plan: Plan) -> bool:
        """Whether SGD has momentum: not where gradients are late, for it would go on in a direction
        that has ceased to be right.
        """
        return self.optimizer == "sgd" and not latest(plan)

    def learning_rate(self, plan: Plan) -> float:
        """The rate for a plan. SGD's is divided by 1 + d where gradients are late by d updates:
        on a quadratic of curvature c, steps converge up to 2 sin(pi / (4d + 2)) / c (PipeMare,
        Yang et al. 2021, arXiv 1910.05124, section 3.1).
        """
        if self.rate is not None:
            return self.rate
        rate = _OPTIMIZERS[self.optimizer][1]
        return rate / (1 + latest(plan)) if self.optimizer == "sgd" else rate

    def text(self, plan: Plan) -> str:
        """For the header of a training."""
        momentum = f", momentum {_MOMENTUM}" if self.has_momentum(plan) else ""
        feedback = ", error feedback" if self.error_feedback else ""
        rate = f"{self.learning_rate(plan):.2g}"
        return f"{self.optimizer} with a learning rate of {rate}{momentum}{feedback}"


def latest(plan: Plan) -> int:
    """By how many updates the gradients of a plan are late at most."""
    ranks = range(len(plan.ranks))
    return max(max(delays(plan, rank).values(), default=0) for rank in ranks)
