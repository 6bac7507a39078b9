"""A stage with skips: what it makes goes also to later stages than the next, or it takes what
earlier ones have made.

What its module gives and takes is by the numbers that these stages have in the program. The
gradients go the same ways back: that of the earlier stage begins with those of its output and of
all that it has given.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import define, field
from torch import Tensor
from torch.utils._pytree import TreeSpec

from schedlang.runtime.stage.offload import Offload
from schedlang.runtime.stage.slices import SlicedStage
from schedlang.runtime.stage.stage import Stage, or_zeros, with_gradients
from schedlang.runtime.stage.values import Value, flatten, has_gradient, unflatten
from schedlang.runtime.watch.watchdog import PipelineError
from schedlang.schedule.kinds import Kind


@define(eq=False)
class Skip:
    """A skip, by the numbers of its stages in the program; and what passes by it, by microbatch,
    until it is used.

    If both stages are on this rank, they share it.
    """

    earlier: int
    later: int
    #: What passes by it, in a message.
    what: str
    values: dict[int, Value] = field(factory=dict)
    gradients: dict[int, list[Tensor]] = field(factory=dict)


class SkippingStage(Stage):
    """A stage with skips `before` it, which it takes from, and `after` it, which it gives to, by
    their numbers.

    If there are some before it, the module gets `skips`, what earlier stages have given, by stage.
    If there are some after it, it returns two values: its output, and what it gives to each later
    stage, `{stage: value}`. Values are tensors, or tensors in tuples, lists and dictionaries.
    """

    def __init__(
        self, *given: Any, before: Mapping[int, Skip], after: Mapping[int, Skip], **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self._before = before
        self._after = after
        #: What skips have brought, from F to the backward.
        self._taken: dict[int, dict[int, Value]] = {}
        #: What the module has just returned for each skip after it, as `flatten` takes it apart.
        self._given: list[tuple[list[Tensor], TreeSpec | None]] = []

    def box(self, kind: Kind, number: int) -> dict[int, Any]:
        """Where what passes by a transfer comes from or goes to."""
        skip = self._before.get(number) or self._after.get(number)
        if skip is None:
            return super().box(kind, number)
        return skip.values if kind in (Kind.SEND_F, Kind.RECV_F) else skip.gradients

    def forward(self, microbatch: int) -> None:
        """F: the output, and what goes to later stages."""
        self._take(microbatch)
        super().forward(microbatch)
        self._give(microbatch)

    def evaluate(self, microbatch: int) -> None:
        """F without a backward to come."""
        self._take(microbatch)
        super().evaluate(microbatch)
        del self._taken[microbatch]
        self._give(microbatch)

    def recompute(self, microbatch: int) -> None:
        """R: the forward again; later stages have what it gives."""
        super().recompute(microbatch)
        self._given = []

    def _take(self, microbatch: int) -> None:
        self._taken[microbatch] = {
            skip.earlier: skip.values.pop(microbatch) for skip in self._before.values()
        }

    def _give(self, microbatch: int) -> None:
        given = self._given
        self._given = []
        for skip, (tensors, tree) in zip(self._after.values(), given, strict=True):
            # Each stage has tensors of its own, for gradients of its own.
            skip.values[microbatch] = unflatten([each.detach() for each in tensors], tree)

    def _options(self, microbatch: int) -> Mapping[str, Any]:
        options = super()._options(microbatch)
        return {**options, "skips": self._taken[microbatch]} if self._before else options

    def _call(self, microbatch: int, *given: Any) -> Value:
        returned = super()._call(microbatch, *given)
        if not self._after:
            return returned
        later = [skip.later for skip in self._after.values()]
        match returned:
            case (output, Mapping() as by_stage) if by_stage.keys() == set(later):
                self._given = [
                    flatten(by_stage[skip.later], skip.what) for skip in self._after.values()
                ]
                return output
            case (_, Mapping() as by_stage):
                found = f"values for the stages {[*by_stage]}"
            case _:
                found = f"a {type(returned).__name__}"
        raise PipelineError(
            f"stage {self.number} returns {found}: where the plan has skips, it must return two "
            "values, its output "
            f"and a dictionary of what it gives to the stages {later}"
        )

    def _record(self, microbatch: int, input: Value) -> Value:
        output = super()._record(microbatch, input)
        for tensors, _ in self._given:
            self._live[microbatch][1].extend(each for each in tensors if has_gradient(each))
        return output

    def _offload(self, microbatch: int, input: Value) -> Offload:
        return super()._offload(microbatch, (input, self._taken[microbatch]))

    def _leaves(self, microbatch: int, input: Value) -> list[Tensor]:
        return super()._leaves(microbatch, input) + [
            each for part in self._skipped(microbatch) for each in part
        ]

    def _skipped(self, microbatch: int) -> list[list[Tensor]]:
        """Of what skips have brought, each one's tensors that get a gradient."""
        return list(map(with_gradients, self._taken[microbatch].values()))

    def _gradients(self, microbatch: int) -> list[Tensor]:
        given = (each for skip in self._after.values() for each in skip.gradients.pop(microbatch))
        return [*super()._gradients(microbatch), *given]

    def _pass_back(
        self, microbatch: int, inputs: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        parts = self._skipped(microbatch)
        own = len(inputs) - sum(map(len, parts))
        super()._pass_back(microbatch, inputs[:own], gradients[:own])
        skipped = iter(or_zeros(inputs[own:], gradients[own:]))
        for skip, part in zip(self._before.values(), parts, strict=True):
            skip.gradients[microbatch] = list(islice(skipped, len(part)))
        del self._taken[microbatch]


class SlicedSkippingStage(SkippingStage, SlicedStage):
    """The same by slices: the module gets `past` and `skips`, and returns `(output, {stage:
    value}), past`.
    """
