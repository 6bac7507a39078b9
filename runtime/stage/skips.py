"""Skips: what a stage makes goes also to later stages than the next one.

    F   stage 0 ──output──► stage 1 ──output──► stage 2
           └────────────── skip ─────────────────►┘

Gradients go the same ways back: the backward of the earlier stage begins with those of its output
and of all that it has given to later stages.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from attrs import define, field
from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.values import Value, flatten, has_gradient, leaves_of, of_its_own
from schedlang.schedule.kinds import Kind


@define(eq=False)
class Skip:
    """A skip, by its number in the plan and those of its stages in the program; and what passes
    along it, by microbatch, until it is used.

    If both of its stages are on this rank, they share it.
    """

    number: int
    earlier: int
    later: int
    #: What passes along it, in a message.
    what: str
    #: Whether gradients come back along it: the earlier stage has a backward.
    is_two_way: bool = True
    values: dict[int, Value] = field(factory=dict)
    gradients: dict[int, list[Tensor | None]] = field(factory=dict)


class Skips(Part):
    """The skips of a stage: those that end `before` it, and those that begin `after` it.

    If there are some before it, the module gets `skips`, what earlier stages have given, by the
    numbers that these have in the program. If there are some after it, it returns two values: its
    output, and what it gives to each later stage, `{stage: value}`. Values are tensors, or tensors
    in tuples, lists and dictionaries.
    """

    def __init__(
        self, stage: int, before: Sequence[Skip], after: Sequence[Skip], has_backward: bool
    ) -> None:
        self._stage = stage
        self._has_backward = has_backward
        self._before = before
        self._after = after
        #: What earlier stages have given, from F to the backward.
        self._given: dict[int, dict[int, Value]] = {}
        boxes: dict[tuple[Kind, int], dict[int, Any]] = {}
        for skip in chain(before, after):
            for kind in (Kind.SEND_F, Kind.RECV_F):
                boxes[kind, skip.number] = skip.values
            for kind in (Kind.SEND_B, Kind.RECV_B):
                boxes[kind, skip.number] = skip.gradients
        self.boxes = boxes

    def before_forward(self, run: Forward) -> None:
        """Give the module what earlier stages have given."""
        if not self._before:
            return
        microbatch = run.microbatch
        if not run.is_repeated:
            self._given[microbatch] = {
                skip.earlier: skip.values.pop(microbatch) for skip in self._before
            }
        given = self._given[microbatch]
        if not run.has_graph:
            given = {earlier: of_its_own(value) for earlier, value in given.items()}
        run.options = {**run.options, "skips": given}
        run.held = [*run.held, *given.values()]
        if run.has_graph:
            leaves = chain.from_iterable(map(leaves_of, given.values()))
            run.leaves = [*run.leaves, *leaves]
        if run.is_evaluation or not self._has_backward:
            del self._given[microbatch]

    def after_forward(self, run: Forward) -> None:
        """Give later stages what the module returned for them."""
        if not self._after:
            return
        run.returned, by_stage = self._taken_apart(run.returned)
        for skip in self._after:
            tensors, tree = flatten(by_stage[skip.later], skip.what)
            if run.has_graph:
                run.roots = [*run.roots, *filter(has_gradient, tensors)]
            if not run.is_repeated:
                # Each stage has tensors of its own, for gradients of its own.
                skip.values[run.microbatch] = run.handed_on(tensors, tree)

    def before_backward(self, run: Backward) -> None:
        """Add the gradients of what later stages were given."""
        for skip in self._after:
            run.gradients += skip.gradients.pop(run.microbatch)

    def after_backward(self, run: Backward) -> None:
        """Give the gradients of what earlier stages have given back to them."""
        if not self._before:
            return
        given = self._given.pop(run.microbatch)
        for skip in self._before:
            gradients = run.take(len(leaves_of(given[skip.earlier])))
            if skip.is_two_way:
                skip.gradients[run.microbatch] = gradients

    def _taken_apart(self, returned: Any) -> tuple[Value, Mapping[int, Value]]:
        """The output and what goes to later stages; PipelineError where the module returned
        anything else.
        """
        later = [skip.later for skip in self._after]
        match returned:
            case (output, Mapping() as by_stage) if by_stage.keys() == set(later):
                return output, by_stage
            case (_, Mapping() as by_stage):
                found = f"values for the stages {[*by_stage]}"
            case _:
                found = f"a {type(returned).__name__}"
        raise PipelineError(
            f"stage {self._stage} returns {found}: where the plan has skips, it must return two "
            f"values, its output and a dictionary of what it gives to the stages {later}"
        )
