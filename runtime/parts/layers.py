"""Layers whose backward runs in two halves, and the weight gradients that B leaves to W.

A layer is any call of certain functions with an `nn.Parameter`; so tied weights, functional calls
and weights of `torch.func.functional_call` are split, too. A linear layer becomes an autograd
function. Any other layer gets a graph of its own: B runs the half that leads to the input, and W
the half that leads to the weights.

                     ┌─► gradient of the input ──► the layer before         in B
    output gradient ─┤
                     └─► `Deferred` ─────────────► gradient of the weights  in W

A forward may run a backward of its own, for example to compute forces, or for a layer with its own
loss. That backward is whole: its layers compute the gradients of inputs and weights at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from schedlang.runtime.torch_private.engine import gradients_of, run_backward
from schedlang.runtime.torch_private.tensors import base_of

#: Layers whose weight gradients are cheap compared with their input gradients.
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

#: Functions whose input and weight gradients both follow directly from the output gradient.
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

#: A linear layer is split if its weight gradient takes at least this many multiplications; for
#: fewer, splitting costs more than it gains.
_WORTH = 2**20

#: A tensor that requires a gradient, so that the graphs of layers have a start.
_ANCHOR = torch.zeros((), requires_grad=True, device="cpu")


@frozen
class Deferred:
    """The gradients of some weights that B leaves to W.

    W starts at the `ends`, which are the outputs of a graph that leads to the weights, or the
    weights themselves; `compute` returns the gradients there. A graph has `saved` tensors.
    """

    weights: Sequence[Tensor]
    ends: Sequence[Tensor | GradientEdge]
    compute: Callable[[], Sequence[Tensor]]
    saved: list[Tensor] | None = None


class Store:
    """The gradients that layers leave to W, for one microbatch on one stage."""

    def __init__(self) -> None:
        self.deferred: list[Deferred] = []
        #: Whether the backward that runs now leaves nothing to W, since the forward runs it.
        self.is_whole = False
        #: Whether a layer is being recomputed, and must not be split again.
        self.is_again = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which backwards leave nothing to W."""
        was_whole = self.is_whole
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = was_whole

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which layers are not split."""
        self.is_again = True
        try:
            yield
        finally:
            self.is_again = False


#: The stores of the forwards and backwards that are running, the innermost one last.
STORES: list[Store] = []


def accumulate(deferred: list[Deferred]) -> None:
    """Compute deferred gradients, and add them up in the `.grad` of their weights."""
    ends = [end for layer in deferred for end in layer.ends]
    gradients = [gradient for layer in deferred for gradient in layer.compute()]
    weights = [weight for layer in deferred for weight in layer.weights]
    # One call of autograd for all layers, so that the hooks of a weight that several of them use
    # see its whole gradient.
    run_backward(ends, gradients, weights)
    for layer in deferred:
        if layer.saved is not None:
            layer.saved.clear()


class LayerCall:
    """A call of a layer. Its arguments that need gradients are either weights or inputs;
    `positions` are those of the inputs.
    """

    def __init__(
        self, function: Callable[..., Any], values: list[Any], names: tuple[str, ...]
    ) -> None:
        self.function = function
        self.values = values
        self.names = names
        self.weights: list[Tensor] = []
        self.positions: list[int] = []
        for position, value in enumerate(values):
            if isinstance(value, Tensor) and value.requires_grad:
                # A view of a weight counts as a weight, as in `x @ weight.T`.
                weight = base_of(value)
                if isinstance(weight, nn.Parameter):
                    self.weights.append(weight)
                else:
                    self.positions.append(position)

    def inputs(self) -> list[Tensor]:
        """The arguments whose gradients B computes."""
        return [self.values[position] for position in self.positions]

    def is_worth(self) -> bool:
        """Whether the weight gradients take longer than splitting costs."""
        if self.function is not F.linear:
            return True
        input, weight, *_ = self.values  # or the other way round
        return bool(input.numel() * weight.numel() >= _WORTH * input.shape[-1])

    def is_simple(self) -> bool:
        """Whether the call is a linear layer of plain real weights that all need gradients, without
        autocast.
        """
        if self.function is not F.linear or self.names:
            return False
        input, *weights = (value for value in self.values if value is not None)
        return (
            type(input) is Tensor
            and input.is_floating_point()
            and input.ndim > 1
            and len(weights) == len(self.weights)
            and all(
                type(weight) is nn.Parameter and weight.requires_grad
                for weight in weights
            )
            and not torch.is_autocast_enabled(input.device.type)
        )

    def as_layer(self, store: Store) -> Tensor:
        """Call the layer; its backward leaves the weight gradients in the store."""
        layer = _Linear if self.is_simple() else _Layer
        output: Tensor = layer.apply(store, self, *self.inputs(), *self.weights)  # type: ignore[no-untyped-call]
        return output

    def without_inputs(self) -> "LayerCall":
        """A copy of the call that holds no inputs, for use with other ones."""
        call = copy(self)
        call.values = self._values([None] * len(self.positions))
        return call

    def _values(self, inputs: Iterable[Tensor | None]) -> list[Any]:
        values = self.values.copy()
        for position, input in zip(self.positions, inputs, strict=True):
            values[position] = input
        return values

    def with_inputs(self, inputs: Iterable[Tensor]) -> Any:
        """Call the layer with other inputs."""
        values = self._values(inputs)
        positional = len(values) - len(self.names)
        return self.function(
            *values[:positional],
            **dict(zip(self.names, values[positional:], strict=True)),
        )


class _Linear(torch.autograd.Function):
    """A linear layer whose backward computes the gradient of its input, and defers those of its
    weights.
    """

    @staticmethod
    def forward(ctx: Any, store: Store, call: LayerCall, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.store = store
        ctx.weights = call.weights
        ctx.save_for_backward(*call.values[:2])
        # `detach`, since the result may be a view, which must not be changed in place.
        return F.linear(*call.values).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        # The first two arguments of `forward` are no tensors; then come inputs, then weights.
        inputs = len(ctx.needs_input_grad) - 2 - len(ctx.weights)
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        input, weight = ctx.saved_tensors
        of_inputs = [gradient.matmul(weight)] if inputs else []
        if ctx.store.is_whole:
            return (
                None,
                None,
                *of_inputs,
                *_of_linear(gradient, input, len(ctx.weights)),
            )
        compute = partial(_of_linear, gradient, input.detach(), len(ctx.weights))
        ctx.store.deferred.append(Deferred(ctx.weights, ctx.weights, compute))
        return None, None, *of_inputs, *[None for _ in ctx.weights]


def _of_linear(gradient: Tensor, input: Tensor, weights: int) -> list[Tensor]:
    """The gradients of a linear layer's weight and of its bias, if it has one."""
    rows = gradient.flatten(0, -2)
    weight = rows.t().mm(input.flatten(0, -2))
    return [weight, rows.sum(0)] if weights > 1 else [weight]


class _Layer(torch.autograd.Function):
    """A layer whose backward computes the gradients of its inputs, and defers those of its weights.

    This node saves the tensors that the layer's own graph would save. So a checkpoint can drop
    them, and recomputes them once, in B.
    """

    @staticmethod
    def forward(ctx: Any, store: Store, call: LayerCall, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.store = store
        ctx.weights = call.weights
        ctx.saved = []
        inputs = call.inputs()
        with (
            torch.enable_grad(),
            saved_tensors_hooks(partial(_keep, ctx.saved), ctx.saved.__getitem__),
        ):
            starts = _Start.apply(_ANCHOR, inputs)  # type: ignore[no-untyped-call]
            output: Tensor = call.with_inputs(starts)
        # The layer's own graph mostly saves its inputs, so to save them here takes no memory. Under
        # autocast it saves casts of them instead.
        ctx.has_inputs = not torch.is_autocast_enabled(output.device.type)
        ctx.call = call.without_inputs()
        ctx.save_for_backward(*ctx.saved, *(inputs if ctx.has_inputs else []))
        ctx.own = len(ctx.saved)
        ctx.saved.clear()
        # Gradient edges instead of tensors, which would keep their memory until the backward.
        ctx.starts = tuple(map(get_gradient_edge, starts))
        ctx.end = get_gradient_edge(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        if ctx.store.is_whole:
            return None, None, *_whole(ctx, gradient)
        ctx.saved[:] = ctx.saved_tensors[: ctx.own]
        ctx.store.deferred.append(
            Deferred(ctx.weights, [ctx.end], lambda: [gradient], ctx.saved)
        )
        of_inputs: Iterable[Tensor | None] = []
        if ctx.starts:
            of_inputs = gradients_of(ctx.starts, [ctx.end], [gradient], keep_graph=True)
        return None, None, *of_inputs, *[None for _ in ctx.weights]


def _whole(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    """The gradients of a layer's inputs and weights, with a graph if gradients are enabled."""
    has_graph = torch.is_grad_enabled()
    if not (has_graph and ctx.starts):
        ctx.saved[:] = ctx.saved_tensors[: ctx.own]
        gradients = torch.autograd.grad(
            [ctx.end],
            [*ctx.starts, *ctx.weights],
            [gradient],
            retain_graph=True,
            create_graph=has_graph,
            allow_unused=True,
        )
        ctx.saved.clear()
        return gradients
    # The layer's own graph does not continue to the layers before it. So the layer is recomputed,
    # with a graph that does.
    if not ctx.has_inputs:
        raise RuntimeError(
            "inside autocast a stage cannot differentiate its own layers twice "
            f"(`create_graph=True` at `{ctx.call.function.__name__}`) where a plan splits "
            "backwards (`W`); take a schedule with whole backwards"
        )
    inputs = ctx.saved_tensors[ctx.own :]
    with ctx.store.again():
        output = ctx.call.with_inputs(inputs)
    return torch.autograd.grad(
        [output],
        [*inputs, *ctx.weights],
        [gradient],
        create_graph=True,
        allow_unused=True,
    )


class _Start(torch.autograd.Function):
    """The start of a layer's own graph, in place of leaves: these would hold the inputs even if a
    checkpoint drops them.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(input.detach() for input in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("no backward goes on from here")


def _keep(saved: list[Tensor], tensor: Tensor) -> int:
    saved.append(tensor)
    return len(saved) - 1
