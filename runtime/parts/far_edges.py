"""Edges between stages that are not neighbours: edges of a stage graph, and skips.

    an edge     stage 0 ──output──────────────────────┐
                stage 1 ──output──► stage 2(of 0, of 1) ──output──► stage 3

    a skip      stage 0 ──output──► stage 1 ──output──► stage 2(output, skips={0: …})
                   └─── what it returns for stage 2 ──────────►┘

Gradients take the same edges back: the backward of the earlier stage starts from the gradients of
its output and of all values that it has passed to later stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from attrs import define, field
from torch import Tensor

from schedlang.runtime.door import Site
from schedlang.runtime.entry import changeable
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.stage import works_in_place
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import Value, flatten, has_gradient, leaves_of, of_its_own
from schedlang.schedule.kinds import RECEIVES, SENDS, Kind
from schedlang.schedule.layout import Layout


@define(eq=False)
class FarEdge:
    """An edge: its number in the plan, the numbers of its stages in the program, and the values and
    gradients that pass along it, by microbatch, until they are used.

    If both stages are on this rank, they share this object.
    """

    number: int
    earlier: int
    later: int
    #: The name of its values in error messages.
    what: str
    #: Whether it leads from one model to another.
    is_between: bool = False
    #: Whether gradients come back along it: the earlier stage has a backward.
    is_two_way: bool = True
    values: dict[int, Value] = field(factory=dict)
    gradients: dict[int, list[Tensor | None]] = field(factory=dict)


class FarEdges(Part):
    """The far edges of a stage, either skips or edges of a graph: those from stages `before` it,
    and those to stages `after` it. The classes below pass their values to the module and back.
    """

    def __init__(
        self,
        stage: int,
        before: Sequence[FarEdge],
        after: Sequence[FarEdge],
        has_backward: bool,
    ) -> None:
        self._stage = stage
        self._has_backward = has_backward
        self._before = before
        self._after = after
        #: The values from earlier stages, from F to the backward.
        self._given: dict[int, dict[int, Value]] = {}
        boxes: dict[tuple[Kind, int], dict[int, Any]] = {}
        # Edges within this rank have no messages, so their boxes are not used.
        for edge in chain(before, after):
            for kind in (SENDS[Kind.F], RECEIVES[Kind.F]):
                boxes[kind, edge.number] = edge.values
            for kind in (SENDS[Kind.B], RECEIVES[Kind.B]):
                boxes[kind, edge.number] = edge.gradients
        self.boxes = boxes

    def give(self, run: Forward, given: dict[int, Value]) -> None:
        """Pass the values of earlier stages, by the numbers of these, to the module."""
        raise NotImplementedError

    def take(self, run: Forward) -> Mapping[int, Value]:
        """Take the value for each later stage from the module's result."""
        raise NotImplementedError

    def before_forward(self, run: Forward) -> None:
        """Pass the values of earlier stages to the module."""
        if not self._before:
            return
        microbatch = run.microbatch
        if not run.is_repeated:
            self._given[microbatch] = {
                edge.earlier: edge.values.pop(microbatch) for edge in self._before
            }
        given = self._given[microbatch]
        if not run.has_graph:
            given = {earlier: of_its_own(value) for earlier, value in given.items()}
        self.give(run, given)
        run.held = [*run.held, *given.values()]
        if run.has_graph:
            leaves = chain.from_iterable(map(leaves_of, given.values()))
            run.leaves = [*run.leaves, *leaves]
        if run.is_evaluation or not self._has_backward:
            del self._given[microbatch]

    def after_forward(self, run: Forward) -> None:
        """Pass the module's results on to later stages."""
        if not self._after:
            return
        by_stage = self.take(run)
        for edge in self._after:
            tensors, tree = flatten(by_stage[edge.later], edge.what)
            if run.has_graph:
                run.roots = [*run.roots, *filter(has_gradient, tensors)]
            # Each stage has its own tensors, for its own gradients.
            value = run.handed_on(edge.what, tensors, tree)
            if not run.is_repeated:
                edge.values[run.microbatch] = value

    def before_backward(self, run: Backward) -> None:
        """Start also from the gradients of the values that later stages got."""
        for edge in self._after:
            run.gradients += edge.gradients.pop(run.microbatch)

    def after_backward(self, run: Backward) -> None:
        """Pass the gradients of earlier stages' values back to these stages."""
        if not self._before:
            return
        given = self._given.pop(run.microbatch)
        for edge in self._before:
            gradients = run.take(len(leaves_of(given[edge.earlier])))
            if edge.is_two_way:
                edge.gradients[run.microbatch] = gradients


class Edges(FarEdges):
    """The far edges of a stage graph.

    The arguments of the module are the outputs of the stages before it in its own model, in the
    order of their numbers, or the inputs of the model; then the outputs of other models' stages. A
    stage with a single predecessor is called as in a chain. Its output goes to all stages after it.
    """

    def __init__(
        self,
        stage: int,
        before: Sequence[FarEdge],
        after: Sequence[FarEdge],
        has_backward: bool,
        has_input: bool,
        works_in_place: bool,
    ) -> None:
        """`has_input`: whether the stage has an input besides the values of these edges."""
        super().__init__(stage, before, after, has_backward)
        self._has_input = has_input
        self._others = {edge.earlier for edge in before if edge.is_between}
        self._works_in_place = works_in_place

    def give(self, run: Forward, given: dict[int, Value]) -> None:
        """Build the arguments. If the stage right before has an edge to this one, its output is the
        last one of the own model.
        """
        if self._works_in_place and run.has_graph:
            given = {earlier: changeable(value) for earlier, value in given.items()}
        values = [
            given[earlier] for earlier in sorted(given) if earlier not in self._others
        ]
        if self._has_input:
            values.append(run.input)
        values += [given[earlier] for earlier in sorted(self._others)]
        run.input = tuple(values) if len(values) > 1 else values[0]

    def take(self, run: Forward) -> Mapping[int, Value]:
        """All later stages get the output."""
        return {edge.later: run.returned for edge in self._after}


class Forks(Part):
    """Checks that a stage does not change an input in place that other stages get as well.

    In one process, these stages share one tensor and would all see the change. In a pipeline,
    stages on other ranks have a copy.
    """

    def __init__(self, stage: int, before: Sequence[Sequence[int]]) -> None:
        """`before` has an item for each argument of the stage: the stage that makes it, and then
        all stages that get it.
        """
        self._stage = stage
        self._before = before
        #: During a forward: the tensors that several stages get, with their counts of changes.
        self._given: list[tuple[Sequence[int], Tensor, int]] = []

    def before_forward(self, run: Forward) -> None:
        """Keep the count of changes of each tensor."""
        values = run.input if len(self._before) > 1 else (run.input,)
        self._given = [
            (stages, tensor, changes_of(tensor))
            for stages, value in zip(self._before, values, strict=True)
            for tensor in flatten(value, "an input")[0]
            if len(stages) > 2
        ]

    def after_forward(self, run: Forward) -> None:
        """PipelineError if the module has changed one of them."""
        for (giver, *takers), tensor, changes in self._given:
            if changes_of(tensor) != changes:
                others = ", ".join(map(str, takers[:-1]))
                raise PipelineError(
                    f"stage {self._stage} changes in place what stage {giver} gives to the stages "
                    f"{others} and {takers[-1]}: let it change a copy, `x = x.clone()`"
                )
        self._given = []


class Skips(FarEdges):
    """The skips of a stage.

    If skips end at the stage, its module gets the keyword argument `skips`, a dictionary of the
    values of earlier stages, by their numbers in the program. If skips begin there, the module
    returns two values: its output, and a dictionary of values for later stages. Values are tensors,
    or tensors in tuples, lists and dictionaries.
    """

    def give(self, run: Forward, given: dict[int, Value]) -> None:
        """Pass the values as the keyword argument `skips`."""
        run.options = {**run.options, "skips": given}

    def take(self, run: Forward) -> Mapping[int, Value]:
        """Take the dictionary of values; PipelineError if the module did not return two values."""
        later = [edge.later for edge in self._after]
        match run.returned:
            case (output, Mapping() as by_stage) if by_stage.keys() == set(later):
                run.returned = output
                return by_stage
            case (_, Mapping() as by_stage):
                found = f"values for the stages {[*by_stage]}"
            case _:
                found = f"a {type(run.returned).__name__}"
        raise PipelineError(
            f"stage {self._stage} returns {found}: where the plan has skips, it must return two "
            f"values, its output and a dictionary of what it gives to the stages {later}"
        )


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """Make the parts for stages at which a far edge begins or ends. Skips lie further in: their
    values are taken from the module's result before the output goes along edges.
    """
    layout = site.plan.layout
    edges = _far_edges(layout)
    for number, module in site.modules.items():
        yield from forks_at(layout, number)
        has_backward = layout.has_backward[number]
        before, after = _at_stage(layout, edges, number, are_skips=True)
        if before or after:
            yield number, Skips(number, before, after, has_backward)
        before, after = _at_stage(layout, edges, number, are_skips=False)
        if before or after:
            in_place = works_in_place(module)
            has_input = layout.is_first(number) or layout.follows(number)
            yield (
                number,
                Edges(number, before, after, has_backward, has_input, in_place),
            )


def forks_at(layout: Layout, number: int) -> Iterator[tuple[int, Forks]]:
    """Make the check of a stage whose inputs other stages get as well."""
    forks = _forks(layout, number)
    if any(len(stages) > 2 for stages in forks):
        yield number, Forks(number, forks)


def _at_stage(
    layout: Layout, edges: Mapping[int, FarEdge], stage: int, are_skips: bool
) -> tuple[list[FarEdge], list[FarEdge]]:
    """The skips that end at a stage, and those that begin there; or the edges of a graph."""
    ends = {
        edge: stages
        for edge, stages in layout.far_edges.items()
        if layout.is_skip(edge) == are_skips
    }
    before = [edges[edge] for edge, (_, later) in ends.items() if later == stage]
    after = [edges[edge] for edge, (earlier, _) in ends.items() if earlier == stage]
    return before, after


def _forks(layout: Layout, number: int) -> list[list[int]]:
    """For each argument of a stage in a graph, the stage that makes it, and all stages that get it.
    The inputs of a model count as made by its first stage.
    """
    if not layout.edges:
        return []
    model = layout.model_of(number)
    givers = [
        each for each in layout.before[number] if not _is_skip(layout, each, number)
    ]
    # In the order of the arguments that `Edges` builds.
    givers.sort(key=lambda giver: (layout.model_of(giver) != model, giver))
    forks = [
        [
            giver,
            *(
                each
                for each in layout.after[giver]
                if not _is_skip(layout, giver, each)
            ),
        ]
        for giver in givers
    ]
    if layout.is_first(number):
        forks.insert(0, [number])
    return forks


def _is_skip(layout: Layout, earlier: int, later: int) -> bool:
    """Whether the edge between two stages is a skip."""
    return (layout.piece(earlier), layout.piece(later)) in layout.skips


def _far_edges(layout: Layout) -> dict[int, FarEdge]:
    """The far edges of a plan, by their numbers."""
    edges: dict[int, FarEdge] = {}
    for number, (earlier, later) in layout.far_edges.items():
        what = f"what stage {earlier} returns for stage {later}"
        is_two_way = layout.has_backward[earlier]
        ends = layout.piece(earlier), layout.piece(later)
        is_between = layout.model_of(earlier) != layout.model_of(later)
        edges[number] = FarEdge(number, *ends, what, is_between, is_two_way)
    return edges
