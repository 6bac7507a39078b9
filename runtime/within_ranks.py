"""What stages of one rank hand each other: the dictionaries that two of them share.

To another rank a message copies a value. Here both stages have one memory, so a stage that writes
its output over the earlier one, as a module that runs as a CUDA graph does, changes what the next
stage reads, or what its backward does. Both are errors. In some steps values are compared too,
since autograd does not count all changes.
"""

from collections import Counter

from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.setup import is_watched
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import Value, checksum, flatten


class Handed(dict[int, Value]):
    """The outputs of a stage, by microbatch, until the next stage takes them."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage = stage
        #: How often each microbatch was handed on, which is once in a step.
        self._times: Counter[int] = Counter()
        #: Until the next stage takes it: the counts of changes in place of a value, and in some
        #: steps a checksum, otherwise 0.
        self._noted: dict[int, tuple[list[int], int]] = {}
        #: For values with a checksum, until the next stage's backward: the value, its counts of
        #: changes in place, and the checksum.
        self._taken: dict[int, tuple[Value, list[int], int]] = {}

    def __setitem__(self, microbatch: int, value: Value) -> None:
        self._times[microbatch] += 1
        sees_all = is_watched(self._times[microbatch])
        values = checksum(value, waits_for_gpu=True) if sees_all else 0
        self._noted[microbatch] = self._changes_of(value), values
        super().__setitem__(microbatch, value)

    def pop(self, microbatch: int, *_: object) -> Value:
        """Take a value. PipelineError if it has changed."""
        value: Value = super().pop(microbatch)
        changes, values = self._noted.pop(microbatch)
        if self._changes_of(value) != changes or self._has_other(value, values):
            raise PipelineError(
                f"the output of stage {self._stage} for microbatch {microbatch} was changed in "
                "place by a later forward: return a copy of what the stage keeps"
            )
        if values and any(tensor.requires_grad for tensor in self._tensors_of(value)):
            self._taken[microbatch] = value, changes, values
        return value

    def check_taken(self, microbatch: int) -> None:
        """PipelineError if a value has changed since it was taken, and autograd does not know."""
        value, changes, values = self._taken.pop(microbatch, ((), [], 0))
        if self._changes_of(value) == changes and self._has_other(value, values):
            raise PipelineError(
                f"the output of stage {self._stage} for microbatch {microbatch} was changed before "
                "the backward of the next stage: a later forward writes its output over the "
                "earlier one; return a copy of what the stage keeps"
            )

    def _has_other(self, value: Value, values: int) -> bool:
        return values != 0 and checksum(value, waits_for_gpu=True) != values

    def _tensors_of(self, value: Value) -> list[Tensor]:
        return flatten(value, f"the output of stage {self._stage}")[0]

    def _changes_of(self, value: Value) -> list[int]:
        return [changes_of(tensor) for tensor in self._tensors_of(value)]


class Returned(dict[int, list[Tensor | None]]):
    """The gradients of what was handed on, by microbatch; a backward has made them."""

    def __init__(self, handed: Handed) -> None:
        super().__init__()
        self._handed = handed

    def __setitem__(self, microbatch: int, gradients: list[Tensor | None]) -> None:
        self._handed.check_taken(microbatch)
        super().__setitem__(microbatch, gradients)


def connect(stage: Stage, following: Stage) -> None:
    """Let a stage and the next one share dictionaries."""
    handed = Handed(stage.number)
    stage.outputs = following.inputs = handed
    stage.gradients = following.input_gradients = Returned(handed)
