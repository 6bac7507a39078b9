"""Layers shared out by number, as torchtitan does where no names are given: the first and the last
stage, which have more than layers, get so many less.
"""

from collections.abc import Sequence
from math import ceil

from attrs import frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.diagnostics.wrong_arguments import check_whole
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.layouts.layer_blocks import lists_of


@frozen
class EvenLayers:
    """As many layers in each stage, as near as can be: what is before the first layer, such as the
    embedding, counts as `first_stage_less` layers, and what is behind the last one, such as the
    output, as `last_stage_less`.

    Where layers are left over, the first stages have one more. The three numbers are torchtitan's
    `pipeline_parallel_first_stage_less_layers`, `pipeline_parallel_last_stage_less_layers` and
    `pipeline_parallel_layers_per_stage`, of which the last says how many stages there are to be.
    """

    first_stage_less: int = 1
    last_stage_less: int = 1
    layers_per_stage: int | None = None

    def __attrs_post_init__(self) -> None:
        check_whole("first_stage_less", self.first_stage_less, 0)
        check_whole("last_stage_less", self.last_stage_less, 0)
        if self.layers_per_stage is not None:
            check_whole("layers_per_stage", self.layers_per_stage, 1)


def sizes_by_number(
    layout: EvenLayers, blocks: Sequence[str], stages: int
) -> list[int]:
    """How many blocks each of so many stages has; PipelineError where one would have less than
    none, or `layers_per_stage` makes another number of stages.
    """
    lists = lists_of(blocks)
    layers = range(lists[0].start, lists[-1].stop)
    total = len(layers) + layout.first_stage_less + layout.last_stage_less
    shared = f"{counted(len(layers), 'layer')} and {layout.first_stage_less} + "
    shared += str(layout.last_stage_less)
    if layout.layers_per_stage is not None:
        needed = ceil(total / layout.layers_per_stage)
        if needed != stages:
            raise PipelineError(
                f"{shared} make {counted(needed, 'stage')} at {layout.layers_per_stage} for each, "
                f"the plan cuts the model into {stages}: give another `layers_per_stage`, or "
                "another plan"
            )
    if stages == 1:
        return [len(blocks)]
    share, more = divmod(total, stages)
    for name in ("first_stage_less", "last_stage_less"):
        less = getattr(layout, name)
        if less > share:
            raise PipelineError(
                f"`{name}` is {less}, where {shared} are {share} for each of {stages} stages: give "
                f"{share} at most"
            )
    sizes = [share + (stage < more) for stage in range(stages)]
    sizes[0] += layers.start - layout.first_stage_less
    sizes[-1] += len(blocks) - layers.stop - layout.last_stage_less
    return sizes
