"""Private attributes of nodes in autograd's graph."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from schedlang.runtime.torch_private import instead, must, private
from schedlang.runtime.torch_private.bodies import BODIES

_Nodes = tuple[Callable[[Node], Tensor | None], Callable[[type[Node]], bool]]


def _torchs_nodes() -> _Nodes:
    leaf = torch.zeros((), requires_grad=True, device="cpu")
    must(private(get_gradient_edge(leaf).node, "variable") is leaf)
    output = CheckpointFunction.apply(Tensor.clone, False, leaf)  # type: ignore[no-untyped-call]
    checkpoint = type(output.grad_fn)
    must(checkpoint is not type(leaf.clone().grad_fn))
    return lambda node: getattr(node, "variable", None), lambda kind: issubclass(
        kind, checkpoint
    )


_NO_NODES: _Nodes = (lambda _: None), (lambda _: True)

#: The leaf whose gradient adds up at a node, if there is one; and whether a type of nodes is that
#: of reentrant checkpoints. Without the private part, no leaves are found, and every type counts as
#: a checkpoint, so the gradients of leaves add up in B.
leaf_of, is_reentrant_checkpoint = instead(
    "AccumulateGrad.variable",
    _torchs_nodes,
    _NO_NODES,
    "B computes all weight gradients, and W none",
)

#: Whether layers may be split. They may not if a mode cannot see the calls inside backwards, since
#: a checkpoint would make whole layers there in place of the split ones of its forward; nor if
#: leaves are unknown.
MAY_SPLIT = (
    BODIES.keys() >= {torch.autograd.backward, torch.autograd.grad}
    and leaf_of is not _NO_NODES[0]
)


def _torchs_order() -> Callable[[Node], int]:
    first = torch.zeros((), requires_grad=True, device="cpu").clone()
    second = first.clone()
    nodes = [get_gradient_edge(tensor).node for tensor in (first, second)]
    orders = [private(node, "_sequence_nr")() for node in nodes]
    must(orders[0] < orders[1])
    return lambda node: private(node, "_sequence_nr")()


#: The sequence number of a tensor's node: later nodes have higher numbers. -1 for a leaf, or for
#: all if it is unknown.
_order: Callable[[Node], int] = instead(
    "Node._sequence_nr",
    _torchs_order,
    lambda _: -1,
    "a stage whose components take turns cannot hand on what is not of its last component",
)


def order_of(tensor: Tensor) -> int:
    """A number that is higher for tensors that were made later; -1 for a leaf."""
    return -1 if tensor.grad_fn is None else _order(tensor.grad_fn)
