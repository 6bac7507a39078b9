"""A plan as a schedule of torch's, which torch's own runtime runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.pipelining import PipelineStage

from schedlang.compiler import NO_PARAMS
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_params
from schedlang.plan.plan import Plan
from schedlang.plan.torch_tables import plan_of as prove_table
from schedlang.plan.torch_tables import read_table
from schedlang.plan.torch_tables.export import COMPUTE, export_table
from schedlang.python.plans import plan_of
from schedlang.torch.private import TableSchedule, load, table_of
from schedlang.torch.same_stages import check_agreement, check_are_stages


def schedule(
    plan: Plan | Source | str | Path,
    stages: PipelineStage | Sequence[PipelineStage],
    loss_fn: Callable[..., Any] | None = None,
    *,
    params: Mapping[str, int] = NO_PARAMS,
    **options: Any,
) -> Any:
    """A plan in torch's runtime: a schedule of torch's own kind, `_PipelineScheduleRuntime`, so
    that a script's `schedule.step(...)` stays as it is.

    `plan` is a plan, or what `compile` and `read_plan` take: a program, for some `params`, by its
    path or text, or the path of a plan's file. `stages` are this rank's `PipelineStage`s, those
    that the plan gives it (`plan.stages_of(rank)`). `options` are torch's own, such as
    `scale_grads`. Torch runs the order of compute ops as the plan has it, and adds its own
    communication, which is proved as well.

    CompileError for a program that is wrong, for what of a plan torch's tables have no words for,
    and for communication that trains wrong or never ends, as that of `defer_pp_recv` may;
    ValueError where plan and stages have other numbers of ranks or stages, or the stages are
    others; TypeError for a wrong argument; ImportError for a torch whose runtime takes no tables.
    """
    check_params("params", params)
    of_rank = [stages] if isinstance(stages, PipelineStage) else stages
    check_are_stages(of_rank)
    if not isinstance(plan, Plan):
        plan = plan_of(plan, params, name="plan")
    elif params:
        raise ValueError(
            "`params` are those of a program, `plan` is one that was compiled"
        )
    check_agreement(plan, of_rank)
    # Torch reads tables from files alone.
    made = TableSchedule(list(of_rank), plan.microbatches, loss_fn=loss_fn, **options)
    with TemporaryDirectory() as folder:
        table = Path(folder) / f"{plan.name}.csv"
        table.write_text(export_table(plan, COMPUTE), newline="")
        load(made, table)
    # Torch has put in its own transfers by now, which the plan's proof has not seen.
    lowered = Source(f"{plan.name}.csv", table_of(made, with_communication=True))
    prove_table(read_table(lowered))
    return made
