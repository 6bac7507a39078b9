"""Checks that the weights of stages that the plan freezes need no gradient, and that no weight is
trained that is tied to one of these.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from schedlang.diagnostics.diagnostic import counted
from schedlang.plan.plan import Plan
from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.setup import Tied


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
            _check_frozen(self._plan, self._stage, self._weights)


def _check_frozen(plan: Plan, number: int, weights: Mapping[str, nn.Parameter]) -> None:
    """PipelineError if a weight of a stage that the plan freezes requires a gradient."""
    wanting = [name for name, weight in weights.items() if weight.requires_grad]
    if wanting:
        others = counted(len(wanting) - 1, "other")
        more = f" and {others}" if len(wanting) > 1 else ""
        raise PipelineError(
            f"stage {number} is frozen in the plan, and its weight `{wanting[0]}`{more} would "
            "be trained: freeze the module, `requires_grad_(False)`, or take the stage out of "
            f"`frozen` in {plan.source.path}"
        )


def _check_tied(
    plan: Plan, number: int, weights: Mapping[str, nn.Parameter], tied: Tied
) -> None:
    """Check that no trained weight of a stage is tied to a weight of a frozen stage."""
    piece = plan.layout.piece(number)
    for names in tied:
        stages = range(len(plan.placement))
        by_piece = {
            plan.layout.piece(stage): name
            for stage, name in names.items()
            if stage in stages
        }
        own = weights.get(by_piece.get(piece, ""))
        frozen = [other for other in by_piece if other in plan.layout.frozen]
        if own is not None and own.requires_grad and frozen:
            raise PipelineError(
                f"the weight `{by_piece[piece]}` of stage {number} would be trained, and is tied "
                f"to `{by_piece[frozen[0]]}` of stage {frozen[0]}, which is frozen in the plan: "
                "freeze both or none"
            )


def check_frozen(plan: Plan, modules: Mapping[int, nn.Module], tied: Tied) -> None:
    """Check the weights of a rank's stages before the pipeline is built."""
    for stage, module in modules.items():
        weights = dict(module.named_parameters())
        if not plan.layout.trains(stage):
            _check_frozen(plan, stage, weights)
        _check_tied(plan, stage, weights, tied)


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """Make the part for every stage that the plan freezes."""
    for stage, module in site.modules.items():
        if not site.plan.layout.trains(stage):
            yield stage, FrozenWeights(stage, module, site.plan)
