"""Losses that a stage adds to the loss of the last stage (`schedlang.runtime.losses`). The stage's
backward starts from their sum, and from the gradients of its output.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.losses import Added, Taking, root_of, total_of
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.stage import Stage


class AddedLosses(Part):
    """Collects the losses that a stage's forwards add."""

    _stage: Stage

    def __init__(self) -> None:
        #: From a forward to its backward: the microbatches that have added a loss.
        self._have_added: set[int] = set()

    def bind(self, stage: Stage) -> None:
        """Keep the stage, whose sums of losses are updated."""
        self._stage = stage

    def before_forward(self, run: Forward) -> None:
        """Collect the losses that the module adds."""
        # A reference to the run would be a cycle, and keep its tensors alive.
        run.call = partial(_call_taking, run.added, run.call)

    def after_forward(self, run: Forward) -> None:
        """Sum the losses that the module has added; if R repeats the forward, in that run."""
        if not run.added:
            return
        if run.has_graph and not all(each.has_graph for each in run.added):
            raise PipelineError(
                f"stage {self._stage.number} adds a loss without a graph, so it would not be "
                "trained: add it outside of `torch.no_grad`, and of a checkpoint with "
                "`use_reentrant=True`"
            )
        if run.has_loss:
            sums = self._stage.added
            share = self._stage.shares.of(run.microbatch)
            for name, total in total_of(run.added).items():
                value = total * share
                sums[name] = sums[name] + value if name in sums else value
        run.total = root_of(run.added) if run.has_graph else None
        if run.total is not None:
            self._have_added.add(run.microbatch)
            run.roots = [*run.roots, run.total]

    def before_backward(self, run: Backward) -> None:
        """Add the sum of the losses to the roots from which the backward starts."""
        if run.microbatch in self._have_added:
            self._have_added.remove(run.microbatch)
            root = run.roots[len(run.gradients)]
            scale = self._stage.scale_of(run.microbatch)
            run.gradients.append(torch.full_like(root, scale))


def _call_taking(
    added: list[Added], call: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Call the module, and collect the losses that it adds."""
    with Taking(added):
        return call(*arguments, **options)


def of_stages(site: Site) -> Iterator[tuple[int, AddedLosses]]:
    """Make the part for every stage, since only a forward shows whether it adds a loss."""
    for number in site.modules:
        yield number, AddedLosses()
