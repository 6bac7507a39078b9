"""All private parts of torch that the runtime uses, and why it does.

Nothing else in the runtime reads a name of torch with an underscore in front. Each part is looked
up when this module is imported, so a version of torch without one is refused at once, by name. Only
what belongs to FSDP2 is looked up when a stage is sharded: its import takes a second.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
import torch.overrides
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

# Torch has no public functions for nested containers of tensors; its own `torch.export` and
# `torch.func` flatten with these. They also know containers that other libraries have registered.
from torch.utils._device import DeviceContext
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten


def _private(owner: object, name: str) -> Any:
    """A private attribute; ImportError where this version of torch does not have it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ImportError(
            f"schedlang.runtime needs `{name}`, a private part of torch that torch "
            f"{torch.__version__} does not have"
        ) from None


# --- The engine of autograd -----------------------------------------------------------------------
#
# `torch.autograd.backward` and `torch.autograd.grad` check their arguments and then call this
# engine. The checks take 30 microseconds, as long as the backward of a small layer, and the runtime
# makes several calls for each action.

# Its arguments: outputs, their gradients, whether to keep the graph, whether to make a graph of the
# backward, inputs, whether some of these may be unused, whether to add up in `.grad`.
_run_engine = _private(_private(torch.autograd.Variable, "_execution_engine"), "run_backward")


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> None:
    """Add up gradients in `.grad` of some leaves, by default of all, as `torch.autograd.backward`
    does.
    """
    _run_engine(tuple(outputs), tuple(gradients), False, False, tuple(leaves), True, True)


def gradients_of(
    inputs: Sequence[Tensor | GradientEdge],
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    keep_graph: bool = False,
    allow_unused: bool = False,
) -> Sequence[Tensor | None]:
    """The gradients of some inputs, as `torch.autograd.grad` gives them."""
    found: Sequence[Tensor | None] = _run_engine(
        tuple(outputs), tuple(gradients), keep_graph, False, tuple(inputs), allow_unused, False
    )
    return found


def has_hooks(leaf: Tensor) -> bool:
    """Whether hooks are registered that see the gradient of a leaf; there is no public way to
    ask.
    """
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def has_hooks_after(leaf: Tensor) -> bool:
    """Whether hooks are registered that see what a leaf's gradients have added up to."""
    return bool(leaf._post_accumulate_grad_hooks)


def without_hooks(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves (`Tensor.register_hook`) not see what is computed in here.

    Autograd calls them also where a gradient is only asked for, and not added up in `.grad`. There
    is no public way to ask for it without.
    """
    hooked = [leaf for leaf in leaves if leaf._backward_hooks]
    return _taken_off(hooked) if hooked else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _taken_off(leaves: Iterable[Tensor]) -> Iterator[None]:
    kept = [(leaf, leaf._backward_hooks) for leaf in leaves]
    for leaf, _ in kept:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in kept:
            leaf._backward_hooks = hooks


# --- Functions under a TorchFunctionMode ----------------------------------------------------------
#
# A mode is given calls of these Python functions as a whole, and must be given the calls inside
# them. Torch has no way to ask for that: their first lines hand the call to whatever mode is on. So
# they are copied with a `has_torch_function` that always says no.


def _body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function of torch without its first lines, which hand the call to a mode."""
    assert isinstance(function, FunctionType)
    if "has_torch_function" not in function.__globals__:
        raise ImportError(
            f"schedlang.runtime needs `{function.__name__}` to ask `has_torch_function`, which "
            f"torch {torch.__version__} does not do"
        )
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    body = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


#: Functions that are no layers, but call some. Backwards do so where there is a checkpoint in them.
BODIES = {
    F.multi_head_attention_forward: _body_of(F.multi_head_attention_forward),
    torch.autograd.backward: _body_of(torch.autograd.backward),
    torch.autograd.grad: _body_of(torch.autograd.grad),
}

#: Whether a call is inside a transform of `torch.func`, whose tensors are not what they seem.
is_transformed: Callable[[], bool] = _private(torch._C, "_are_functorch_transforms_active")

_modes: Callable[[], list[TorchFunctionMode]] = _private(
    torch.overrides, "_get_current_function_mode_stack"
)
_count_modes: Callable[[], int] = _private(torch._C, "_len_torch_function_stack")


def has_other_modes() -> bool:
    """Whether a call inside a mode is also inside other ones, which may change what it does; not
    those of `torch.device`, which only say where new tensors are.
    """
    return _count_modes() > 0 and any(not isinstance(mode, DeviceContext) for mode in _modes())


# --- What a tensor knows about itself -------------------------------------------------------------

for _name in ("_parameters", "_buffers"):
    _private(nn.Module(), _name)
for _name in ("_backward_hooks", "_base", "_post_accumulate_grad_hooks", "_version"):
    _private(Tensor, _name)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself; torch only prints it."""
    return tensor if tensor._base is None else tensor._base


#: How often a tensor has been changed in place; torch's notes on autograd name it `_version`, and
#: have no other way to ask.
changes_of: Callable[[Tensor], int] = attrgetter("_version")


# --- A module's own tensors -----------------------------------------------------------------------
#
# `torch.func.functional_call` puts other tensors in place of a module's own, for one forward. A
# checkpoint runs its part of the forward again in the backward, and must find the same ones there.


class Substitution:
    """Puts other tensors in place of parameters and buffers of a module for a while, by name."""

    def __init__(self, module: nn.Module) -> None:
        #: For each name, the dictionary that has the tensor, and its key there. Tied tensors are in
        #: several places, under the first of their names.
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        first: dict[int, str] = {}
        for prefix, owner in module.named_modules():
            for tensors in (owner._parameters, owner._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        name = first.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        self._places.setdefault(name, []).append((tensors, key))

    @contextmanager
    def of(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module have these tensors in here."""
        own = [(place, key, place[key]) for name in tensors for place, key in self._places[name]]
        for name, tensor in tensors.items():
            for place, key in self._places[name]:
                place[key] = tensor
        try:
            yield
        finally:
            for place, key, tensor in own:
                place[key] = tensor


# --- FSDP2 ----------------------------------------------------------------------------------------
#
# FSDP2 ends a backward in a callback of its root module, which waits for the reduced gradients. A
# backward that FSDP has not seen, as a weight half, must call it by itself: there is no public call
# that reduces gradients. Torch's own pipelining uses the same private one.


def fsdp_roots(parts: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Of some modules that FSDP2 has sharded, what the root ones do at the end of a backward.

    FSDP decides in the first forward which modules are roots.
    """
    states = [_private(part, "_get_fsdp_state")() for part in parts]
    return [
        _private(state, "_root_post_backward_final_callback")
        for state in states
        if _private(state, "_is_root")
    ]


# --- The compiler ---------------------------------------------------------------------------------
#
# `torch.compile` has a documented way to name a backend, but none to be inductor in all but how the
# graph of a backward is compiled. `compile_fx` takes that as an argument, for torch's own use. It
# is imported when a block is compiled: that takes seconds.


def compile_with(
    inner: Callable[..., Any],
    graph: GraphModule,
    examples: Sequence[Any],
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Compile as inductor does, but each graph, of the forward and of the backward, by `inner`."""
    import torch._functorch.config
    import torch._inductor.compile_fx as inductor

    # A cache of all graphs together would not ask for them one by one; and what a forward has saved
    # must not be written over by the first half of the backward, for the second reads it too.
    with torch._functorch.config.patch(enable_autograd_cache=False, donated_buffer=False):
        compiled: Callable[..., Any] = _private(inductor, "compile_fx")(
            graph, examples, inner_compile=inner, config_patches=options and dict(options)
        )
    return compiled


def compile_graph(
    graph: GraphModule, examples: Sequence[Any], **options: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile one graph, as inductor does."""
    import torch._inductor.compile_fx as inductor

    compiled: Callable[[list[Any]], Sequence[Any]] = _private(inductor, "compile_fx_inner")(
        graph, examples, **options
    )
    return compiled


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Let torch give a compiled graph its arguments in a list, which it may empty."""

    def run(arguments: list[Any]) -> Any:
        return function(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
