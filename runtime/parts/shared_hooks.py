"""A warning if two neighbouring stages both have hooks of the tensor that passes between them.

In one process, the output of a stage and the input of the next one are one tensor. Its hooks are
called in the order of their registration: those of the earlier stage first. In a pipeline each
stage has its own tensor, and the gradient comes to the later stage first:

    alone       hooks of stage 0 ──► hooks of stage 1 ──► backward of stage 0
    pipeline    hooks of stage 1 ──► hooks of stage 0 ──► backward of stage 0

If both change the gradient, the result may differ. Neither stage can see that, so ranks compare
their hooks once.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from schedlang.runtime.door import Rank, Site
from schedlang.runtime.part import Forward, Part, parts_by_stage
from schedlang.runtime.parts.compared import Compared
from schedlang.runtime.torch_private.leaf_hooks import has_hooks_before
from schedlang.runtime.torch_private.pytrees import tree_flatten
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


def _wrong(layout: Layout, of_stages: Sequence[Sequence[int]]) -> str | None:
    """The first two neighbours that both have hooks of the tensor that passes between them."""
    for later, before in enumerate(layout.before):
        for earlier in before:
            has_of_input, _ = of_stages[later]
            _, has_of_output = of_stages[earlier]
            if has_of_output and has_of_input:
                return (
                    f"stage {earlier} has hooks of what it returns, and stage {later} of what it "
                    f"is given: alone those of stage {earlier} see the gradient first, here those "
                    f"of stage {later}; if both change it, let one of them take a view of the "
                    "tensor, `x.view_as(x)`, for its hooks"
                )
    return None


def of_stages(site: Site) -> Iterator[tuple[int, BoundaryHooks]]:
    """Make the part for every stage."""
    for stage in site.modules:
        yield stage, BoundaryHooks()


def of_rank(rank: Rank) -> Iterator[Compared]:
    """Make the part that compares all ranks."""
    own = parts_by_stage(BoundaryHooks, rank.site.parts)
    yield Compared(
        rank,
        lambda: {
            stage: [hooks.of_input, hooks.of_output] for stage, hooks in own.items()
        },
        partial(_wrong, rank.site.plan.layout),
    )
