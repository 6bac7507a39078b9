"""The side effects of forwards, which must be undone before a warm-up runs once more.

Outputs are kept by microbatch, so a second run replaces them. The state of random numbers, the
buffers of modules, and the sums of added losses are restored. Inputs, targets and options of the
script must not have changed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.random_state import RandomState
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.torch_private.tensors import changes_of


class BeforeForwards:
    """The state of a rank's stages before the first forward of a step."""

    def __init__(self, stages: Mapping[int, Stage], device: torch.device) -> None:
        self._stages = stages.values()
        self._random = RandomState(device)
        self._state = self._random.state_dict()
        #: By module and name, since a forward may replace a buffer by another tensor.
        self._buffers = [
            (owner, name, buffer, buffer.clone())
            for stage in self._stages
            for owner in stage.module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        values, _ = tree_flatten(
            [(each.inputs, each.targets, each.options) for each in self._stages]
        )
        self._given = [
            (value, changes_of(value)) for value in values if isinstance(value, Tensor)
        ]

    def check(self) -> None:
        """PipelineError if a forward has changed its inputs, targets or options in place."""
        if any(changes_of(tensor) != changes for tensor, changes in self._given):
            raise PipelineError(
                "a stage changes its inputs, targets or options in place, and with `max_norm` its "
                "forwards may have to be run once more: let it change a copy (`x = x.clone()`, "
                "`inplace=False`), or call `clip_grad_norm_` after each step"
            )

    def undo(self) -> None:
        """Restore the state that the forwards have changed."""
        self._random.load_state_dict(self._state)
        with torch.no_grad():
            for owner, name, buffer, before in self._buffers:
                buffer.copy_(before)
                setattr(owner, name, buffer)
        for stage in self._stages:
            stage.begin_anew()
