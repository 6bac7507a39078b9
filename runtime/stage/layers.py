"""Layers in the forward of a backward in two halves, and what B leaves of them to W.

Layers are calls of functions, whatever modules make them, with any `nn.Parameter`; so tied weights,
functional calls and weights put in by `torch.func.functional_call` are split too. A linear layer
becomes a function of autograd of its own. Other layers get a graph of their own: B runs the half of
it that leads to the input, W the one that leads to the weights.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

#: Layers whose weights' gradients are no work beside those of the input.
LIGHT_LAYERS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.layer_norm,
        F.rms_norm,
        F.group_norm,
        F.batch_norm,
        F.instance_norm,
        torch.add,
        torch.mul,
        Tensor.add,
        Tensor.mul,
    }
)

#: Functions whose gradients, of the input and of the weights, both come from that of the output in
#: one step.
LAYERS: frozenset[Callable[..., Any]] = LIGHT_LAYERS.union(
    {
        F.linear,
        F.bilinear,
        F.embedding,
        F.embedding_bag,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        Tensor.matmul,
        Tensor.mm,
        Tensor.bmm,
        Tensor.addmm,
        Tensor.baddbmm,
    }
)

#: Multiplications in the weight gradient of a linear layer that take longer than to split it.
_WORTH = 2**20

#: Ties layers into the graph, even where their inputs need no gradient.
ANCHOR = torch.zeros((), requires_grad=True)

#: What `torch.autograd.backward` and `grad` call, which take as long again as a small layer.
ENGINE = torch.autograd.Variable._execution_engine


@frozen
class Owed:
    """What B owes to some weights: the ends of a graph that leads to them, or they themselves; and
    the gradients there.

    Of a linear layer, instead of these, its `input` and the gradient of its output; of a graph,
    what it has `saved`.
    """

    weights: Sequence[Tensor]
    ends: Sequence[Tensor | GradientEdge]
    gradients: Sequence[Tensor]
    input: Tensor | None = None
    saved: list[Tensor] | None = None

    def at_ends(self) -> Sequence[Tensor]:
        """The gradients at the ends."""
        if self.input is None:
            return self.gradients
        rows = self.gradients[0].flatten(0, -2)
        weight = rows.t().mm(self.input.flatten(0, -2))
        return [weight, rows.sum(0)] if len(self.weights) > 1 else [weight]


def accumulate(owed: list[Owed]) -> None:
    """Add up some gradients of weights."""
    ends = tuple(end for each in owed for end in each.ends)
    gradients = tuple(gradient for each in owed for gradient in each.at_ends())
    weights = tuple(weight for each in owed for weight in each.weights)
    ENGINE.run_backward(ends, gradients, False, False, weights, True, True)
    for each in owed:
        if each.saved is not None:
            each.saved.clear()


class Call:
    """A call of a function of torch; its weights, and the places of its inputs, are the arguments
    with gradients.
    """

    def __init__(
        self, function: Callable[..., Any], values: list[Any], names: tuple[str, ...]
    ) -> None:
        self.function = function
        self.values = values
        self.names = names
        self.weights: list[Tensor] = []
        self.places: list[int] = []
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.requires_grad:
                # A view of a weight is as good, as in `x @ weight.T`.
                weight = value if value._base is None else value._base
                if isinstance(weight, nn.Parameter):
                    self.weights.append(weight)
                else:
                    self.places.append(place)

    def inputs(self) -> list[Tensor]:
        """What gets its gradient in B."""
        return [self.values[place] for place in self.places]

    def is_worth(self) -> bool:
        """Whether the weight gradients take longer than to split them off."""
        if self.function is not F.linear:
            return True
        input, weight, *_ = self.values  # or the other way round
        return bool(input.numel() * weight.numel() >= _WORTH * input.shape[-1])

    def is_simple(self) -> bool:
        """Whether it is a linear layer of plain weights, which need gradients, and no cast."""
        if self.function is not F.linear or self.names:
            return False
        input, *weights = (each for each in self.values if each is not None)
        return (
            type(input) is Tensor
            and input.ndim > 1
            and len(weights) == len(self.weights)
            and all(type(each) is nn.Parameter and each.requires_grad for each in weights)
            and not torch.is_autocast_enabled(input.device.type)
        )

    def as_layer(self, owed: list[Owed]) -> Tensor:
        """The result, a layer of a graph whose backward adds to what is owed."""
        layer = _Linear if self.is_simple() else _Layer
        output: Tensor = layer.apply(owed, self, ANCHOR, *self.inputs())  # type: ignore[no-untyped-call]
        return output

    def with_inputs(self, inputs: Iterable[Tensor]) -> Any:
        """The call's result with other inputs."""
        values = self.values.copy()
        for place, input in zip(self.places, inputs, strict=True):
            values[place] = input
        positional = len(values) - len(self.names)
        return self.function(
            *values[:positional], **dict(zip(self.names, values[positional:], strict=True))
        )


class _Linear(torch.autograd.Function):
    """A linear layer in the forward; in the backward, the gradient of its input, and what it owes
    to its weights.
    """

    @staticmethod
    def forward(ctx: Any, owed: list[Owed], call: Call, _: Tensor, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.owed = owed
        ctx.weights = call.weights
        ctx.save_for_backward(*call.values[:2])
        return F.linear(
            *call.values
        ).detach()  # or it may be a view, which nothing may change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        if gradient is None:
            return None, None, None, *[None for _ in needed]
        input, weight = ctx.saved_tensors
        ctx.owed.append(Owed(ctx.weights, ctx.weights, [gradient], input.detach()))
        return None, None, None, *[gradient.matmul(weight) for _ in needed]


class _Layer(torch.autograd.Function):
    """A call in the forward; in the backward, the gradients of its inputs, and what it owes to its
    weights.

    What the layer's own graph saves, this node saves in its place: a checkpoint then drops it, and
    makes all of it again once, in B.
    """

    @staticmethod
    def forward(ctx: Any, owed: list[Owed], call: Call, _: Tensor, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.owed = owed
        ctx.weights = call.weights
        ctx.saved = []
        with (
            torch.enable_grad(),
            saved_tensors_hooks(partial(_keep, ctx.saved), ctx.saved.__getitem__),
        ):
            starts = _Start.apply(ANCHOR, inputs)  # type: ignore[no-untyped-call]
            output: Tensor = call.with_inputs(starts)
        ctx.save_for_backward(*ctx.saved)
        ctx.saved.clear()
        ctx.starts = tuple(map(get_gradient_edge, starts))
        ctx.end = get_gradient_edge(output)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        found: Iterable[Tensor | None] = [None] * len(ctx.starts)
        if gradient is not None:
            ctx.saved[:] = ctx.saved_tensors
            ctx.owed.append(Owed(ctx.weights, [ctx.end], [gradient], saved=ctx.saved))
            if ctx.starts:
                found = ENGINE.run_backward(
                    (ctx.end,), (gradient,), True, False, ctx.starts, False, False
                )
        return None, None, None, *found


class _Start(torch.autograd.Function):
    """Where the graph of a layer starts: not at leaves, which would hold the inputs even if a
    checkpoint drops them.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(each.detach() for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("no backward goes on from here")


def _keep(saved: list[Tensor], tensor: Tensor) -> int:
    saved.append(tensor)
    return len(saved) - 1
