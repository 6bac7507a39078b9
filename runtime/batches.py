"""The batch of a step, cut into microbatches for the stages of a rank, and what comes back."""

from collections.abc import Mapping, Sequence
from itertools import count, islice
from typing import Any

from attrs import frozen

from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.stage.stage import Stage
from schedlang.runtime.transport.exchange import Given
from schedlang.runtime.values import Value, ValueSpec, cut, flatten
from schedlang.schedule.layout import Layout

#: Keyword arguments of modules, by microbatch.
Options = Sequence[Mapping[str, Any]]


@frozen(eq=False)
class Batch:
    """What a step is given: see `Pipeline.step`, and if it `evaluates`, `Pipeline.evaluate`."""

    inputs: Value
    targets: Value
    options: Options | None
    evaluates: bool


class Batches:
    """Gives the batch of a step to the stages of one rank, and takes what they make of it;
    PipelineError for what does not fit the plan.
    """

    def __init__(self, plan: Plan, stages: Mapping[int, Stage]) -> None:
        self._plan = plan
        self._stages = stages
        layout = plan.layout
        #: The ops whose outputs a step gives.
        self._last = [
            (number, microbatch)
            for number in stages
            if layout.is_last(number)
            for microbatch in range(layout.units(number))
        ]
        # Of each update the microbatches of the first pipeline come first, as in the batch.
        self._last.sort(key=lambda op: layout.update_of(*op))
        #: The rows of a microbatch's targets in this step, by the first stage of their pipeline.
        self._targets: dict[int, int] = {}

    def load(self, batch: Batch) -> dict[int, Given]:
        """Give this rank's stages their part of a batch. Gives what the first stages here have got,
        by their numbers.
        """
        given: dict[int, Given] = {}
        self._targets = {}
        for pipeline, mine in zip(
            self._plan.layout.pipelines, shares(self._plan.layout), strict=True
        ):
            first = self._stages.get(pipeline.start)
            last = self._stages.get(pipeline.stop - 1)
            if first is not None:
                parts = self._cut("inputs", batch.inputs, mine)
                first.inputs.update(enumerate(parts))
                spec = ValueSpec.of(*flatten(parts[0], "`inputs`"))
                given[pipeline.start] = Given(batch.evaluates, spec)
            if last is not None:
                has_targets = not batch.evaluates or batch.targets is not None
                parts = self._cut("targets", batch.targets, mine) if has_targets else []
                last.targets = dict(enumerate(parts))
                if parts:
                    self._targets[pipeline.start] = len(flatten(parts[0], "`targets`")[0][0])
            for number in range(pipeline.start, pipeline.stop):
                if number in self._stages:
                    self._stages[number].options = self._options(batch.options, mine)
        return given

    def check_rows(self, inputs: Mapping[int, int]) -> None:
        """Compare the rows of a microbatch's targets with those of its inputs, by first stage;
        PipelineError where they differ, for a loss might well broadcast them.
        """
        for first, targets in self._targets.items():
            if inputs[first] != targets:
                count = self._plan.microbatches
                raise PipelineError(
                    f"`inputs` have {inputs[first] * count} rows, and `targets` have "
                    f"{targets * count}: both must have a row for every example of the batch"
                )

    def outputs(self) -> list[Value]:
        """What the last stages on this rank have made, by microbatch, or slice of one."""
        return [self._stages[number].outputs.pop(microbatch) for number, microbatch in self._last]

    def _cut(self, name: str, batch: Value, mine: Sequence[int]) -> list[Value]:
        """Some microbatches of a batch, or their slices."""
        parts = cut(name, batch, self._plan.microbatches)
        slices = self._plan.layout.slices
        parts = [parts[number] for number in mine]
        if slices == 1:
            return parts
        return [each for part in parts for each in cut(name, part, slices, "slices", dimension=1)]

    def _options(
        self, options: Options | None, mine: Sequence[int]
    ) -> dict[int, Mapping[str, Any]]:
        if options is not None and len(options) != self._plan.microbatches:
            raise PipelineError(
                f"`options` are {len(options)}, the plan has {self._plan.microbatches} microbatches"
            )
        if not options:
            return {}
        slices = self._plan.layout.slices
        return {
            number * slices + slice: options[microbatch]
            for number, microbatch in enumerate(mine)
            for slice in range(slices)
        }


def shares(layout: Layout) -> list[list[int]]:
    """For each pipeline the numbers of its microbatches in the batch of a step: of each update, the
    first pipeline has the first ones.
    """
    found: list[list[int]] = [[] for _ in layout.pipelines]
    numbers = count()
    for _ in range(layout.updates):
        for mine, pipeline in zip(found, layout.pipelines, strict=True):
            mine += islice(numbers, pipeline.microbatches // layout.updates)
    return found
