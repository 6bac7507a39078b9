"""The functions by which a program names the stages of its pipelines: `down(s)`, `lane(i, s)`."""

from collections.abc import Sequence

from attrs import frozen

from schedlang.language.codegen import variable
from schedlang.language.faults import Fault
from schedlang.schedule.layout import Pipeline


@frozen
class Stages:
    """The stages of a pipeline by their numbers in it: their numbers in the schedule."""

    first: int
    count: int

    def __call__(self, stage: int) -> int:
        """The number of a stage of this pipeline in the schedule."""
        # Past the pipeline's own stages there are none, not those of the next pipeline.
        return self.first + stage if 0 <= stage < self.count else -1


@frozen
class NumberedStages:
    """The stages of pipelines that differ by a number."""

    pipelines: tuple[Stages, ...]

    def __call__(self, number: int, stage: int) -> int:
        """The number of a stage of one of the pipelines in the schedule."""
        # Past the last pipeline there are no stages.
        return (
            self.pipelines[number](stage) if 0 <= number < len(self.pipelines) else -1
        )


def stage_functions(
    pipelines: Sequence[Pipeline],
) -> dict[str, Stages | NumberedStages]:
    """The functions that give the stages of pipelines, by their names in the program's Python."""
    named: dict[str, Stages | NumberedStages] = {}
    numbered: dict[str, list[Stages]] = {}
    for pipeline in pipelines:
        # `lane(0)`, `lane(1)`: pipelines that differ by a number have one function.
        name, _, number = pipeline.name.partition("(")
        stages = Stages(pipeline.start, pipeline.stop - pipeline.start)
        if number:
            numbered.setdefault(variable(name), []).append(stages)
        else:
            named[variable(name)] = stages
    return named | {
        name: NumberedStages(tuple(stages)) for name, stages in numbered.items()
    }


def stage_range(start: int, stop: int, count: int, location: int) -> range:
    """A range of stages, of which there are so many."""
    if not 0 <= start <= stop <= count:
        message = f"the stages {start} .. {stop}, there are stages 0 .. {count}"
        raise Fault("no-such-stage", message, location)
    return range(start, stop)
