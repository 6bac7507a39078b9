"""Updates that make good for gradients which are late by one update."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from schedlang.diagnostics.wrong_arguments import check_type

#: What the step before has changed, in the state of each weight.
_LAST = "last_update"
#: The optimizers that have error feedback.
_CORRECTED: WeakSet[Optimizer] = WeakSet()


def error_feedback(optimizer: Optimizer) -> Optimizer:
    """Let each step of an optimizer, which is returned, correct the step before it, for schedules
    whose gradients are late by one update (Zmushko et al. 2026, arXiv 2606.30634; the rule is that
    of a summary of the paper).

    If step k takes u(k) from the weights x, they become x - u(k) - (u(k) - u(k-1)) instead: u(k)
    has the gradient at the weights from which step k - 1 began, so it is what that step should have
    applied in place of u(k-1). The first step is not corrected. Learning rates, clipping and weight
    decay are part of u, and any optimizer will do. What a step has changed is kept in the
    optimizer's state, as large as the weights, so that checkpoints have it. A step holds as much
    again. TypeError for what is no optimizer; ValueError for one that has error feedback already.
    """
    check_type("optimizer", optimizer, Optimizer, "one optimizer of torch")
    if optimizer in _CORRECTED:
        raise ValueError(
            "the optimizer has error feedback already: a second one would correct each update twice"
        )
    before: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def keep(optimizer: Optimizer, *_: Any) -> None:
        before.clear()
        for group in optimizer.param_groups:
            for weight in group["params"]:
                before[weight] = weight.clone()

    @torch.no_grad()
    def correct(optimizer: Optimizer, *_: Any) -> None:
        for weight, old in before.items():
            state = optimizer.state[weight]
            update = old.sub_(weight)
            if _LAST in state:
                weight.sub_(update - state[_LAST])
                state[_LAST] = update
            # Optimizers see by an empty state that a weight never had a gradient.
            elif weight.grad is not None:
                state[_LAST] = update
        before.clear()

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(correct)
    _CORRECTED.add(optimizer)
    return optimizer
