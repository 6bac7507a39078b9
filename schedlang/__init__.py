"""schedlang: pipeline-parallel training schedules as programs.

    program.sched ─load→ syntax tree ─expand→ schedule ─lower→ schedule with communication ─prove→ plan

`compile` is that line (schedlang/compiler.py). The compiler never imports torch; `schedlang.runtime` runs plans on it.
"""

from schedlang.actions import Actions
from schedlang.compiler import compile
from schedlang.costs import Costs
from schedlang.diagnostics import CompileError, Diagnostic
from schedlang.kinds import Kind
from schedlang.layout import Layout, Pipeline
from schedlang.machine import Execution, prove, simulate
from schedlang.plan import Plan, write_plan
from schedlang.plan_reader import read_plan
from schedlang.schedule import Schedule
from schedlang.source import Source, read_source
from schedlang.timeline import Bar, Timeline

__all__ = [
    "Actions", "Bar", "CompileError", "Costs", "Diagnostic", "Execution", "Kind", "Layout", "Pipeline", "Plan",
    "Schedule", "Source", "Timeline", "compile", "prove", "read_plan", "read_source", "simulate", "write_plan",
]  # fmt: skip
