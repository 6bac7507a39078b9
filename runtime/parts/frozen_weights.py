"""Stages that the plan freezes stay frozen."""

from collections.abc import Iterator

from torch import nn

from schedlang.plan.plan import Plan
from schedlang.runtime.door import Site
from schedlang.runtime.frozen_checks import check_frozen_weights
from schedlang.runtime.part import Forward, Part


class FrozenWeights(Part):
    """Checks that the weights of a stage that the plan freezes stay frozen: neither the script nor
    a forward may thaw them.
    """

    def __init__(self, stage: int, module: nn.Module, plan: Plan) -> None:
        self._stage = stage
        self._plan = plan
        self._weights = dict(module.named_parameters())

    def after_forward(self, run: Forward) -> None:
        """PipelineError if a weight requires a gradient now."""
        if not run.is_evaluation:
            check_frozen_weights(self._plan, self._stage, self._weights)


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """Make the parts of the stages that the plan freezes."""
    for stage, module in site.modules.items():
        if not site.plan.layout.trains(stage):
            yield stage, FrozenWeights(stage, module, site.plan)
