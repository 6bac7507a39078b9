"""Inductor, with another function that compiles the graph of a backward.

`torch.compile` has a documented interface for backends, but none for inductor with a change only in
how graphs are compiled. `compile_fx` takes that function as an argument, for torch's own use. It is
imported when a block is compiled, since that takes seconds.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.torch_private import private


def compile_with(
    inner: Callable[..., Any],
    graph: GraphModule,
    examples: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Compile as inductor does, but compile each graph, of the forward and of the backward, by
    `inner`.

    PipelineError for CUDA graphs: each run of one overwrites the tensors that the run before it has
    left for W.
    """
    import torch._functorch.config
    import torch._inductor.compile_fx as inductor

    if (
        "inner_compile"
        not in inspect.signature(private(inductor, "compile_fx")).parameters
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
    # The cache of autograd would bypass `inner`. And the first half of a backward must not
    # overwrite saved tensors, since the second half reads them, too.
    with torch._functorch.config.patch(
        enable_autograd_cache=False, donated_buffer=False
    ):
        compiled: Callable[..., Any] = private(inductor, "compile_fx")(
            graph, examples, inner_compile=inner, config_patches=chosen
        )
    return compiled


def compile_graph(
    graph: GraphModule, examples: Sequence[Any], **options: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile one graph, as inductor does."""
    import torch._inductor.compile_fx as inductor

    compiled: Callable[[list[Any]], Sequence[Any]] = private(
        inductor, "compile_fx_inner"
    )(graph, examples, **options)
    return compiled


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes its arguments in a list, which it may empty."""

    def run(arguments: list[Any]) -> Any:
        return function(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
