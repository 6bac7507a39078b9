"""All private parts of torch that the runtime uses, why it does, and what it has instead.

Nothing else in the runtime reads a name of torch with an underscore in front. Each part is looked
up and tried when this module is imported. Where a version of torch does not have it, or has another
thing by that name, there is another way that gives the same results: slower, or with fewer layers
whose backward is split; and a warning that names the part. FSDP2 and GradScaler have no other way:
without their parts, sharded stages and scalers are refused when a pipeline is built.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from math import inf
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
import torch.overrides
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.overrides import has_torch_function
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from schedlang.runtime import containers
from schedlang.runtime.errors import PipelineError

_Part = TypeVar("_Part")


def _private(owner: object, *names: str) -> Any:
    """A private attribute of an attribute of an object."""
    for name in names:
        owner = getattr(owner, name)
    return owner


def _instead(name: str, part: Callable[[], _Part], other: _Part, but: str) -> _Part:
    """A part as a function finds and tries it; or where that fails, the other way, with a warning
    that says what is not as good.
    """
    try:
        # As in a process that does nothing else.
        with torch.inference_mode(False), torch.enable_grad():
            return part()
    except Exception as error:
        warnings.warn(
            f"torch {torch.__version__} has no `{name}` that does what schedlang.runtime takes it "
            f"for ({type(error).__name__}: {error}): {but}",
            stacklevel=3,
        )
        return other


def _must(holds: object) -> None:
    if not holds:
        raise ValueError("it does something else")


# --- Containers -----------------------------------------------------------------------------------
#
# Torch has no public functions for nested containers of tensors; its own `torch.export` and
# `torch.func` flatten with these. They also know containers that other libraries have registered.


def _torchs_containers() -> tuple[type, Callable[..., Any], Callable[..., Any]]:
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

    values, tree = tree_flatten({"a": (1, [2])})
    _must(values == [1, 2] and tree_unflatten(values, tree) == {"a": (1, [2])})
    return TreeSpec, tree_flatten, tree_unflatten


if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    TreeSpec, tree_flatten, tree_unflatten = _instead(
        "torch.utils._pytree",
        _torchs_containers,
        (containers.Tree, containers.tree_flatten, containers.tree_unflatten),
        "tensors pass between stages in tuples, lists and dictionaries only",
    )


# --- Functions under a TorchFunctionMode ----------------------------------------------------------
#
# A mode is given calls of these Python functions as a whole, and must be given the calls inside
# them. Torch has no way to ask for that: their first lines hand the call to whatever mode is on. So
# they are copied with a `has_torch_function` that always says no.


def _body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function of torch without its first lines, which hand the call to a mode."""
    _must(isinstance(function, FunctionType))
    assert isinstance(function, FunctionType)
    _must("has_torch_function" in function.__code__.co_names)
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    body = FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _entered(function: Callable[..., Any], but: str) -> dict[Callable[..., Any], Any]:
    """A function with its body, if that can be had."""
    body = _instead(
        f"{function.__name__}.__code__", partial(_body_of, function), None, but
    )
    return {} if body is None else {function: body}


#: Functions that are no layers, but call some. Backwards do so where there is a checkpoint in them.
BODIES = {
    **_entered(
        F.multi_head_attention_forward, "B computes the weight gradients of attention"
    ),
    **_entered(torch.autograd.backward, "B computes all weight gradients, and W none"),
    **_entered(torch.autograd.grad, "B computes all weight gradients, and W none"),
}


# --- The engine of autograd -----------------------------------------------------------------------
#
# `torch.autograd.backward` and `torch.autograd.grad` check their arguments and then call this
# engine. The checks take 30 microseconds, as long as the backward of a small layer, and the runtime
# makes several calls for each action.


def _torchs_engine() -> Callable[..., Any]:
    run = _private(torch.autograd.Variable, "_execution_engine", "run_backward")
    leaf = torch.ones((), requires_grad=True, device="cpu")
    one = torch.ones((), device="cpu")
    (gradient,) = run((leaf * 3,), (one,), False, False, (leaf,), True, False)
    run((leaf * 2,), (one,), False, False, (), True, True)
    _must(gradient == 3 and leaf.grad == 2)
    return run  # type: ignore[no-any-return]


def _public_engine(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor],
    keep_graph: bool,
    _: bool,
    inputs: Sequence[Any],
    allow_unused: bool,
    adds_up: bool,
) -> Sequence[Tensor | None]:
    """The same by torch's public functions, which would hand the call to a mode."""
    if adds_up:
        backward = BODIES.get(torch.autograd.backward, torch.autograd.backward)
        backward(outputs, gradients, keep_graph, inputs=inputs or None)
        return ()
    grad = BODIES.get(torch.autograd.grad, torch.autograd.grad)
    found: Sequence[Tensor | None] = grad(
        outputs, inputs, gradients, keep_graph, allow_unused=allow_unused
    )
    return found


# Its arguments: outputs, their gradients, whether to keep the graph, whether to make a graph of the
# backward, inputs, whether some of these may be unused, whether to add up in `.grad`.
_run_engine = _instead(
    "Variable._execution_engine",
    _torchs_engine,
    _public_engine,
    "every backward takes longer",
)


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> None:
    """Add up gradients in `.grad` of some leaves, by default of all, as `torch.autograd.backward`
    does.
    """
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
    """The gradients of some inputs, as `torch.autograd.grad` gives them."""
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


# --- The graph of a forward -----------------------------------------------------------------------

_Nodes = tuple[Callable[[Node], Tensor | None], Callable[[type[Node]], bool]]


def _torchs_nodes() -> _Nodes:
    leaf = torch.zeros((), requires_grad=True, device="cpu")
    _must(_private(get_gradient_edge(leaf).node, "variable") is leaf)
    output = CheckpointFunction.apply(Tensor.clone, False, leaf)  # type: ignore[no-untyped-call]
    checkpoint = type(output.grad_fn)
    _must(checkpoint is not type(leaf.clone().grad_fn))
    return lambda node: getattr(node, "variable", None), lambda kind: issubclass(
        kind, checkpoint
    )


_NO_NODES: _Nodes = (lambda _: None), (lambda _: True)

#: The leaf whose gradient adds up at a node, if it is one of those; and whether nodes of a type are
#: what reentrant checkpoints leave in the graph. Where that is not known, no leaves are found, and
#: every type is taken for one: so gradients of leaves add up in B.
leaf_of, is_reentrant_checkpoint = _instead(
    "AccumulateGrad.variable",
    _torchs_nodes,
    _NO_NODES,
    "B computes all weight gradients, and W none",
)

#: Whether layers may be split. Not where backwards cannot be entered: a checkpoint would make whole
#: layers in the backward, in place of the split ones that it made in the forward. And not where
#: leaves are not known.
MAY_SPLIT = (
    BODIES.keys() >= {torch.autograd.backward, torch.autograd.grad}
    and leaf_of is not _NO_NODES[0]
)


def _torchs_order() -> Callable[[Node], int]:
    first = torch.zeros((), requires_grad=True, device="cpu").clone()
    second = first.clone()
    nodes = [get_gradient_edge(tensor).node for tensor in (first, second)]
    orders = [_private(node, "_sequence_nr")() for node in nodes]
    _must(orders[0] < orders[1])
    return lambda node: _private(node, "_sequence_nr")()


#: When the node of a tensor was made in its forward: later ones have higher numbers. -1 for a leaf;
#: where it is not known, for all.
_order: Callable[[Node], int] = _instead(
    "Node._sequence_nr",
    _torchs_order,
    lambda _: -1,
    "a stage whose components take turns cannot hand on what is not of its last component",
)


def order_of(tensor: Tensor) -> int:
    """When a tensor was made, as a number that is higher for later ones; -1 for a leaf."""
    return -1 if tensor.grad_fn is None else _order(tensor.grad_fn)


# --- Hooks of leaves ------------------------------------------------------------------------------
#
# Torch has no way to ask for them, but whoever registers one gets a handle that knows them all.

_Hook = Callable[[Any], Tensor | None]
_Hooks = dict[int, _Hook]

#: The hooks of leaves that were asked for, by the leaf's id: it alone holds them.
_before: WeakValueDictionary[int, Any] = WeakValueDictionary()
_after: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _hooks_before(leaf: Tensor) -> _Hooks:
    """Those that see the gradient of a leaf (`Tensor.register_hook`)."""
    return _hooks_of(leaf, _before, leaf.register_hook)


def _hooks_after(leaf: Tensor) -> _Hooks:
    """Those that see what a leaf's gradients have added up to."""
    return _hooks_of(leaf, _after, leaf.register_post_accumulate_grad_hook)


def _hooks_of(
    leaf: Tensor,
    known: WeakValueDictionary[int, Any],
    register: Callable[..., RemovableHandle],
) -> _Hooks:
    hooks: _Hooks | None = known.get(id(leaf))
    if hooks is None:
        handle = register(_no_hook)
        hooks = known[id(leaf)] = handle.hooks_dict_ref()
        assert hooks is not None
        handle.remove()
    return hooks


def _no_hook(_: Tensor) -> None:
    """Leave a gradient as it is."""


def has_hooks(leaf: Tensor) -> bool:
    """Whether hooks are registered that see the gradient of a leaf, if it has one."""
    return leaf.requires_grad and bool(_hooks_before(leaf) or _hooks_after(leaf))


def has_hooks_before(tensor: Tensor) -> bool:
    """Whether hooks are registered that see the gradient of a tensor, which need not be a leaf."""
    if not tensor.requires_grad:
        return False
    handle = tensor.register_hook(_no_hook)  # type: ignore[no-untyped-call]
    hooks = handle.hooks_dict_ref()
    # Not kept by the tensor's id: the graph of one that is no leaf keeps its hooks when it is gone.
    handle.remove()
    return bool(hooks)


def has_hooks_after(leaf: Tensor) -> bool:
    """Whether hooks are registered that see what a leaf's gradients have added up to."""
    return leaf.requires_grad and bool(_hooks_after(leaf))


def has_hooks_of_both(module: nn.Module) -> bool:
    """Whether hooks of a module's forward and of its backward are registered, as far as torch says
    so.
    """
    return all(
        any(getattr(module, f"_{which}{kind}_hooks", ()) for kind in ("", "_pre"))
        for which in ("forward", "backward")
    )


def has_hooks_of_all_modules() -> bool:
    """Whether hooks are registered for all modules, as `FlopCounterMode` does."""
    return bool(getattr(torch.nn.modules.module, "_global_forward_pre_hooks", None))


def copy_hooks(of: Tensor, to: Tensor) -> None:
    """Let another leaf have the hooks that see the gradient of a leaf (`Tensor.register_hook`)."""
    for hook in [*_hooks_before(of).values()]:
        to.register_hook(hook)  # type: ignore[no-untyped-call]


def without_hooks_after(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves that see what their gradients have added up to not be called in
    here.
    """
    hooked = [hooks for hooks in map(_hooks_after, leaves) if hooks]
    return _replaced(hooked, lambda _: _no_hook) if hooked else _NOTHING


def without_hooks(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves (`Tensor.register_hook`) not see what is computed in here.

    Autograd calls them also where a gradient is only asked for, and not added up in `.grad`. There
    is no public way to ask for it without.
    """
    hooked = [hooks for hooks in map(_hooks_before, leaves) if hooks]
    return _replaced(hooked, lambda _: _no_hook) if hooked else _NOTHING


def with_gradients_only(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves (`Tensor.register_hook`) not be called where there is no gradient:
    autograd calls them with None.
    """
    hooked = [hooks for hooks in map(_hooks_before, leaves) if hooks]
    return _replaced(hooked, _unless_none) if hooked else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _replaced(hooked: Iterable[_Hooks], by: Callable[[_Hook], _Hook]) -> Iterator[None]:
    """In here, other hooks in place of each."""
    kept = [(hooks, hooks.copy()) for hooks in hooked]
    for hooks, own in kept:
        hooks.update((number, by(hook)) for number, hook in own.items())
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def _unless_none(hook: _Hook) -> _Hook:
    return lambda gradient: None if gradient is None else hook(gradient)


# --- Modes and transforms -------------------------------------------------------------------------


def _torchs_modes() -> Callable[[], bool]:
    from torch.utils._device import DeviceContext

    modes = _private(torch.overrides, "_get_current_function_mode_stack")
    with torch.device("cpu"):
        _must(isinstance(modes()[-1], DeviceContext))
    return lambda: any(not isinstance(mode, DeviceContext) for mode in modes())


_is_other: Callable[[], bool] = _instead(
    "torch.overrides._get_current_function_mode_stack",
    _torchs_modes,
    lambda: True,
    "within `torch.device`, B computes all weight gradients, and W none",
)

#: A tensor that is handed to a mode, if one is on.
_ANY = (torch.zeros((), device="cpu"),)


def has_other_modes() -> bool:
    """Whether a call inside a mode is also inside other ones, which may change what it does; not
    those of `torch.device`, which only say where new tensors are.
    """
    return has_torch_function(_ANY) and _is_other()


class _Probe(torch.autograd.Function):
    """A function that says nothing of transforms, so that torch refuses it inside of them."""

    @staticmethod
    def forward(ctx: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any) -> None: ...


def is_transformed() -> bool:
    """Whether a call is inside a transform of `torch.func`, whose tensors are not what they
    seem.
    """
    try:
        _Probe.apply()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    return False


# --- What a tensor knows about itself -------------------------------------------------------------


def _torchs_base() -> Callable[[Tensor], Tensor]:
    tensor = torch.zeros(2, device="cpu")
    _must(_private(tensor, "_base") is None and _private(tensor[:1], "_base") is tensor)
    return lambda tensor: tensor if tensor._base is None else tensor._base


#: The tensor that this one is a view of, or itself; torch only prints it.
base_of: Callable[[Tensor], Tensor] = _instead(
    "Tensor._base",
    _torchs_base,
    lambda tensor: tensor,
    "B computes the gradients of weights that are read by way of a view",
)


def _torchs_changes() -> Callable[[Tensor], int]:
    changes = attrgetter("_version")
    tensor = torch.zeros(2, device="cpu")
    before = changes(tensor)
    tensor[0] = 1
    after = changes(tensor)
    _must(changes(tensor) == after != before)
    # Of what `torch.inference_mode` has made, a weight or a buffer, torch does not count changes.
    return lambda tensor: _content(tensor) if tensor.is_inference() else changes(tensor)


def _content(tensor: Tensor, /) -> int:
    """A number that follows from a tensor's bytes; where it is sharded, from those of this
    process's shard.
    """
    if tensor.is_meta:
        return 0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense = (
        local.detach() if local.layout == torch.strided else local.detach().to_dense()
    )
    return hash(bytes_of(dense))


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a dense tensor."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).numpy().tobytes())


#: How often a tensor has been changed in place; torch's notes on autograd name it `_version`, and
#: have no other way to ask. Any number will do that is another one after a change.
changes_of: Callable[[Tensor], int] = _instead(
    "Tensor._version",
    _torchs_changes,
    _content,
    "all numbers of a tensor are compared to see whether it was changed in place",
)


# --- A module's own tensors -----------------------------------------------------------------------
#
# `torch.func.functional_call` puts other tensors in place of a module's own, for one forward. A
# checkpoint runs its part of the forward again in the backward, and must find the same ones there.


class Substitution:
    """Puts other tensors in place of parameters and buffers of a module for a while, by name."""

    def __init__(self, module: nn.Module) -> None:
        #: For each name, the modules that have the tensor, and its name there. Tied tensors are in
        #: several places, under the first of their names.
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        first: dict[int, str] = {}
        for prefix, owner in module.named_modules():
            own = chain(
                owner.named_parameters(recurse=False, remove_duplicate=False),
                owner.named_buffers(recurse=False, remove_duplicate=False),
            )
            for key, tensor in own:
                name = first.setdefault(
                    id(tensor), f"{prefix}.{key}" if prefix else key
                )
                self._places.setdefault(name, []).append((owner, key))

    @contextmanager
    def of(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module have these tensors in here."""
        own = [
            (owner, key, getattr(owner, key))
            for name in tensors
            for owner, key in self._places[name]
        ]
        for name, tensor in tensors.items():
            for owner, key in self._places[name]:
                setattr(owner, key, tensor)
        try:
            yield
        finally:
            for owner, key, tensor in own:
                setattr(owner, key, tensor)


# --- FSDP2 ----------------------------------------------------------------------------------------
#
# FSDP2 ends a backward in a callback of its root module, which waits for the reduced gradients. A
# backward that FSDP has not seen, as a weight half, must call it by itself: there is no public call
# that reduces gradients. Torch's own pipelining uses the same private one.


def check_fsdp(parts: Iterable[nn.Module]) -> None:
    """PipelineError where FSDP2 does not end a backward as `fsdp_roots` takes it to."""
    for part in parts:
        try:
            state = _private(part, "_get_fsdp_state")()
            _private(state, "_is_root")
            _private(state, "_root_post_backward_final_callback")
        except AttributeError as error:
            raise PipelineError(
                f"stages that FSDP2 has sharded need private parts of it that torch "
                f"{torch.__version__} does not have ({error}): no public call reduces gradients "
                "after a backward in halves; train with a version of torch that schedlang is "
                "tested with, or do not shard the stages"
            ) from None


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


# --- Data parallelism -----------------------------------------------------------------------------
#
# What torch wraps a module in to sum its gradients in each backward. The composable form of DDP is
# known by a class of a private module alone.

#: Where the classes of wrapped modules are, by module. One that nothing has imported wraps nothing,
#: and to import it for the question takes a second.
_WRAPPERS = {
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "torch.distributed._composable.replicate": "DDP",
}


def sums_in_backwards(module: nn.Module) -> bool:
    """Whether a module is in DistributedDataParallel, as a wrapper or by torch's composable
    `replicate`, or in the FSDP before `fully_shard`.
    """
    wrappers = (
        getattr(sys.modules.get(path), name, None) for path, name in _WRAPPERS.items()
    )
    return isinstance(module, tuple(each for each in wrappers if each is not None))


# --- GradScaler -----------------------------------------------------------------------------------
#
# A scaler decides by the gradients of one process whether an update is made. There is no public
# place between its look at them and the decision; FSDP1's own scaler takes the same private one.


def share_overflows(
    looked: Callable[[GradScaler, Optimizer, Sequence[Tensor]], Sequence[Tensor]],
    updated: Callable[[GradScaler], Sequence[Tensor]],
) -> None:
    """Let all scalers decide by what `looked` gives: it is told what one has found in the gradients
    of an optimizer. And by what `updated` gives before a scaler changes its scale. Where these give
    nothing, all is as without them.

    PipelineError where torch's scaler does not work as known.
    """
    try:
        look = _private(GradScaler, "_unscale_grads_")
        update = GradScaler.update
        _check_scaler()
    except Exception as error:
        raise PipelineError(
            f"to skip an update on all ranks needs private parts of GradScaler that torch "
            f"{torch.__version__} does not have ({type(error).__name__}: {error}): train with a "
            "version of torch that schedlang is tested with, or scale the loss by a number, "
            "`loss_scale`"
        ) from None

    @wraps(look)
    def look_everywhere(
        scaler: GradScaler, optimizer: Optimizer, *given: Any
    ) -> dict[torch.device, Tensor]:
        own: dict[torch.device, Tensor] = look(scaler, optimizer, *given)
        return {
            each.device: each for each in looked(scaler, optimizer, [*own.values()])
        } or own

    @wraps(update)
    def update_everywhere(scaler: GradScaler, *given: Any, **options: Any) -> None:
        for number, found in enumerate(updated(scaler)):
            # As though one more optimizer had been looked at.
            state = _private(scaler, "_per_optimizer_states")[-1 - number]
            state["found_inf_per_device"] = {found.device: found}
        update(scaler, *given, **options)

    setattr(GradScaler, "_unscale_grads_", look_everywhere)  # noqa: B010
    setattr(GradScaler, "update", update_everywhere)  # noqa: B010


def looks_as_known(scaler: GradScaler) -> bool:
    """Whether a scaler looks at gradients as torch's own does, and not in a way of its own."""
    name = "_unscale_grads_"
    return getattr(type(scaler), name, None) is getattr(GradScaler, name, None)


def _check_scaler() -> None:
    """An error where a scaler does not look at gradients, or does not note what it found, as it
    is known to.
    """
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones((), device="cpu"))
    weight = nn.Parameter(torch.ones(1, device="cpu"))
    weight.grad = torch.full_like(weight, inf)
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler.unscale_(optimizer)
    states = _private(scaler, "_per_optimizer_states")
    found = states[id(optimizer)]["found_inf_per_device"]
    (own,) = found.values()
    _must(own == 1)
    # What counts is noted there, also for something else than an optimizer.
    states[id(optimizer)]["found_inf_per_device"] = {own.device: torch.zeros_like(own)}
    states[-1]["found_inf_per_device"] = found
    scaler.update()
    _must(scaler.get_scale() == 2)


# --- The compiler ---------------------------------------------------------------------------------
#
# `torch.compile` has a documented way to name a backend, but none to be inductor in all but how the
# graph of a backward is compiled. `compile_fx` takes that as an argument, for torch's own use. It
# is imported when a block is compiled: that takes seconds.


def compile_with(
    inner: Callable[..., Any],
    graph: GraphModule,
    examples: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Compile as inductor does, but each graph, of the forward and of the backward, by `inner`.

    PipelineError where CUDA graphs are asked for: each run of one writes over what the run before
    has left for W.
    """
    import torch._functorch.config
    import torch._inductor.compile_fx as inductor

    if (
        "inner_compile"
        not in inspect.signature(_private(inductor, "compile_fx")).parameters
    ):
        raise PipelineError(
            f"torch {torch.__version__} does not let its compiler be told how the backward of a "
            'block is compiled; compile it by `torch.compile(block)`, without backend="schedlang": '
            "I then computes the gradients of its weights"
        )
    chosen = {
        **(torch._inductor.list_mode_options(mode) if mode else {}),
        **(options or {}),
    }
    if chosen.get("triton.cudagraphs"):
        raise PipelineError(
            'a block that is compiled with backend="schedlang" has no CUDA graphs, which would '
            'write over what I leaves to W; take mode="max-autotune-no-cudagraphs", or leave '
            "`triton.cudagraphs` out of the options"
        )
    chosen["triton.cudagraphs"] = False
    # A cache of all graphs together would not ask for them one by one; and what a forward has saved
    # must not be written over by the first half of the backward, for the second reads it too.
    with torch._functorch.config.patch(
        enable_autograd_cache=False, donated_buffer=False
    ):
        compiled: Callable[..., Any] = _private(inductor, "compile_fx")(
            graph, examples, inner_compile=inner, config_patches=chosen
        )
    return compiled


def compile_graph(
    graph: GraphModule, examples: Sequence[Any], **options: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile one graph, as inductor does."""
    import torch._inductor.compile_fx as inductor

    compiled: Callable[[list[Any]], Sequence[Any]] = _private(
        inductor, "compile_fx_inner"
    )(graph, examples, **options)
    return compiled


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Let torch give a compiled graph its arguments in a list, which it may empty."""

    def run(arguments: list[Any]) -> Any:
        return function(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
