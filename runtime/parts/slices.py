"""Microbatches that are cut along their sequence into slices, which run through a stage one by one.

Attention needs the keys and values of earlier slices. The module returns them as its `past` with
the output, and gets them with the next slice (TeraPipe, Li et al. 2021, arXiv 2102.07988, section
3). The gradient of the past goes the other way:

    F   slice 0 ──past──► slice 1 ──past──► slice 2
    B   slice 0 ◄──grad── slice 1 ◄──grad── slice 2
"""

from collections.abc import Iterator

from torch import Tensor

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.values import Value, flatten, has_gradient, leaves_of, of_its_own


class Past(Part):
    """The past of each slice on a stage.

    Slices are numbered consecutively over all microbatches, and the stage treats them as
    microbatches. The module gets `past`: None for a microbatch's first slice, otherwise the value
    that it returned for the previous slice. It returns its output and the `past` of the next slice:
    a tensor, or tensors in tuples, lists and dictionaries.
    """

    def __init__(self, stage: int, slices: int, has_backward: bool) -> None:
        self._stage = stage
        self._slices = slices
        self._has_backward = has_backward
        #: The past that each slice gets, until its backward.
        self._past: dict[int, Value] = {}
        #: The gradients of the past that a slice has made, from the next slice's backward to its
        #: own.
        self._gradients: dict[int, list[Tensor | None]] = {}

    def before_forward(self, run: Forward) -> None:
        """Pass the past of the previous slice to the module."""
        slice = run.microbatch
        run.slice = slice % self._slices
        past = self._past.get(slice)
        if past is not None and not run.has_graph:
            past = of_its_own(past)
        run.options = {**run.options, "past": past}
        if past is None:
            return
        run.held = [*run.held, past]
        if run.has_graph:
            run.leaves = [*run.leaves, *leaves_of(past)]
        if run.is_evaluation or not self._has_backward:
            del self._past[slice]

    def after_forward(self, run: Forward) -> None:
        """Keep the past that the module returned, for the next slice."""
        returned = run.returned
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise PipelineError(
                f"stage {self._stage} returns a {type(returned).__name__}: where the plan has "
                "slices, it must return two values, its output and the `past` that it takes with "
                "the next slice"
            )
        run.returned, left = returned
        # The last slice of a microbatch leaves no past: the next slice begins another sequence.
        if (run.microbatch + 1) % self._slices == 0:
            return
        what = f"the past of stage {self._stage}"
        tensors, tree = flatten(left, what)
        if run.has_graph:
            run.roots = [*run.roots, *filter(has_gradient, tensors)]
        past = run.handed_on(what, tensors, tree)
        if not run.is_repeated:
            self._past[run.microbatch + 1] = past

    def before_backward(self, run: Backward) -> None:
        """Start also from the gradients of this slice's past, which the next slice has computed."""
        run.gradients += self._gradients.pop(run.microbatch, [])

    def after_backward(self, run: Backward) -> None:
        """Keep the gradients of the past that this slice got, for the previous slice."""
        slice = run.microbatch
        past = self._past.pop(slice, None)
        if past is not None:
            self._gradients[slice - 1] = run.take(len(leaves_of(past)))


def of_stages(site: Site) -> Iterator[tuple[int, Past]]:
    """Make the part for every stage."""
    layout = site.plan.layout
    for stage in site.modules:
        yield stage, Past(stage, layout.slices, layout.has_backward[stage])
