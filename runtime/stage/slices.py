"""A stage whose microbatches are cut into slices of their sequence, which pass one after the other.

What attention needs of the slices before, the module returns beside its output, and is given with
the next slice (TeraPipe, Li et al. 2021, arXiv 2102.07988, section 3). Its gradient takes the same
way back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from schedlang.runtime.stage.stage import Stage, or_zeros, with_gradients
from schedlang.runtime.stage.values import Value, flatten, has_gradient, unflatten
from schedlang.runtime.watch.watchdog import PipelineError


class SlicedStage(Stage):
    """A stage by slices, numbered on from microbatch to microbatch, wherever a `Stage` has
    microbatches.

    The module gets `past`, what it has returned for the slice before, and None with a microbatch's
    first slice. It returns its output and the `past` of the next slice: a tensor, or tensors in
    tuples, lists and dictionaries.
    """

    def __init__(self, *given: Any, slices: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self._slices = slices
        #: What the slices before have left to a slice, until its backward; and its gradient, by the
        #: slice that left it.
        self._past: dict[int, Value] = {}
        self._past_gradients: dict[int, list[Tensor]] = {}
        #: What the module has just returned for the next slice.
        self._left: Value = None

    def begin(self, options: dict[int, Mapping[str, Any]]) -> None:
        """Begin a step; a microbatch's options are those of its slices."""
        slices = range(self._slices)
        super().begin(
            {number * self._slices + each: of for number, of in options.items() for each in slices}
        )

    def forward(self, slice: int) -> None:
        """F: the output, and what the next slice needs."""
        super().forward(slice)
        self._leave(slice)

    def evaluate(self, slice: int) -> None:
        """F without a backward to come."""
        super().evaluate(slice)
        self._past.pop(slice, None)
        self._leave(slice)

    def recompute(self, slice: int) -> None:
        """R: the forward again; the next slice has what it needs."""
        super().recompute(slice)
        self._left = None

    def _leave(self, slice: int) -> None:
        left = self._left
        self._left = None
        if not self._is_last(slice):
            tensors, tree = flatten(left, f"the past of stage {self.number}")
            self._past[slice + 1] = unflatten([each.detach() for each in tensors], tree)

    def _is_last(self, slice: int) -> bool:
        return (slice + 1) % self._slices == 0

    def _options(self, slice: int) -> Mapping[str, Any]:
        return {**super()._options(slice), "past": self._past.get(slice)}

    def _call(self, slice: int, *given: Any) -> Value:
        returned = super()._call(slice, *given)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise PipelineError(
                f"stage {self.number} returns a {type(returned).__name__}: where the plan has "
                "slices, it must return "
                "two values, its output and the `past` that it takes with the next slice"
            )
        output, self._left = returned
        return output

    def _record(self, slice: int, input: Value) -> Value:
        output = super()._record(slice, input)
        if not self._is_last(slice):
            tensors, _ = flatten(self._left, f"the past of stage {self.number}")
            self._live[slice][1].extend(each for each in tensors if has_gradient(each))
        return output

    def _leaves(self, slice: int, input: Value) -> list[Tensor]:
        return super()._leaves(slice, input) + self._past_leaves(slice)

    def _past_leaves(self, slice: int) -> list[Tensor]:
        return with_gradients(self._past[slice]) if slice in self._past else []

    def _gradients(self, slice: int) -> list[Tensor]:
        return super()._gradients(slice) + self._past_gradients.pop(slice, [])

    def _pass_back(
        self, slice: int, inputs: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        own = len(inputs) - len(self._past_leaves(slice))
        super()._pass_back(slice, inputs[:own], gradients[:own])
        if self._past.pop(slice, None) is not None:
            self._past_gradients[slice - 1] = or_zeros(inputs[own:], gradients[own:])
