"""Forwards without a graph: those of a frozen stage, and the first of two runs (`parts.repeats`).

Later stages must know which outputs want a gradient, which only a graph shows. So the first run for
each shape of inputs makes a graph, which is dropped afterwards. No forward runs more often than the
plan says.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from schedlang.runtime.door import Site
from schedlang.runtime.entry import changeable
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part, Wants
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.values import Value, look_of, wants_gradient, without_graph


class WithoutGraph(Part):
    """Runs forwards of a stage without a graph."""

    stage: Stage

    def __init__(self) -> None:
        #: Which outputs want a gradient, by the look of the inputs.
        self._wants: dict[Hashable, Wants] = {}

    def bind(self, stage: Stage) -> None:
        """Keep the stage."""
        self.stage = stage

    def run(self, run: Forward) -> Value:
        """Run the module without a graph, and return its output."""
        with torch.no_grad():
            return self.stage.run(run)

    def before_forward(self, run: Forward) -> None:
        """Let a run without a graph know which of its outputs want a gradient, or make the graph to
        find out. This part is the innermost one, right around the module.
        """
        if run.is_evaluation or run.is_repeated:
            return
        look = _look_of(run, self.stage.module)
        if run.has_graph:
            # Other microbatches of the stage run without a graph.
            self._wants.setdefault(look, run.wants)
            return
        run.known = self._wants.get(look)
        if run.known is None:
            self._wants[look] = run.wants
            run.contexts = [torch.enable_grad(), *run.contexts]
            with torch.enable_grad():
                # Without a graph the module may change its input in place; a leaf would refuse.
                run.input = changeable(run.input)


def _look_of(run: Forward, module: nn.Module) -> Hashable:
    """A key of everything that decides which outputs want a gradient."""
    given: list[Any]
    given, _ = tree_flatten((run.input, dict(run.options)))
    trained = tuple(weight.requires_grad for weight in module.parameters())
    return run.slice, module.training, trained, look_of(given)


class Frozen(WithoutGraph):
    """The op F of a stage without a backward."""

    def forward(self, microbatch: int) -> None:
        """F: compute the output, or the loss on the last stage, without a graph."""
        stage = self.stage
        input = stage.take_input(microbatch)
        # The output of an earlier frozen stage may want a gradient, for example with adapters; it
        # gets none in one process either.
        if stage.plan.is_first and wants_gradient(input):
            raise PipelineError(
                f"`inputs` of stage {stage.number} want a gradient, and the stage is frozen in the "
                "plan, so no backward comes to them: detach them, or take the stage out of `frozen`"
            )
        run = Forward(microbatch, input, stage.options_of(microbatch), has_graph=False)
        output = self.run(run)
        if stage.loss is None:
            stage.put_output(microbatch, stage.hand_on(run, output))
        else:
            stage.put_output(microbatch, without_graph(output))


def of_stages(site: Site) -> Iterator[tuple[int, Frozen]]:
    """Make the part for stages without a backward."""
    for number in site.modules:
        if not site.plan.layout.has_backward[number]:
            yield number, Frozen()
