"""Compiled blocks whose backward runs in two halves: `torch.compile(block, backend="schedlang")`.

The backend is torch's own compiler, inductor; it compiles two graphs for the backward:

    forward   inputs, weights ──► outputs, saved tensors
    I         saved tensors, gradients of outputs ──► gradients of inputs, tensors for W
    W         saved tensors, tensors for W ──► gradients of weights

A node of the backward's graph belongs to W if no gradient of an input depends on it. Outside a
split backward both halves run, one after the other. `python benchmarks/split.py --compiled` prints
the times of the halves.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.autograd.graph import Node as AutogradNode
from torch.fx import Graph, GraphModule, Node

from schedlang.runtime.parts.layers import STORES, Deferred, Store
from schedlang.runtime.torch_private.inductor import boxed, compile_graph, compile_with

#: A compiled graph. It takes its arguments in a list, which it empties.
Compiled = Callable[[list[Any]], Sequence[Any]]

#: Autograd's name for the node of a compiled block.
_NODE = "CompiledFunctionBackward"


def backend(
    graph: GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A backend for `torch.compile`, registered as `"schedlang"`: inductor, with a backward that a
    plan can split. Mode and options are inductor's; PipelineError for CUDA graphs.
    """
    block = _Block([_shape_of_weight(example) for example in examples])
    compiled = compile_with(block.compile, graph, examples, mode, options)

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        if STORES and torch.is_grad_enabled():
            weights = [
                None if shape is None else arg
                for arg, shape in zip(args, block.shapes, strict=True)
            ]
            for node in _nodes_of(outputs, weights):
                node.register_prehook(partial(block.begin, STORES[-1], weights))
        return outputs

    return run


def _shape_of_weight(example: Any) -> torch.Size | None:
    """The shape of a trained weight; None for other inputs."""
    return (
        example.shape
        if type(example) is nn.Parameter and example.requires_grad
        else None
    )


def _nodes_of(
    outputs: Iterable[Any], weights: Iterable[Tensor | None]
) -> set[AutogradNode]:
    """The autograd nodes of a compiled block with these weights, found from its outputs, which may
    be views.
    """
    ids = {id(weight) for weight in weights if weight is not None}
    nodes: set[AutogradNode] = set()
    for output in outputs:
        node = output.grad_fn if isinstance(output, Tensor) else None
        while node is not None and node.name() != _NODE:
            # Go through a view, which has one node before it.
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        # A block may return its input, whose node is another block's.
        if node is not None and ids <= _leaves_of(node):
            nodes.add(node)
    return nodes


def _leaves_of(node: AutogradNode) -> set[int]:
    """The ids of the leaves whose gradients a node computes."""
    return {id(getattr(before, "variable", None)) for before, _ in node.next_functions}


@define(eq=False)
class _Block:
    """A compiled block, whose backwards may be split."""

    #: For each input, the shape of a trained weight, or None.
    shapes: list[torch.Size | None]
    #: For the backward that begins now: the store of its microbatch, and for each input the weight,
    #: or None.
    _begun: tuple[Store, Sequence[Tensor | None]] | None = None

    def begin(self, store: Store, weights: Sequence[Tensor | None], _: Any) -> None:
        """Note that the next backward is split, and in which store it leaves its W."""
        self._begun = store, weights

    def compile(
        self, graph: GraphModule, examples: Sequence[Any], **options: Any
    ) -> Compiled:
        """Compile a graph by inductor; the graph of a backward in two halves."""
        halves = _halves(graph, self.shapes) if options.get("is_backward") else None
        if halves is None:
            return compile_graph(graph, examples, **options)
        given = dict(zip(_inputs_of(graph), examples, strict=True))
        between = [given.get(node, node.meta.get("val")) for node in halves.between]
        first = compile_graph(halves.first, examples, **options)
        second = compile_graph(
            halves.second, between, **options | {"static_input_idxs": ()}
        )
        return boxed(partial(self._run, halves, first, second))

    def _run(
        self, halves: "_Halves", first: Compiled, second: Compiled, args: list[Any]
    ) -> Sequence[Tensor | None]:
        """Run a backward: the gradients of all inputs, None for those that are left to W."""
        begun = self._begun
        self._begun = None
        # The arguments of the second half, some from the inputs and some from the first half:
        #
        #     between    saved0   gradient   c0      c1
        #     places     0        3          None    None    among the inputs of the first half
        # given      …        …          None    None    kept now: the first half empties its list
        given = [None if place is None else args[place] for place in halves.places]
        gradients = list(first(args))
        computed = iter(gradients[len(halves.are_late) :])
        # Results for the second half stand behind the gradients of all inputs.
        del gradients[len(halves.are_late) :]
        between = [
            next(computed) if place is None else value
            for place, value in zip(halves.places, given, strict=True)
        ]
        if begun is not None and not begun[0].is_whole:
            store, weights = begun
            late = [
                weight
                for weight, is_late in zip(weights, halves.are_late, strict=True)
                if is_late and weight is not None
            ]
            compute = torch.no_grad()(partial(second, between))
            store.deferred.append(Deferred(late, late, compute=compute))
            return gradients
        of_weights = iter(second(between))
        return [
            next(of_weights) if is_late else gradient
            for gradient, is_late in zip(gradients, halves.are_late, strict=True)
        ]


# --- A graph in two -------------------------------------------------------------------------------


@frozen
class _Halves:
    """The graph of a backward in two halves.

    The first half returns a gradient for each input, None for those that `are_late`, and then its
    results for the second half. The second half takes the nodes `between` and returns the late
    gradients. Some nodes between are inputs of the first half, at these `places`, or None.
    """

    first: GraphModule
    second: GraphModule
    are_late: list[bool]
    between: list[Node]
    places: list[int | None]


def _halves(graph: GraphModule, shapes: Sequence[torch.Size | None]) -> _Halves | None:
    """Split the graph of a backward; None if no gradient of a weight can be left to W."""
    if not _are_gradients(_outputs_of(graph), shapes):
        return None
    _split_convolutions(graph)
    outputs = _outputs_of(graph)
    # The first half has all nodes on which some input gradient depends. A weight's gradient among
    # them costs no more work, so it is computed there, too.
    in_first = _before(
        output for output, shape in zip(outputs, shapes, strict=True) if shape is None
    )
    are_late = [
        output is not None and output not in in_first and output.op == "call_function"
        for output in outputs
    ]
    late = [
        output for output, is_late in zip(outputs, are_late, strict=True) if is_late
    ]
    in_second = {
        node for node in _before(late) - in_first if node.op == "call_function"
    }
    if not late:
        return None
    inputs = _inputs_of(graph)
    # Nodes that the second half reads from outside: inputs of the block, and results of the first
    # half.
    between = [
        node
        for node in graph.graph.nodes
        if node.op != "get_attr"
        and node not in in_second
        and not in_second.isdisjoint(node.users)
    ]
    computed = [node for node in between if node.op == "call_function"]
    of_first = [
        None if is_late else output
        for output, is_late in zip(outputs, are_late, strict=True)
    ]
    return _Halves(
        first=_part(graph, inputs, [*of_first, *computed]),
        second=_part(graph, between, late),
        are_late=are_late,
        between=between,
        places=[
            inputs.index(node) if node.op == "placeholder" else None for node in between
        ],
    )


def _are_gradients(
    outputs: Sequence[Node | None], shapes: Sequence[torch.Size | None]
) -> bool:
    """Whether the outputs of a graph are the gradients of a block's inputs, one for each. The
    compiler changes that for tensor subclasses, and for inputs that share memory.
    """
    return len(outputs) == len(shapes) and all(
        output is None or shape is None or output.meta["val"].shape == shape
        for output, shape in zip(outputs, shapes, strict=True)
    )


def _inputs_of(graph: GraphModule) -> list[Node]:
    return graph.graph.find_nodes(op="placeholder")


def _outputs_of(graph: GraphModule) -> Sequence[Node | None]:
    (output,) = graph.graph.find_nodes(op="output")
    outputs: Sequence[Node | None] = output.args[0]
    return outputs


def _before(nodes: Iterable[Node | None], inputs: Iterable[Node] = ()) -> set[Node]:
    """These nodes, and all nodes on which they depend, back to some inputs."""
    seen = set(inputs)
    ahead = [node for node in nodes if node is not None]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += node.all_input_nodes
    return seen


def _part(
    graph: GraphModule, inputs: Collection[Node], outputs: Sequence[Node | None]
) -> GraphModule:
    """The part of a graph that computes these outputs from these inputs."""
    part = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        # Inductor's cache does not distinguish graphs that may overwrite their inputs. This one may
        # not, so its inputs have names that no other graph has.
        copies[node] = part.placeholder(f"half_{node.name}")
        copies[node].meta = node.meta.copy()
    needed = _before(outputs, inputs)
    for node in graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    output = part.output(
        tuple(None if node is None else copies[node] for node in outputs)
    )
    # Inductor keeps the strides of outputs that are visible to users.
    output.meta["user_visible_output_idxs"] = [
        index for index, node in enumerate(outputs) if node is not None
    ]
    return GraphModule(graph, part)


def _split_convolutions(graph: GraphModule) -> None:
    """Split the backward of each convolution into a node for the gradient of the input, and one for
    those of the weights.
    """
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution_backward.default
    ):
        *args, (of_input, of_weight, of_bias) = node.args
        if not of_input:
            continue
        with graph.graph.inserting_before(node):
            first = graph.graph.call_function(
                node.target, (*args, [True, False, False])
            )
            second = graph.graph.call_function(
                node.target, (*args, [False, of_weight, of_bias])
            )
        value = node.meta["val"]
        first.meta["val"] = value[0], None, None
        second.meta["val"] = None, *value[1:]
        for use in list(node.users):
            assert use.target is getitem
            use.replace_input_with(node, second if use.args[1] else first)
        graph.graph.erase_node(node)
