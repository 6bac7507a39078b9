"""The plan of the command: from a plan file, which each process reads, or from a program, which
rank 0 compiles.
"""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from schedlang.advice.compiling import compile_with_advice
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.examples.demo.collective import share, together
from schedlang.files.reading import read_source
from schedlang.plan.plan import Plan
from schedlang.plan.proved_again import read_plan
from schedlang.plan.reader import open_plan
from schedlang.runtime.checks import wrong_number
from schedlang.runtime.errors import PipelineError
from schedlang.schedule.costs import UNIT, Costs


def share_plan(
    path: Path,
    params: Mapping[str, int],
    costs: Costs,
    replicas: int,
    group: dist.ProcessGroup,
) -> Plan:
    """The plan in a file; or if the file is a program, its plan for some costs and as many ranks as
    were started, divided among some replicas.

    If something is wrong with it, all processes end.
    """
    is_first = dist.get_rank() == 0
    # Rank 0 proves the plan. The others only open it: the pipeline compares that all have the same.
    read = read_plan if is_first else open_plan
    # Compiled once: it may take a second, and all must run the same plan.
    of_program = share(
        together(
            lambda: _of_program(path, params, costs, replicas) if is_first else None,
            group,
        ),
        group,
    )
    return together(lambda: _fitting(of_program or read(path), path, replicas), group)


def _of_program(
    path: Path, params: Mapping[str, int], costs: Costs, replicas: int
) -> Plan | None:
    """The plan of a program for the processes that were started; None if the file is a plan."""
    source = read_source(path)
    if source.is_plan and params:
        raise PipelineError(f"-p sets parameters of a program, `{path}` is a plan")
    if source.is_plan and costs != UNIT:
        raise PipelineError(
            f"costs decide about the order of a program, `{path}` is a plan"
        )
    if source.is_plan:
        return None
    if "ranks" in params:
        raise PipelineError(
            "`ranks` is how many processes are started: leave out `-p ranks`"
        )
    ranks, left = divmod(dist.get_world_size(), replicas)
    if left or not ranks:
        raise PipelineError(
            f"{replicas} replicas need a multiple of {replicas} processes, not "
            f"{dist.get_world_size()}"
        )
    try:
        return compile_with_advice(source, {"ranks": ranks, **params}, costs)
    except CompileError:
        raise
    except ValueError as error:
        # Costs of another number of stages.
        raise PipelineError(str(error)) from None


def _fitting(plan: Plan, path: Path, replicas: int) -> Plan:
    """The plan, if these processes can train with so many replicas of it."""
    started = dist.get_world_size()
    ranks = len(plan.ranks)
    wrong = wrong_number(plan, started, replicas)
    if wrong is not None:
        option = f" --replicas {replicas}" if replicas > 1 else ""
        launch = f"torchrun --nproc-per-node {ranks * replicas}"
        wrong += f": {launch} -m schedlang.runtime {path}{option}"
        wrong += f", or --replicas {started // ranks}" if started % ranks == 0 else ""
    if wrong is not None:
        raise PipelineError(wrong)
    return plan
