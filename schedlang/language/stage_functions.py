"""The functions of all pipelines of a schedule, for claims about it."""

from collections.abc import Sequence

from schedlang.language.codegen import variable
from schedlang.language.stages import (
    NumberedStageOf,
    StageOf,
    numbered_stage_of,
    stage_of,
)
from schedlang.schedule.layout import Pipeline


def stage_functions(
    pipelines: Sequence[Pipeline],
) -> dict[str, StageOf | NumberedStageOf]:
    """The functions that give the stages of all pipelines, by their Python names."""
    named: dict[str, StageOf | NumberedStageOf] = {}
    numbered: dict[str, list[StageOf]] = {}
    for pipeline in pipelines:
        # `lane(0)`, `lane(1)`: pipelines that differ by a number have one function.
        name = variable(pipeline.family)
        stages = stage_of(pipeline.start, pipeline.stop - pipeline.start)
        if pipeline.name == pipeline.family:
            named[name] = stages
        else:
            numbered.setdefault(name, []).append(stages)
    return named | {
        name: numbered_stage_of(functions) for name, functions in numbered.items()
    }
