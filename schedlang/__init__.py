"""schedlang: pipeline-parallel training schedules as programs.

    program.sched ─load→ syntax tree ─expand→ schedule ─lower→ schedule with communication ─prove→ plan

`compile` below is that line. The compiler never imports torch; `schedlang.runtime` runs plans on it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import asdict, evolve

from schedlang import passes
from schedlang.actions import Actions
from schedlang.claims import check_claims
from schedlang.costs import UNIT, Costs
from schedlang.diagnostics import CompileError, Diagnostic
from schedlang.expand import expand
from schedlang.imports import load
from schedlang.kinds import Kind
from schedlang.layout import Layout, Pipeline
from schedlang.lowering import lower
from schedlang.machine import Execution, prove, simulate
from schedlang.plan import Plan, write_plan
from schedlang.plan_reader import read_plan
from schedlang.schedule import Kernel, Schedule
from schedlang.source import Source, read_source
from schedlang.stream import lower_stream, unroll
from schedlang.structure import check_structure
from schedlang.timeline import Bar, Timeline

__all__ = [
    "Actions", "Bar", "CompileError", "Costs", "Diagnostic", "Execution", "Kind", "Layout", "Pipeline", "Plan",
    "Schedule", "Source", "Timeline", "compile", "prove", "read_plan", "read_source", "simulate", "write_plan",
]  # fmt: skip


def compile(
    source: Source,
    params: Mapping[str, int] = MappingProxyType({}),
    costs: Costs = UNIT,
    forward_only: bool = False,
) -> Plan:
    """The plan of a program for some parameters, proved; CompileError with everything that is wrong with it.

    Its passes choose the order that is best for its own costs, or where they are given, for `costs`; ValueError if
    these are not for its number of stages. What it claims of time or memory, it claims at its own costs only.
    `forward_only` makes it the inference plan of a training program, without the claims, which speak of training.
    """
    schedule = expand(*load(source), params, costs)
    if schedule.stream and forward_only:
        schedule = unroll(schedule, 1)
    check_structure(unroll(schedule, 2) if schedule.stream else schedule)
    if forward_only:
        schedule = evolve(passes.forward_only(schedule), claims=())
    kernels: tuple[Kernel, ...] = ()
    if schedule.stream:
        schedule, kernels = lower_stream(schedule)
    else:
        schedule = lower(schedule)
    check_claims(schedule, prove(schedule), costs)
    return Plan(**asdict(evolve(schedule, claims=()), recurse=False), kernels=kernels)
