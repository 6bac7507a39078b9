"""The leaves of the graph of a forward."""

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from schedlang.runtime.torch_private.graphs import is_reentrant_checkpoint, leaf_of


def leaves_between(outputs: Iterable[Tensor], stops: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the graph of these outputs, without the part before the tensors `stops`."""
    return leaves_of_graph(outputs, stops)[0]


def has_reentrant_checkpoint(outputs: Iterable[Tensor]) -> bool:
    """Whether the graph of these outputs has a reentrant checkpoint."""
    return leaves_of_graph(outputs)[1]


def leaves_of_graph(
    outputs: Iterable[Tensor], stops: Iterable[Tensor] = ()
) -> tuple[list[Tensor], bool]:
    """The leaves of the graph of these outputs, and whether it has a reentrant checkpoint; without
    the part of the graph before the tensors `stops`.
    """
    leaves = []
    behind = {get_gradient_edge(tensor).node for tensor in stops}
    ahead: list[Node] = list(
        dict.fromkeys(get_gradient_edge(output).node for output in outputs)
    )
    seen = {*ahead, *behind}
    ahead = [node for node in ahead if node not in behind]
    while ahead:
        node = ahead.pop()
        following = node.next_functions
        if not following:
            leaf = leaf_of(node)
            if leaf is not None:
                leaves.append(leaf)
            continue
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                ahead.append(each)
    return leaves, any(map(is_reentrant_checkpoint, set(map(type, seen))))
