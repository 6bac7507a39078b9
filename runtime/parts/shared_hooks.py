"""A warning if two neighbouring stages both have hooks of the tensor that passes between them.

In one process, the output of a stage and the input of the next one are one tensor. Its hooks are
called in the order of their registration: those of the earlier stage first. In a pipeline each
stage has its own tensor, and the gradient comes to the later stage first:

    alone       hooks of stage 0 ──► hooks of stage 1 ──► backward of stage 0
    pipeline    hooks of stage 1 ──► hooks of stage 0 ──► backward of stage 0

If both change the gradient, the result may differ. Neither stage can see that, so ranks compare
their hooks once.
"""

import warnings
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.door import Rank, Site
from schedlang.runtime.part import Forward, Part, parts_by_stage
from schedlang.runtime.torch_private.leaf_hooks import has_hooks_before
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.wire import Wire
from schedlang.schedule.layout import Layout


class BoundaryHooks(Part):
    """Whether the first forward of a stage registers hooks of its input, and of its output."""

    def __init__(self) -> None:
        self.of_input = False
        self.of_output = False
        self._is_first = True

    def after_forward(self, run: Forward) -> None:
        """Find out which tensors have hooks."""
        if self._is_first and run.has_graph:
            self._is_first = False
            # A last stage may return anything that its loss takes.
            returned, _ = tree_flatten(run.returned)
            outputs = [value for value in returned if isinstance(value, Tensor)]
            self.of_input = any(map(has_hooks_before, run.leaves))
            self.of_output = any(map(has_hooks_before, outputs))


class SharedHooks(Part):
    """Compares the hooks of all stages after the first step."""

    def __init__(
        self,
        layout: Layout,
        own: Mapping[int, BoundaryHooks],
        wire: Wire,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._own = own
        self._wire = wire
        self._device = device
        self._is_first = True

    def end_step(self) -> None:
        """Warn, on rank 0, of the first two neighbours that both have hooks of the tensor that
        passes between them.
        """
        if not self._is_first:
            return
        self._is_first = False
        stages = len(self._layout.placement)
        hooks = torch.zeros(2, stages, dtype=torch.int32, device=self._device)
        for stage, own in self._own.items():
            hooks[0, stage] = own.of_input
            hooks[1, stage] = own.of_output
        self._wire.reduce(hooks, dist.ReduceOp.MAX)
        # Now all ranks know the hooks of all stages.
        of_input, of_output = hooks.tolist()
        for later, before in enumerate(self._layout.before):
            for earlier in before:
                if of_output[earlier] and of_input[later]:
                    if self._wire.processes.own == 0:
                        _warn_of(earlier, later)
                    return


def _warn_of(earlier: int, later: int) -> None:
    warnings.warn(
        f"stage {earlier} has hooks of what it returns, and stage {later} of what it is given: "
        f"alone those of stage {earlier} see the gradient first, here those of stage {later}; if "
        "both change it, let one of them take a view of the tensor, `x.view_as(x)`, for its hooks",
        stacklevel=2,
    )


def of_stages(site: Site) -> Iterator[tuple[int, BoundaryHooks]]:
    """Make the part for every stage."""
    for stage in site.modules:
        yield stage, BoundaryHooks()


def of_rank(rank: Rank) -> Iterator[SharedHooks]:
    """Make the part that compares all ranks."""
    layout = rank.site.plan.layout
    own = parts_by_stage(BoundaryHooks, rank.site.parts)
    yield SharedHooks(layout, own, rank.wire, rank.site.device)
