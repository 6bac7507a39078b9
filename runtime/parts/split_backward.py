"""A backward in two halves: B computes the gradient of the input, W adds up those of the weights.

Plain autograd can split a backward only by walking its graph twice. Here the forward replaces
layers in its graph by nodes of their own (`schedlang.runtime.parts.layers`). B computes the
gradients of their inputs, and keeps for W the layers' inputs and the gradients of their outputs. W
does the rest with torch's own kernels, so both together equal a whole backward to the bit. The idea
is the zero-bubble authors' weight gradient store (arXiv 2401.10241, section 4).

The gradients of some weights are computed in B and kept for W. For norms and narrow layers,
splitting would take longer than the gradients. Other functions, a script's own autograd functions,
and blocks that are compiled by another backend than `schedlang.runtime.parts.compiled` cannot be
split.
"""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.runtime.door import Site
from schedlang.runtime.entry import changeable
from schedlang.runtime.graph_leaves import has_reentrant_checkpoint, leaves_of_graph
from schedlang.runtime.part import Backward, Forward, Part, filled
from schedlang.runtime.parts.layers import (
    LAYERS,
    LIGHT_LAYERS,
    STORES,
    Deferred,
    LayerCall,
    Store,
    accumulate,
)
from schedlang.runtime.stage import Stage, without_autocast
from schedlang.runtime.torch_private.bodies import BODIES
from schedlang.runtime.torch_private.engine import gradients_of, run_backward
from schedlang.runtime.torch_private.graphs import (
    MAY_SPLIT,
)
from schedlang.runtime.torch_private.hidden_hooks import (
    with_gradients_only,
    without_hooks,
)
from schedlang.runtime.torch_private.leaf_hooks import (
    has_hooks_before,
    has_hooks_of_all_modules,
)
from schedlang.runtime.torch_private.modes import has_other_modes, is_transformed
from schedlang.schedule.kinds import Kind

#: The layers that are split.
_LAYERS = LAYERS if MAY_SPLIT else frozenset()


class Split(TorchFunctionMode):
    """The two halves of the backward of one microbatch on one stage. The forward runs inside this
    mode.

    A reentrant checkpoint in the forward runs a backward inside the backward, which adds to `.grad`
    at once, so B cannot keep gradients for W. Then all layers are split, also light ones
    (`splits_all`), and the gradients of other weights add up in B.
    """

    def __init__(self, splits_all: bool = False) -> None:
        super().__init__()
        #: The gradients that B leaves to W; and the weights whose gradients B has already computed.
        self._store = Store()
        self.others: Sequence[Tensor] = ()
        self.splits_all = splits_all
        #: Whether the forward is over.
        self._is_backward = False

    def __enter__(self) -> "Split":
        STORES.append(self._store)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        STORES.pop()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # This handles all calls of the forward, and those of a checkpoint that runs it again:
        #
        #     a layer               becomes a node that leaves its weights to W, if that pays
        #     Tensor.backward       is `torch.autograd.backward`
        #     attention, backward   run inside this mode, which then handles the layers they call
        #     anything else         runs unchanged
        if function in _LAYERS and torch.is_grad_enabled() and _is_plain():
            if (
                self.splits_all or function not in LIGHT_LAYERS
            ) and not self._store.is_again:
                call = LayerCall(function, [*args, *kwargs.values()], tuple(kwargs))
                is_worth = self.splits_all or call.is_worth()
                if call.weights and is_worth and not is_transformed():
                    return call.as_layer(self._store)
        elif function is Tensor.backward:
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
            return self.__torch_function__(torch.autograd.backward, types, args, kwargs)
        elif function in BODIES:
            with (
                self._store.whole()
                if self._is_of_the_forward(function)
                else nullcontext()
            ):
                if _is_plain() and not is_transformed():
                    with self:
                        return BODIES[function](*args, **kwargs)
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _is_of_the_forward(self, function: Callable[..., Any]) -> bool:
        """Whether the function is a backward that the forward itself runs. The calls of
        `torch.autograd.backward` by reentrant checkpoints are part of the stage's backward.
        """
        return function is torch.autograd.grad or (
            function is torch.autograd.backward and not self._is_backward
        )

    def backward_input(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """B: the gradients of the inputs, from those of the outputs; None for an input on which no
        output depends.
        """
        # The leaves at which autograd stops, and where their gradients go:
        #
        #     outputs ◄── linear ◄── norm ◄── linear ◄── inputs        found by B, handed on
        #                   ▲          ▲         ▲
        #                 left to W    │       left to W               not in the graph at all
        #                         weights of the norm                  found by B, kept for W
        #
        # One walk finds all of them; a second one would go through the graph again.
        self._is_backward = True
        if not outputs:
            return [None] * len(inputs)
        leaves, reentrant = leaves_of_graph(outputs)
        ids = set(map(id, inputs))
        others = [leaf for leaf in leaves if id(leaf) not in ids]
        wanted = [input for input in inputs if input.requires_grad]
        if not others and not wanted and not reentrant:
            return [None] * len(inputs)
        with self:  # for checkpoints, which run the forward again
            if reentrant:
                with with_gradients_only(others):
                    run_backward(outputs, gradients)
                own = [input.grad for input in inputs]
                for input in inputs:
                    input.grad = None
                return own
            with without_hooks(others):
                computed = gradients_of(
                    [*others, *wanted], outputs, gradients, allow_unused=True
                )
        ready = [
            (leaf, gradient)
            for leaf, gradient in zip(others, computed, strict=False)
            if gradient is not None
        ]
        if ready:
            weights, of_weights = zip(*ready, strict=True)
            self.others = (*self.others, *weights)
            self._store.deferred.append(Deferred(weights, weights, lambda: of_weights))
        of_inputs = iter(computed[len(others) :])
        return [next(of_inputs) if input.requires_grad else None for input in inputs]

    def backward_weight(self) -> None:
        """W: add up the gradients of the weights in `.grad`; hooks see the gradient of each weight
        once.
        """
        # The hooks of a weight that several layers use must see its whole gradient once, and a hook
        # of several weights (`register_multi_grad_hook`) all of their gradients. So such layers run
        # together, and hold their memory until then.
        deferred = self._store.deferred
        uses = Counter(id(weight) for layer in deferred for weight in layer.weights)
        tied: list[Deferred] = []
        untied: deque[Deferred] = deque()
        for layer in deferred:
            (
                tied
                if any(
                    uses[id(weight)] > 1 or has_hooks_before(weight)
                    for weight in layer.weights
                )
                else untied
            ).append(layer)
        deferred.clear()
        # One by one, so that a layer's memory is freed before the next layer needs some.
        while untied:
            accumulate([untied.popleft()])
        if tied:
            accumulate(tied)


def _is_plain() -> bool:
    """Whether a call runs as it is: neither `torch.compile` traces it, nor does another mode around
    the step change it.
    """
    return not (torch.compiler.is_compiling() or has_other_modes())


def warn_of(weights: Iterable[Tensor], module: nn.Module, stage: int) -> None:
    """Warn that B computes the gradients of these weights, and name their modules."""
    ids = {id(weight) for weight in weights}
    names = [
        f"`{name}` ({type(part).__name__})" if name else type(part).__name__
        for name, part in module.named_modules()
        if any(id(weight) in ids for weight in part.parameters(recurse=False))
    ]
    shown = ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )
    where = shown or "tensors that are no weights of its module"
    warnings.warn(
        f"stage {stage} computes weight gradients in B and not in W, those of {where}: only linear "
        "layers, convolutions, embeddings and matrix products are split, and nothing inside "
        "torch.func, a gradient that the forward takes, or torch.compile with another backend than "
        '"schedlang"',
        stacklevel=2,
    )


class SplitBackwards(Part):
    """The split backwards of some microbatches of a stage: B or I is the input half, W the other
    one.
    """

    _stage: Stage

    def __init__(self, microbatches: Container[int]) -> None:
        self._microbatches = microbatches
        #: By microbatch, from F (or R) to W.
        self._splits: dict[int, Split] = {}
        #: Whether the module has reentrant checkpoints; the first split forward shows it.
        self._is_reentrant: bool | None = None
        self._has_warned = False

    def bind(self, stage: Stage) -> None:
        """Keep the stage."""
        self._stage = stage
        self._after_weight = filled(stage.parts, "after_weight")

    def before_forward(self, run: Forward) -> None:
        """Run the forward inside the mode that splits its layers."""
        if not run.has_graph or run.microbatch not in self._microbatches:
            return
        split = Split(splits_all=self._is_reentrant is not False)
        self._splits[run.microbatch] = split
        run.contexts = [split, *run.contexts]
        if has_hooks_of_all_modules() and not self._stage.plan.ends_backward:
            run.input = changeable(run.input)

    def recorded(self, run: Forward) -> None:
        """Find out whether there is a reentrant checkpoint. The first split forward has split all
        layers, which is correct in both cases.
        """
        if run.microbatch in self._microbatches and self._is_reentrant is None:
            self._is_reentrant = has_reentrant_checkpoint(
                root for root in (*run.roots, *run.made) if root.requires_grad
            )

    def before_backward(self, run: Backward) -> None:
        """Let the backward compute only the gradients of inputs."""
        if run.microbatch in self._splits:
            run.walk = self._splits[run.microbatch].backward_input

    def after_backward(self, run: Backward) -> None:
        """Warn once if B has computed gradients of weights."""
        split = self._splits.get(run.microbatch)
        if split is None or self._has_warned:
            return
        if split.splits_all and split.others:
            self._has_warned = True
            warn_of(split.others, self._stage.module, self._stage.number)

    def backward_weight(self, microbatch: int) -> None:
        """W: add up the gradients of the weights."""
        with without_autocast(self._stage.device):
            self._splits.pop(microbatch).backward_weight()
            for call in self._after_weight:
                call(microbatch)


def of_stages(site: Site) -> Iterator[tuple[int, SplitBackwards]]:
    """Make the part for stages whose backwards the plan splits."""
    for number in site.modules:
        microbatches = site.microbatches_with([Kind.W], number)
        if microbatches:
            yield number, SplitBackwards(microbatches)
