"""The parts of torch's pipelining that torch calls private, and why they are needed.

Torch has no public way to run a table of actions, nor to ask a schedule what it was made of. Each
part is looked up where it is read, so a version of torch without one is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch.distributed.pipelining import PipelineStage, schedules


def _part(owner: object, name: str) -> Any:
    """A private part; ImportError where this version of torch does not have it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ImportError(
            f"schedlang.torch needs `{name}`, a private part of torch.distributed.pipelining that "
            f"torch {torch.__version__} does not have"
        ) from None


#: What all schedules of torch's are.
AnySchedule: type = _part(schedules, "_PipelineSchedule")

#: Torch's interpreter of tables; its schedules with several stages for each rank are of this class.
TableSchedule: type = _part(schedules, "_PipelineScheduleRuntime")

for _name in ("_load_csv", "register_custom_function"):
    _part(TableSchedule, _name)


@frozen(eq=False)
class Given:
    """What a schedule of torch's was made of."""

    stages: Sequence[PipelineStage]
    microbatches: int
    loss_fn: Callable[..., Any] | None
    #: Whether gradients are those of the mean of the microbatches' losses, and not of their sum.
    scales_gradients: bool
    #: How arguments are cut into microbatches, and outputs put together again.
    args_chunks: Any
    kwargs_chunks: Any
    output_chunks: Any


def given(schedule: Any) -> Given:
    """What a schedule was made of."""
    stages = (
        schedule._stages
        if hasattr(schedule, "_stages")
        else [_part(schedule, "_stage")]
    )
    return Given(
        tuple(stages),
        _part(schedule, "_n_microbatches"),
        _part(schedule, "_loss_fn"),
        _part(schedule, "scale_grads"),
        _part(schedule, "_args_chunk_spec"),
        _part(schedule, "_kwargs_chunk_spec"),
        _part(schedule, "_output_merge_spec"),
    )


def load(schedule: Any, table: Path) -> None:
    """Give a `TableSchedule` its table, of compute ops only; torch adds the communication."""
    schedule._load_csv(str(table))


def table_of(schedule: Any, with_communication: bool = False) -> str:
    """The table of a `TableSchedule` as text: its compute ops, or all that torch runs; empty if
    none was loaded. One that was loaded with communication is given whole.
    """
    order: Mapping[int, Sequence[Any]] = _part(schedule, "pipeline_order")
    if with_communication or not order:
        order = getattr(schedule, "pipeline_order_with_comms", {})
    rows = ([str(action or "") for action in order[rank]] for rank in sorted(order))
    return "\n".join(",".join(row) for row in rows)


def own_functions(schedule: Any, stages: Sequence[PipelineStage]) -> list[str]:
    """What a script has given functions of its own for: kinds of action, and moments of stages."""
    found = [kind.value for kind in getattr(schedule, "_comp_type_to_function_map", ())]
    for stage in stages:
        # Torch 2.13 has none.
        if getattr(stage, "_forward_contexts", None):
            found.append(f"F of stage {stage.stage_index} (a forward context)")
    return found
