"""Whether torch's stages are those of a plan; a ValueError names what both say."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage

from schedlang.diagnostics.diagnostic import counted
from schedlang.diagnostics.wrong_arguments import check_type, shown
from schedlang.plan.plan import Plan


def check_are_stages(stages: Any) -> None:
    """TypeError unless these are stages as scripts build them."""
    what = "PipelineStages, as `torch.distributed.pipelining.PipelineStage(module, 0, 4, device)`"
    if not isinstance(stages, Sequence) or not stages:
        raise TypeError(f"`stages` is {shown(stages)}: it must be a list of {what}")
    for index, stage in enumerate(stages):
        check_type(f"stages[{index}]", stage, PipelineStage, f"one of {what}")


def check_agreement(plan: Plan, stages: Sequence[PipelineStage]) -> None:
    """Whether the stages of a rank are those that the plan gives it."""
    first = stages[0]
    numbers = sorted(stage.stage_index for stage in stages)
    ranks = counted(len(plan.ranks), "rank")
    count = counted(len(plan.placement), "stage")
    if first.group_size != len(plan.ranks):
        raise ValueError(
            f"the plan has {ranks}, the process group of the stages has "
            f"{counted(first.group_size, 'rank')}"
        )
    if first.num_stages != len(plan.placement):
        raise ValueError(
            f"the plan has {count}, the stages were built as {first.num_stages}"
        )
    planned = plan.stages_of(first.group_rank)
    if numbers != planned:
        raise ValueError(
            f"the plan gives rank {first.group_rank} the stages {planned}, `stages` are {numbers}: "
            "build the stages where the plan has them, `plan.stages_of(rank)`"
        )
