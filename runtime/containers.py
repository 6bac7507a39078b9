"""Flatten and unflatten tuples, lists and dictionaries, if torch's own functions are missing. Those
also know containers that libraries register.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen


@frozen
class Tree:
    """The structure of nested values: the type of the container, the keys of a dictionary, and the
    trees of its elements. A value that is no container has no `make`.
    """

    make: Callable[..., Any] | None = None
    keys: tuple[object, ...] = ()
    children: tuple["Tree", ...] = ()


def tree_flatten(value: Any) -> tuple[list[Any], Tree]:
    """The values in a container, from left to right, and their structure."""
    keys: tuple[object, ...] = ()
    if type(value) in (dict, OrderedDict):
        keys = tuple(value)
        parts = list(value.values())
    elif type(value) in (tuple, list) or _is_named_tuple(type(value)):
        parts = list(value)
    else:
        return [value], Tree()
    leaves: list[Any] = []
    children = []
    for part in parts:
        own, tree = tree_flatten(part)
        leaves += own
        children.append(tree)
    return leaves, Tree(type(value), keys, tuple(children))


def tree_unflatten(leaves: list[Any], tree: Tree) -> Any:
    """The inverse of `tree_flatten`."""
    return _made(iter(leaves), tree)


def _made(leaves: Iterator[Any], tree: Tree) -> Any:
    if tree.make is None:
        return next(leaves)
    parts = [_made(leaves, child) for child in tree.children]
    if tree.make in (dict, OrderedDict):
        return tree.make(zip(tree.keys, parts, strict=True))
    return tree.make(*parts) if _is_named_tuple(tree.make) else tree.make(parts)


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
