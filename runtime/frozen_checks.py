"""Checks of the weights of frozen stages."""

from collections.abc import Mapping

from torch import nn

from schedlang.diagnostics.diagnostic import counted
from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.setup import Tied


def check_frozen(plan: Plan, modules: Mapping[int, nn.Module], tied: Tied) -> None:
    """PipelineError if a weight of a stage that the plan freezes requires a gradient, or one that
    is tied to it does.
    """
    for number, module in modules.items():
        weights = dict(module.named_parameters())
        if not plan.layout.trains(number):
            check_frozen_weights(plan, number, weights)
        _check_tied(plan, number, weights, tied)


def check_frozen_weights(
    plan: Plan, number: int, weights: Mapping[str, nn.Parameter]
) -> None:
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
