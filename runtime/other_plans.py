"""Checks of a plan that a step follows in place of the pipeline's own."""

from attrs import evolve, fields

from schedlang.plan.plan import Plan
from schedlang.runtime.checks import check_setup
from schedlang.runtime.door import FEATURES, Asked, Site, check_together
from schedlang.runtime.errors import PipelineError
from schedlang.schedule.layout import Layout


def check_other_plan(site: Site, plan: Plan) -> None:
    """PipelineError where a step cannot follow this plan in place of that of its pipeline."""
    _check_alike(site.plan, plan)
    check_setup(plan, site.rank, site.setup)
    asked = Asked(plan, site.processes, site.setup, has_others=True)
    check_together(asked)
    check_together(Asked(site.plan, site.processes, site.setup, has_others=True))
    for feature in FEATURES.values():
        for stage in site.modules if feature.file is not None else ():
            if feature.is_asked(asked, stage) and not feature.is_asked(site, stage):
                raise PipelineError(
                    f"the plan of this step has {feature.words} on stage {stage}, and that of the "
                    "pipeline has none: build the pipeline with the plan that has more"
                )


def _check_alike(own: Plan, plan: Plan) -> None:
    """PipelineError unless the plan of a step has the same stages and connections as the plan of
    the pipeline: only the order and the number of microbatches may differ.
    """
    if plan.is_forward_only:
        raise PipelineError(
            "the plan of this step has forwards alone and cannot train: call `evaluate`"
        )
    layouts = [_without_microbatches(each.layout) for each in (own, plan)]
    for each in fields(Layout):
        ours, theirs = (getattr(layout, each.name) for layout in layouts)
        if ours != theirs:
            raise PipelineError(
                f"the plan of this step has other {each.name} than that of the pipeline, and only "
                f"the microbatches and the order may differ: {theirs} in place of {ours}"
            )
    if plan.transport != own.transport:
        raise PipelineError(
            f"the plan of this step is proved for `{plan.transport}`, and that of the pipeline for "
            f"`{own.transport}`: compile both for one transport"
        )
    if plan.message_type != own.message_type:
        theirs, ours = (each.message_type or "no type" for each in (plan, own))
        raise PipelineError(
            f"the plan of this step rounds messages to {theirs}, and that of the pipeline to "
            f"{ours}: write the same `send` in both programs"
        )


def _without_microbatches(layout: Layout) -> Layout:
    pipelines = (evolve(each, microbatches=0) for each in layout.pipelines)
    return evolve(layout, pipelines=tuple(pipelines))
