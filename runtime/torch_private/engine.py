"""Autograd's engine.

`torch.autograd.backward` and `torch.autograd.grad` check their arguments and then call the engine.
These checks take 30 microseconds, as long as the backward of a small layer, and the runtime makes
several calls for each action.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedlang.on_demand import on_demand
from schedlang.runtime.torch_private import instead, must, private


def _torchs_engine() -> Callable[..., Any]:
    run = private(torch.autograd.Variable, "_execution_engine", "run_backward")
    leaf = torch.ones((), requires_grad=True, device="cpu")
    one = torch.ones((), device="cpu")
    (gradient,) = run((leaf * 3,), (one,), False, False, (leaf,), True, False)
    run((leaf * 2,), (one,), False, False, (), True, True)
    must(gradient == 3 and leaf.grad == 2)
    return run  # type: ignore[no-any-return]


# The engine's arguments: outputs, their gradients, whether to keep the graph, whether to make a
# graph of the backward, inputs, whether some of these may be unused, whether to add up in `.grad`.
_run_engine = instead(
    "Variable._execution_engine",
    _torchs_engine,
    on_demand("schedlang.runtime.torch_private.bodies.public_engine"),
    "every backward takes longer",
)


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> None:
    """Add up gradients in `.grad` of these leaves, by default of all leaves."""
    _run_engine(
        tuple(outputs), tuple(gradients), False, False, tuple(leaves), True, True
    )


def gradients_of(
    inputs: Sequence[Tensor | GradientEdge],
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    keep_graph: bool = False,
    allow_unused: bool = False,
) -> Sequence[Tensor | None]:
    """The gradients of some inputs, as by `torch.autograd.grad`."""
    found: Sequence[Tensor | None] = _run_engine(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unused,
        False,
    )
    return found
