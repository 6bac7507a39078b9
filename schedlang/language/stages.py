"""The functions by which a program names the stages of its pipelines: `down(s)`, `lane(i, s)`."""

from collections.abc import Callable, Sequence

from schedlang.language.faults import Fault

# A program may ask for the stage of each of a million ops, and Python calls a function in half the
# time that it takes for an object.

#: The number in the schedule of a stage of a pipeline, by its number there; or of one of several
#: pipelines, by the number of that and of the stage.
StageOf = Callable[[int], int]
NumberedStageOf = Callable[[int, int], int]


def stage_of(first: int, count: int) -> StageOf:
    """The function that gives the stages of a pipeline whose first stage is `first`."""

    def number_of(stage: int) -> int:
        # Past the pipeline's own stages there are none, not those of the next pipeline.
        return first + stage if 0 <= stage < count else -1

    return number_of


def numbered_stage_of(pipelines: Sequence[StageOf]) -> NumberedStageOf:
    """The function that gives the stages of several pipelines that differ by a number."""
    count = len(pipelines)

    def number_of(number: int, stage: int) -> int:
        # Past the last pipeline there are no stages.
        return pipelines[number](stage) if 0 <= number < count else -1

    return number_of


def stage_range(start: int, stop: int, count: int, location: int) -> range:
    """A range of stages; a fault if it goes beyond the last one."""
    if not 0 <= start <= stop <= count:
        message = f"the stages {start} .. {stop}, there are stages 0 .. {count}"
        raise Fault("no-such-stage", message, location)
    return range(start, stop)
