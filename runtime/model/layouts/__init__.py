"""Layouts as other trainers give them: which blocks of a model are in which stage.

There is a module for each notation. All give the same: of each stage how many blocks it has, in the
order in which the model calls them. A stage may have none.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from schedlang.diagnostics.diagnostic import counted
from schedlang.runtime.arguments import check_list
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.layouts.even_layers import EvenLayers, sizes_by_number
from schedlang.runtime.model.layouts.megatron_letters import (
    letters_of_names,
    sizes_by_letters,
)
from schedlang.runtime.model.layouts.module_names import sizes_by_names
from schedlang.schedule.cuts import Cuts

__all__ = ["EvenLayers", "StageLayout", "check_layout", "cuts_of"]

#: Which blocks are in which stage: names by stage, Megatron-LM's letters or names of layers, or
#: numbers of layers.
StageLayout = Sequence[Sequence[str]] | str | EvenLayers


def check_layout(layout: Any) -> None:
    """TypeError for what is no layout in any notation."""
    what = "names by stage, such as [['embedding'], ['layers', 'head']], letters or EvenLayers"
    if isinstance(layout, str | EvenLayers):
        return
    check_list("layout", layout, Sequence, what)
    for stage, names in enumerate(layout):
        check_list(f"layout[{stage}]", names, str, "the names of the blocks of a stage")


def cuts_of(layout: StageLayout, blocks: Sequence[str], pieces: int) -> Cuts:
    """The first block of each of so many pieces of a model, and the end of the last one.

    PipelineError where the layout is none, not one of these blocks, or of another number of stages.
    """
    if not isinstance(layout, str | EvenLayers):
        layout = letters_of_names(layout, blocks) or layout
    if isinstance(layout, EvenLayers):
        sizes = sizes_by_number(layout, blocks, pieces)
    elif isinstance(layout, str):
        sizes = sizes_by_letters(layout, blocks)
    else:
        sizes = sizes_by_names(layout, blocks)
    if len(sizes) != pieces:
        raise PipelineError(
            f"`layout` has {counted(len(sizes), 'stage')}, the plan cuts the model into {pieces}: "
            "give as many, where one without blocks is empty, or another plan"
        )
    assert sum(sizes) == len(blocks)
    return tuple(accumulate(sizes, initial=0))
