"""A backward in two halves: B passes the gradient on to the input, W adds up the gradients of the
weights.

Autograd alone splits a backward only by walking its graph twice. Here the forward takes the layers
out of its graph (`schedlang.runtime.stage.layers`). B computes the gradients of their inputs, and
leaves what W needs: the layers' inputs, and the gradients of their outputs. W does the rest, with
torch's own kernels: together they are one whole backward, to the bit. It is the idea of the
zero-bubble authors' weight gradient store (arXiv 2401.10241, section 4).

Some weights get their gradients in B, which keeps them for W: those of little work, as of norms and
of narrow layers, since to split them takes longer; and those out of reach, of other functions, of
own autograd functions, of compiled blocks, at the cost of a whole backward.
"""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from schedlang.runtime.stage.layers import (
    ANCHOR,
    ENGINE,
    LAYERS,
    LIGHT_LAYERS,
    Call,
    Owed,
    accumulate,
)


def _without_dispatch(function: Any) -> Callable[..., Any]:
    """A Python function of torch without its first lines, which hand the call to a mode as a
    whole.
    """
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    body = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


#: Functions that are not layers, but call some; the backward does where a checkpoint is inside
#: another.
_BODIES = {
    each: _without_dispatch(each)
    for each in (F.multi_head_attention_forward, torch.autograd.backward)
}


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """A whole backward, as by `torch.autograd.backward`."""
    ENGINE.run_backward(tuple(outputs), tuple(gradients), False, False, (), True, True)


class Split(TorchFunctionMode):
    """The backward of one microbatch on one stage; the forward runs under it, as under a mode of
    torch.

    With a reentrant checkpoint in the forward, which is a backward inside the backward, B can keep
    no gradients: there all layers are to be split, and the gradients of weights out of reach add up
    in B.
    """

    def __init__(self, splits_all: bool = False) -> None:
        super().__init__()
        #: What B leaves to W; and the weights whose gradients it leaves ready.
        self.owed: list[Owed] = []
        self.others: Sequence[Tensor] = ()
        self.splits_all = splits_all

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in LAYERS and torch.is_grad_enabled() and _is_plain():
            if self.splits_all or function not in LIGHT_LAYERS:
                call = Call(function, [*args, *kwargs.values()], tuple(kwargs))
                if call.weights and (self.splits_all or call.is_worth()):
                    return call.as_layer(self.owed)
        elif function in _BODIES and _is_plain():
            with self:
                return _BODIES[function](*args, **kwargs)
        return function(*args, **kwargs)

    def backward_input(
        self, outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor]
    ) -> Sequence[Tensor | None]:
        """B: the gradients of the inputs, from those of the outputs; None for an input that these
        do not depend on.
        """
        self.owed.clear()  # by a backward inside the forward
        leaves, reentrant = _leaves(outputs)
        others = [
            leaf
            for leaf in leaves
            if leaf is not ANCHOR and all(leaf is not each for each in inputs)
        ]
        roots = tuple(outputs)
        starts = tuple(gradients)
        with self:  # for checkpoints, which run the forward again
            if reentrant:
                run_backward(roots, starts)
                own = [each.grad for each in inputs]
                for each in inputs:
                    each.grad = None
                return own
            wanted = ANCHOR, *others, *inputs
            _, *found = ENGINE.run_backward(roots, starts, False, False, wanted, True, False)
        kept = [
            (leaf, gradient)
            for leaf, gradient in zip(others, found, strict=False)
            if gradient is not None
        ]
        if kept:
            self.others, ready = zip(*kept, strict=True)
            self.owed.append(Owed(self.others, self.others, ready))
        return found[len(others) :]

    def backward_weight(self) -> None:
        """W: the gradients of the weights, which add up in `.grad`; hooks see each weight's
        once.
        """
        uses = Counter(id(weight) for each in self.owed for weight in each.weights)
        tied: list[Owed] = []
        alone: deque[Owed] = deque()
        for each in self.owed:
            (tied if any(uses[id(weight)] > 1 for weight in each.weights) else alone).append(each)
        self.owed.clear()
        # One by one: what a layer has held goes before the next needs memory.
        while alone:
            accumulate([alone.popleft()])
        if tied:
            accumulate(tied)


def _is_plain() -> bool:
    """Whether a call is what it seems, and not traced by `torch.compile` or transformed by
    `torch.func`.
    """
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def warn_of(weights: Iterable[Tensor], module: nn.Module, stage: int) -> None:
    """Warn that the gradients of some weights of a stage are not left to W, with the modules that
    have them.
    """
    ids = {id(weight) for weight in weights}
    names = [
        f"`{name}` ({type(part).__name__})" if name else type(part).__name__
        for name, part in module.named_modules()
        if any(id(weight) in ids for weight in part.parameters(recurse=False))
    ]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = shown or "tensors that are no weights of its module"
    warnings.warn(
        f"stage {stage} computes weight gradients in B and not in W, those of {where}: only linear "
        "layers, "
        "convolutions, embeddings and matrix products are split, and nothing inside torch.compile "
        "or torch.func",
        stacklevel=2,
    )


def has_reentrant_checkpoint(outputs: Iterable[Tensor]) -> bool:
    """Whether there is a reentrant checkpoint in the forward of some outputs."""
    return _leaves(outputs)[1]


def _leaves(outputs: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
    """The leaves of the graph of some outputs, and whether there is a reentrant checkpoint
    in it.
    """
    leaves = []
    reentrant = False
    ahead: list[Node] = list(dict.fromkeys(get_gradient_edge(each).node for each in outputs))
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        following = node.next_functions
        if not following and hasattr(node, "variable"):
            leaves.append(node.variable)
        reentrant = reentrant or type(node).__name__ == "CheckpointFunctionBackward"
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                ahead.append(each)
    return leaves, reentrant
