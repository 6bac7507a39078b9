"""Forwards that no backward follows: of a frozen stage, and the first of two (`parts.repeats`).

Later stages are told what of the outputs wants a gradient, as the graph of a backward would say.
The first run that is given such tensors finds that out: it makes the graph, which is dropped with
it. So no forward is run more often than the plan says.
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
        #: What of the outputs wants a gradient, by what the module was given.
        self._wants: dict[Hashable, Wants] = {}

    def bind(self, stage: Stage) -> None:
        """The stage whose forwards these are."""
        self.stage = stage

    def run(self, run: Forward) -> Value:
        """The output of a run that no backward follows."""
        with torch.no_grad():
            return self.stage.run(run)

    def before_forward(self, run: Forward) -> None:
        """Let a run without a graph know what of its outputs wants a gradient. The module is about
        to run: this part is the innermost one.
        """
        if run.is_evaluation or run.is_repeated:
            return
        look = _look_of(run, self.stage.module)
        if run.has_graph:
            # Of the same stage, other microbatches are run without one.
            self._wants.setdefault(look, run.wants)
            return
        run.known = self._wants.get(look)
        if run.known is None:
            self._wants[look] = run.wants
            run.contexts = [torch.enable_grad(), *run.contexts]
            with torch.enable_grad():
                # Where there is no graph, a leaf may be changed in place.
                run.input = changeable(run.input)


def _look_of(run: Forward, module: nn.Module) -> Hashable:
    """All on which it depends what of the outputs wants a gradient."""
    given: list[Any]
    given, _ = tree_flatten((run.input, dict(run.options)))
    trained = tuple(weight.requires_grad for weight in module.parameters())
    return run.slice, module.training, trained, look_of(given)


class Frozen(WithoutGraph):
    """The op F of a stage without a backward."""

    def forward(self, microbatch: int) -> None:
        """F: the output, or on the last stage the loss, without a graph."""
        stage = self.stage
        input = stage.take_input(microbatch)
        # What an earlier frozen stage hands on may want a gradient, as with adapters, and gets none
        # alone.
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
    """Those of stages without a backward."""
    for number in site.modules:
        if not site.plan.layout.has_backward[number]:
            yield number, Frozen()
