"""A backward in two halves: B passes the gradient on to the input, W adds up the gradients of the weights.

Autograd alone splits a backward only by walking its graph twice. Here the forward gives every layer a graph of its
own, of which B runs the half that leads to the input and W the one that leads to the weights, both with torch's own
kernels: together they are one whole backward, to the bit. B leaves what W needs, the layers' inputs and the gradients
of their outputs; it is the idea of the zero-bubble authors' weight gradient store (arXiv 2401.10241, section 4).

Layers are calls of functions, whatever modules make them, with any `nn.Parameter`; so tied weights, functional calls
and weights put in by `torch.func.functional_call` are split too. Other weights (of other functions, of own autograd
functions, of compiled blocks) get their gradients in B, at the cost of a whole backward, and keep them until W.
"""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

#: Functions whose gradients, of the input and of the weights, both come from that of the output in one step.
_LAYERS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear, F.bilinear, F.embedding, F.embedding_bag,
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm,
        torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
        Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm,
        torch.add, torch.mul, Tensor.add, Tensor.mul,
    }
)  # fmt: skip


def _without_dispatch(function: Any) -> Callable[..., Any]:
    """A Python function of torch without its first lines, which hand the call to a mode as a whole."""
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


#: Functions that are not layers, but call some; the backward does where a checkpoint is inside another.
_BODIES = {each: _without_dispatch(each) for each in (F.multi_head_attention_forward, torch.autograd.backward)}

#: Ties layers into the graph, even where their inputs need no gradient.
_ANCHOR = torch.zeros((), requires_grad=True)
_ANCHOR_EDGE = get_gradient_edge(_ANCHOR)
_ENGINE = torch.autograd.Variable._execution_engine


class Split(TorchFunctionMode):
    """The backward of one microbatch on one stage; the forward runs under it, as under a mode of torch.

    Where the forward has a reentrant checkpoint, which is a backward inside the backward, the gradients of other
    weights than layers' add up in B.
    """

    def __init__(self) -> None:
        super().__init__()
        #: What B leaves to W; and the weights whose gradients it leaves ready.
        self.owed: list[_Owed] = []
        self.others: list[Tensor] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _LAYERS and _is_plain() and torch.is_grad_enabled():
            call = _Call(function, [*args, *kwargs.values()], tuple(kwargs))
            if call.weights:
                return _Layer.apply(self, call, _ANCHOR, *call.inputs())  # type: ignore[no-untyped-call]
        if function in _BODIES and _is_plain():
            with self:
                return _BODIES[function](*args, **kwargs)
        return function(*args, **kwargs)

    def backward_input(
        self, outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor]
    ) -> Sequence[Tensor | None]:
        """B: the gradients of the inputs, from those of the outputs; None for an input that these do not depend on."""
        self.owed.clear()  # by a backward inside the forward
        roots = list(map(get_gradient_edge, outputs))
        leaves, reentrant = _leaves([root.node for root in roots])
        others = [leaf for leaf in leaves if leaf is not _ANCHOR and all(leaf is not each for each in inputs)]
        with self:  # for checkpoints, which run the forward again
            if reentrant:
                torch.autograd.backward(roots, gradients)
                own = [each.grad for each in inputs]
                for each in inputs:
                    each.grad = None
                return own
            # Edges: a call with tensors would leave this mode.
            edges = [_ANCHOR_EDGE, *map(get_gradient_edge, [*others, *inputs])]
            _, *found = torch.autograd.grad(roots, edges, gradients, allow_unused=True)
        for leaf, gradient in zip(others, found, strict=False):
            if gradient is not None:
                self.others.append(leaf)
                self.owed.append(_Owed(get_gradient_edge(leaf), gradient, [leaf], []))
        return found[len(others) :]

    def backward_weight(self) -> None:
        """W: the gradients of the weights, which add up in `.grad`; hooks see each weight's once."""
        uses = Counter(id(weight) for each in self.owed for weight in each.weights)
        tied: list[_Owed] = []
        alone: deque[_Owed] = deque()
        for each in self.owed:
            (tied if any(uses[id(weight)] > 1 for weight in each.weights) else alone).append(each)
        self.owed = []
        # One by one: what a layer has held goes before the next needs memory.
        while alone:
            _accumulate([alone.popleft()])
        if tied:
            _accumulate(tied)


def _is_plain() -> bool:
    """Whether a call is what it seems, and not traced by `torch.compile` or transformed by `torch.func`."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def warn_of(weights: Iterable[Tensor], module: nn.Module, stage: int) -> None:
    """Warn that the gradients of some weights of a stage are not left to W, with the modules that have them."""
    ids = {id(weight) for weight in weights}
    names = [
        f"`{name}` ({type(part).__name__})" if name else type(part).__name__
        for name, part in module.named_modules()
        if any(id(weight) in ids for weight in part.parameters(recurse=False))
    ]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = shown or "tensors that are no weights of its module"
    warnings.warn(
        f"stage {stage} computes weight gradients in B and not in W, those of {where}: only linear layers, "
        "convolutions, embeddings and norms are split, and nothing inside torch.compile or torch.func",
        stacklevel=2,
    )


@frozen
class _Owed:
    """What B owes to a layer's weights: where its graph ends, the gradient there, and what the graph has saved."""

    output: GradientEdge
    gradient: Tensor
    weights: list[Tensor]
    saved: list[Tensor]


def _accumulate(owed: list[_Owed]) -> None:
    """Add up the gradients of some layers' weights."""
    ends, gradients = tuple(each.output for each in owed), tuple(each.gradient for each in owed)
    weights = tuple(weight for each in owed for weight in each.weights)
    _ENGINE.run_backward(ends, gradients, False, False, weights, True, True)
    for each in owed:
        each.saved.clear()


class _Call:
    """A call of a function of torch; its weights, and the places of its inputs, are the arguments with gradients."""

    def __init__(self, function: Callable[..., Any], values: list[Any], names: tuple[str, ...]) -> None:
        self.function, self.values, self.names = function, values, names
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

    def with_inputs(self, inputs: Iterable[Tensor]) -> Any:
        """The call's result with other inputs."""
        values = self.values.copy()
        for place, input in zip(self.places, inputs, strict=True):
            values[place] = input
        positional = len(values) - len(self.names)
        return self.function(*values[:positional], **dict(zip(self.names, values[positional:], strict=True)))


class _Layer(torch.autograd.Function):
    """A call in the forward; in the backward, the gradients of its inputs, and what it owes to its weights.

    What the layer's own graph saves, this node saves in its place: a checkpoint then drops it, and makes all of it
    again once, in B.
    """

    @staticmethod
    def forward(ctx: Any, split: Split, call: _Call, _: Tensor, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.weights, ctx.saved = split, call.weights, []
        with torch.enable_grad(), saved_tensors_hooks(partial(_keep, ctx.saved), ctx.saved.__getitem__):
            starts = _Start.apply(_ANCHOR, inputs)  # type: ignore[no-untyped-call]
            output: Tensor = call.with_inputs(starts)
        ctx.save_for_backward(*ctx.saved)
        ctx.saved.clear()
        ctx.starts, ctx.end = tuple(map(get_gradient_edge, starts)), get_gradient_edge(output)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        found: Iterable[Tensor | None] = [None] * len(ctx.starts)
        if gradient is not None:
            ctx.saved[:] = ctx.saved_tensors
            ctx.split.owed.append(_Owed(ctx.end, gradient, ctx.weights, ctx.saved))
            if ctx.starts:
                # What `torch.autograd.grad(…, retain_graph=True)` calls, which takes as long again as a small layer.
                found = _ENGINE.run_backward((ctx.end,), (gradient,), True, False, ctx.starts, False, False)
        return None, None, None, *found


class _Start(torch.autograd.Function):
    """Where the graph of a layer starts: not at leaves, which would hold the inputs even if a checkpoint drops them."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(each.detach() for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("no backward goes on from here")


def _keep(saved: list[Tensor], tensor: Tensor) -> int:
    saved.append(tensor)
    return len(saved) - 1


def _leaves(roots: list[Node]) -> tuple[list[Tensor], bool]:
    """The leaves of a graph, and whether there is a reentrant checkpoint in it."""
    leaves, reentrant = [], False
    seen, ahead = set(roots), list(dict.fromkeys(roots))
    while ahead:
        node = ahead.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        reentrant = reentrant or node.name() == "CheckpointFunctionBackward"
        for each, _ in node.next_functions:
            if each is not None and each not in seen:
                seen.add(each)
                ahead.append(each)
    return leaves, reentrant
