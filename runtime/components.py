"""Stages made of components, whose forwards and backwards alternate if the plan overlaps them.

DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) divides a layer of experts into attention, all-to-all
dispatch, MLP and all-to-all combine. If a forward and a backward overlap, a component of one runs
while tokens of the other are exchanged. A module marks where its components end:

    x = end_component(self.attention(x))
    x = end_component(self.experts(x))

In a forward whose backward will overlap, the graph is cut there, as in Megatron's schedule plans:
the output of a component becomes a leaf for the next one, and the backward goes from leaf to leaf.

    forward     ├ attention ┤leaf├ experts ┤          of microbatch a
    backward    ├ experts ──┤leaf├ attention ┤        of microbatch b
    overlapped  attention a, experts b, experts a, attention b

Apart from that it is autograd's own backward in pieces: the same kernels in the same order, with
the same gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import ismethod, signature
from itertools import accumulate
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from schedlang.runtime.entry import changeable
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.losses import Added, no_takers
from schedlang.runtime.part import Forward, Walk
from schedlang.runtime.torch_private.graphs import order_of
from schedlang.runtime.values import Value, flatten, unflatten

#: The components of the forwards that are running, the innermost one last.
_running: list["Components"] = []

_SECOND_TIME = "backward through the graph a second time"


def end_component(value: Value) -> Value:
    """Mark the end of a component in a module's forward. Returns the value, which must have
    everything that later components use of earlier ones.

    The value is a tensor, or tensors in tuples, lists and dictionaries. If the plan overlaps a
    forward and a backward (`overlap { F(a) B(b) }`), they alternate here, component by component;
    otherwise this does nothing. All components may use the input of the stage.
    """
    return _running[-1].end(value) if _running else value


@frozen
class OverlappedForward:
    """The forward that a module's `overlapped` must compute: the arguments with which its `forward`
    would be called.
    """

    inputs: tuple[Any, ...]
    options: Mapping[str, Any]


class OverlappedBackward:
    """The backward of another microbatch, on this stage or on another one of the rank, which a
    module's `overlapped` gets: a whole backward, or its input half (`I`).

    The runtime has its graph, its saved tensors and the gradients of its output. Each call of
    `advance` runs one component by autograd, the last component first.
    """

    def __init__(self, steps: Iterator[None], components: int) -> None:
        self._steps = steps
        #: The number of components that are left.
        self.left = components
        #: Whether any component has run.
        self.has_begun = False
        self._surroundings: Callable[[], AbstractContextManager[None]] = nullcontext

    def advance(self) -> bool:
        """Run the next component; return False if none is left."""
        if not self.left:
            return False
        self.left -= 1
        self.has_begun = True
        with self._surroundings():
            next(self._steps)
        return True

    def finish(self) -> None:
        """Run all components that are left."""
        while self.advance():
            pass
        for _ in self._steps:
            pass

    @contextmanager
    def beside(self, run: Forward, device: torch.device) -> Iterator[None]:
        """Around a forward: components that run during it leave the forward's contexts."""
        self._surroundings = lambda: _outside(run, device)
        try:
            yield
        finally:
            self._surroundings = nullcontext


@define(eq=False)
class End:
    """The end of a component: its output tensors, and the leaves that replace them afterwards."""

    made: list[Tensor]
    leaves: list[Tensor]


@define(eq=False)
class Components:
    """The components of one run of a module, which runs inside this context. With `cuts`, the graph
    is cut between components; losses that were `added` are roots of the backward, too.
    """

    cuts: bool = False
    works_in_place: bool = False
    added: Sequence[Added] = ()
    #: Called at the end of each component.
    at_end: Callable[[], object] | None = None
    #: The sum of the losses that were added, which is not cut.
    total: Tensor | None = None
    ends: list[End] = field(factory=list)

    def __enter__(self) -> None:
        _running.append(self)

    def __exit__(self, *_: object) -> None:
        _running.pop()

    def end(self, value: Value) -> Value:
        """End a component with this value; return the value for the next one."""
        if self.cuts and torch.is_grad_enabled():
            value = self._cut(value)
        if self.at_end is not None:
            self.at_end()
        return value

    def _cut(self, value: Value) -> Value:
        tensors, tree = flatten(value, "what `end_component` is given")
        made = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
        if not made:
            return value
        leaves = {key: tensor.detach().requires_grad_() for key, tensor in made.items()}
        self.ends.append(End(list(made.values()), list(leaves.values())))
        taken = unflatten([leaves.get(id(tensor), tensor) for tensor in tensors], tree)
        return changeable(taken) if self.works_in_place else taken

    def walk_back(
        self,
        starts: Iterable[tuple[Tensor, Tensor]],
        leaves: Sequence[Tensor],
        walk: Walk,
        scale: float,
    ) -> Iterator[Sequence[Tensor | None]]:
        """Run the backward from roots, with their gradients, to leaves, one component after the
        other, the last one first. Yields the gradients of the leaves so far after each component.
        The gradient of added losses is `scale`.

        PipelineError if a value did not pass through `end_component`.
        """
        # With two ends, from the right to the left. Between two passes of the loop, `ahead` has the
        # starts of the next ones, and `found` the gradients of `targets` so far:
        #
        #     leaves ─ component 0 ─ made0 │ leaf0 ─ component 1 ─ made1 │ leaf1 ─ component 2 ─ …
        #                                                                  ◄── 1: from the roots
        #                                    ◄── 2: from made1, by the gradient of leaf1
        #     ◄── 3: from made0, by the gradient of leaf0
        targets = [*leaves, *(leaf for end in self.ends for leaf in end.leaves)]
        found: dict[int, Tensor] = {}
        ahead = [start for start in starts if start[0] is not self.total]
        ahead += _starts_of(self.added, scale)
        # A root, such as the past of a slice, may have been made by any component.
        ends = [max(map(order_of, end.made)) for end in self.ends]
        # `lasts[i]` is the last node of all components before i. A younger root was made by
        # component i or a later one, and the later ones were walked before.
        lasts = [-1, *accumulate(ends, max)]
        for end, last in zip(
            [*reversed(self.ends), None], reversed(lasts), strict=True
        ):
            here = [start for start in ahead if not 0 <= order_of(start[0]) <= last]
            ahead = [start for start in ahead if 0 <= order_of(start[0]) <= last]
            gradients = _walked(walk, here, targets)
            for leaf, gradient in zip(targets, gradients, strict=True):
                if gradient is not None:
                    earlier = found.get(id(leaf))
                    found[id(leaf)] = (
                        gradient if earlier is None else earlier + gradient
                    )
            yield [found.get(id(leaf)) for leaf in leaves]
            if end is not None:
                for made, leaf in zip(end.made, end.leaves, strict=True):
                    if id(leaf) in found:
                        ahead.append((made, found.pop(id(leaf))))
                del targets[-len(end.leaves) :]
                end.made.clear()


def _starts_of(added: Sequence[Added], scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    for loss in added:
        if loss.value.requires_grad:
            yield loss.value, torch.full_like(loss.value, scale) * loss.weight


def _walked(
    walk: Walk, starts: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    if not starts:
        return [None] * len(leaves)
    roots, gradients = zip(*starts, strict=True)
    try:
        return walk(roots, gradients, leaves)
    except RuntimeError as error:
        if _SECOND_TIME not in str(error):
            raise
        raise PipelineError(
            "a component uses what one before has made, and it did not pass through "
            "`end_component`: give it all that goes on, `x, kept = end_component((x, kept))`"
        ) from error


@contextmanager
def _outside(run: Forward, device: torch.device) -> Iterator[None]:
    """Leave all contexts of a forward, so that a backward can run during it as if it were alone."""
    modes = [
        context
        for context in run.contexts
        if isinstance(context, (TorchFunctionMode, saved_tensors_hooks))
    ]
    running = _running.copy()
    _running.clear()
    # Leave the innermost one first, and enter again in reverse.
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    try:
        with (
            no_takers(),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        for mode in modes:
            mode.__enter__()
        _running.extend(running)


def overlapped_of(module: nn.Module, stage: int) -> Callable[..., Any] | None:
    """The method `overlapped` of a stage's module, if it has one. PipelineError if it cannot be
    called with `forward` and `backward`.
    """
    method = getattr(module, "overlapped", None)
    if not ismethod(method):
        return None
    try:
        signature(method).bind(forward=None, backward=None)
    except TypeError as error:
        raise PipelineError(
            f"`overlapped` of stage {stage} ({type(module).__name__}) cannot be called with "
            f"`forward` and `backward`: {error}"
        ) from None
    hooks = [
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    ]
    if any(getattr(module, name) for name in hooks):
        raise PipelineError(
            f"stage {stage} ({type(module).__name__}) has a method `overlapped`, and hooks of the "
            "module itself, which that would go past: let hooks be of a module in it, or say where "
            "its components end (end_component) in place of `overlapped`"
        )
    return method
