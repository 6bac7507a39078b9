"""Handovers: a stage takes the output of a pipeline that runs ahead, and its gradients go on along
its own pipeline.

    ahead       stage 0 ──output──► stage 1 ──output──► stage 2
                   └───────────┐       └───────────┐       └──────…
    own one     stage 0 ◄─gradient─ stage 1 ◄─gradient─ stage 2 ◄─…

The forward ahead keeps nothing. The stage that takes over runs it again, with the same weights and
inputs, and would get another output if it drew random numbers: that is refused.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.parts.far_edges import Edges, FarEdge, forks_at
from schedlang.runtime.random_state import random_state
from schedlang.runtime.stage import Stage, works_in_place
from schedlang.runtime.values import ValueSpec, flatten
from schedlang.schedule.kinds import SENDS, Kind
from schedlang.schedule.layout import Layout


class TakesOver(Edges):
    """A stage that takes the output of another pipeline's stage."""

    stage: Stage

    def __init__(
        self, number: int, edge: FarEdge, module: nn.Module, layout: Layout
    ) -> None:
        super().__init__(
            number,
            [edge],
            [],
            layout.has_backward[number],
            has_input=False,
            works_in_place=works_in_place(module),
        )
        self._is_beside = layout.placement[number - 1] == layout.placement[number]
        self._specs: dict[int, ValueSpec] = {}
        #: The gradients for the stage before, if it is on another rank, by microbatch; with the
        #: spec of their input, since no activation has announced it to that rank.
        self._sent: dict[int, tuple[ValueSpec, Sequence[Tensor | None]]] = {}
        self.boxes = {**self.boxes, (SENDS[Kind.B], number): self._sent}

    def bind(self, stage: Stage) -> None:
        """Keep the stage."""
        self.stage = stage

    def recorded(self, run: Forward) -> None:
        """Keep the look of the input."""
        given = self._given[run.microbatch].values()
        for value in given:
            self._specs[run.microbatch] = ValueSpec.of(*flatten(value, "an input"))

    def after_backward(self, run: Backward) -> None:
        """Give the gradients of the input to the stage before in the own pipeline."""
        del self._given[run.microbatch]
        gradients = run.take(len(run.leaves))
        spec = self._specs.pop(run.microbatch)
        if self.stage.plan.ends_backward:
            return
        if self._is_beside:
            self.stage.input_gradients[run.microbatch] = gradients
        else:
            del self.stage.input_gradients[run.microbatch]
            self._sent[run.microbatch] = spec, gradients


class RunsAhead(Edges):
    """A stage of a pipeline that runs ahead."""

    def __init__(
        self,
        number: int,
        name: str,
        edge: FarEdge | None,
        module: nn.Module,
        device: torch.device,
    ) -> None:
        super().__init__(
            number,
            [],
            [edge] if edge is not None else [],
            has_backward=False,
            has_input=True,
            works_in_place=works_in_place(module),
        )
        self._name = name
        self._device = device
        self._is_first = True
        self._state: Any = None

    def before_forward(self, run: Forward) -> None:
        """Leave losses that the module adds to the forward of the stage that takes over. Keep the
        state of the random numbers before the first forward.
        """
        run.has_loss = False
        if self._is_first and not run.is_evaluation:
            self._state = random_state(self._device)

    def after_forward(self, run: Forward) -> None:
        """Pass the output on. PipelineError if the forward has drawn random numbers."""
        super().after_forward(run)
        if self._state is None:
            return
        now = random_state(self._device)
        if any(not torch.equal(now[name], was) for name, was in self._state.items()):
            raise PipelineError(
                f"the forward of stage {self._name} draws random numbers, as dropout does, and "
                "the forward that is run for its backward on another rank would draw others: take "
                "a plan in which no pipeline runs ahead"
            )
        self._is_first = False
        self._state = None


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """Make the parts of each stage at which a handover begins or ends."""
    layout = site.plan.layout
    edges = {ends: edge for ends, edge in _edges(layout)}
    for number, module in site.modules.items():
        yield from forks_at(layout, number)
        if layout.runs_ahead(number):
            after = next((edges[ends] for ends in edges if ends[0] == number), None)
            name = site.plan.names.stage(number)
            yield number, RunsAhead(number, name, after, module, site.device)
        elif number in layout.handovers:
            edge = edges[layout.handovers[number], number]
            yield number, TakesOver(number, edge, module, layout)


def _edges(layout: Layout) -> Iterator[tuple[tuple[int, int], FarEdge]]:
    """The handovers of a plan, by the two stages of each."""
    for number, (earlier, later) in layout.far_edges.items():
        what = f"what stage {earlier} hands over to stage {later}"
        pieces = layout.piece(earlier), layout.piece(later)
        yield (
            (earlier, later),
            FarEdge(number, *pieces, what, is_two_way=False),
        )
