"""Dictionaries of inputs and targets: of several models, and of a model with several first stages.
Each stage takes its entry.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.values import Value
from schedlang.schedule.layout import Layout, Pipeline


def values_of_model(name: str, values: Any, layout: Layout, pipeline: Pipeline) -> Any:
    """The entry of the model of a pipeline in inputs, targets or options; None if it has none."""
    models = [each.name for each in layout.pipelines]
    if isinstance(values, Mapping) and values.keys() <= set(models):
        return values.get(pipeline.name)
    raise PipelineError(
        f"the plan has the models {', '.join(models)}, so `{name}` must be a dictionary with "
        f"those of each, by name; it {_look_of(values)}"
    )


def inputs_of_stage(
    inputs: Value, first: int, firsts: Sequence[int], layout: Layout
) -> Value:
    """The entry of a first stage in the inputs of its model, which has the first stages `firsts`,
    by their numbers in the model.
    """
    pipeline = layout.pipeline_of[first]
    stage = first - pipeline.start
    if isinstance(inputs, Mapping) and stage in inputs and inputs.keys() <= set(firsts):
        return inputs[stage]
    of_model = f" of the model `{pipeline.name}`" if layout.models else ""
    raise PipelineError(
        f"the stages {firsts}{of_model} take inputs, so `inputs` must be a dictionary with "
        f"those of each that is on this rank, by these numbers; it {_look_of(inputs)}, and "
        f"{called(layout, first)} is here"
    )


def _look_of(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"has {[*values]}"
    return f"is a {type(values).__name__}"


def called(layout: Layout, stage: int) -> str:
    """The name of a stage in messages: its number in its pipeline, and its model."""
    pipeline = layout.pipeline_of[stage]
    of_model = f" of the model `{pipeline.name}`" if layout.models else ""
    return f"stage {stage - pipeline.start}{of_model}"


def beside_others(layout: Layout, first: int) -> str:
    """For messages about several models: which other values a first stage takes after its inputs,
    and how to give the inputs.
    """
    if not layout.models:
        return ""
    others = " and ".join(called(layout, other) for other in layout.before[first])
    behind = f", before what {others} makes" if others else ""
    return f"{behind}: give `inputs={{'{layout.model_of(first)}': …}}`"
