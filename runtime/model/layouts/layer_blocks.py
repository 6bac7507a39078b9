"""Which blocks of a model are its layers: those with numbers for names, as in a list of modules."""

from collections.abc import Sequence
from itertools import groupby

from schedlang.runtime.errors import PipelineError


def lists_of(blocks: Sequence[str]) -> list[range]:
    """The places of layers among the blocks: a range for each list of modules, one or more.

    `layers.0`, `layers.1`, … are of one list. PipelineError where no block is of one.
    """
    lists = []
    for is_layer, places in groupby(
        range(len(blocks)), lambda place: _list_of(blocks[place])
    ):
        if is_layer is not None:
            of_list = list(places)
            lists.append(range(of_list[0], of_list[-1] + 1))
    if not lists:
        raise PipelineError(
            "`layout` counts layers, and `blocks` has none: layers are modules of a list, such as "
            "`model.layers`, or with numbers for names; or give the names of the blocks by stage"
        )
    return lists


def _list_of(block: str) -> str | None:
    """The name of the list that a block is of, if it is of one."""
    parent, _, name = block.rpartition(".")
    return parent if name.isdecimal() else None
