"""Names of modules by stage, as torchtitan's `module_fqns_per_model_part`."""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise

from schedlang.runtime.errors import PipelineError


def sizes_by_names(layout: Sequence[Sequence[str]], blocks: Sequence[str]) -> list[int]:
    """How many blocks each stage has, by their names in any order; that of a list of modules stands
    for all in it.

    PipelineError for a name that no block has, for a block that no stage has, or two have, and for
    stages that do not follow the order of the blocks.
    """
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(layout):
        for name in names:
            for block in _blocks_named(name, stage, blocks):
                if block in stage_of:
                    raise PipelineError(
                        f"`layout` has `{block}` twice, in stage {stage_of[block]} and in stage "
                        f"{stage}: a block is in one stage"
                    )
                stage_of[block] = stage
    missing = [block for block in blocks if block not in stage_of]
    if missing:
        raise PipelineError(
            f"`layout` has no `{missing[0]}`, one of the blocks of the model: name it in a stage"
        )
    for before, after in pairwise(blocks):
        if stage_of[before] > stage_of[after]:
            raise PipelineError(
                f"`layout` has `{before}` in stage {stage_of[before]} and `{after}` in stage "
                f"{stage_of[after]}, and the model calls `{before}` first: stages have blocks in "
                "the order of the model"
            )
    sizes = [0] * len(layout)
    for stage in stage_of.values():
        sizes[stage] += 1
    return sizes


def _blocks_named(name: str, stage: int, blocks: Sequence[str]) -> list[str]:
    """The block of a name, or those of a list of modules."""
    if name in blocks:
        return [name]
    of_list = [block for block in blocks if block.startswith(f"{name}.")]
    if of_list:
        return of_list
    close = get_close_matches(name, blocks, n=1)
    way_out = f"did you mean `{close[0]}`?" if close else f"they are {_listed(blocks)}"
    raise PipelineError(
        f"`layout` has `{name}` in stage {stage}, which is no block: {way_out}"
    )


def _listed(blocks: Sequence[str]) -> str:
    names = [f"`{block}`" for block in blocks]
    return ", ".join(names if len(names) < 6 else [*names[:3], "…", *names[-2:]])
