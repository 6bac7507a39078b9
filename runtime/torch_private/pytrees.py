"""Nested containers of tensors.

Torch has no public functions for them; its own `torch.export` and `torch.func` flatten with these.
They also know containers that other libraries have registered.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schedlang.on_demand import on_demand
from schedlang.runtime.torch_private import instead, must


def _torchs_containers() -> tuple[type, Callable[..., Any], Callable[..., Any]]:
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

    values, tree = tree_flatten({"a": (1, [2])})
    must(values == [1, 2] and tree_unflatten(values, tree) == {"a": (1, [2])})
    return TreeSpec, tree_flatten, tree_unflatten


if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    TreeSpec, tree_flatten, tree_unflatten = instead(
        "torch.utils._pytree",
        _torchs_containers,
        (
            object,
            on_demand("schedlang.runtime.containers.tree_flatten"),
            on_demand("schedlang.runtime.containers.tree_unflatten"),
        ),
        "tensors pass between stages in tuples, lists and dictionaries only",
    )
