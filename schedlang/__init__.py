"""schedlang: pipeline-parallel training schedules as programs.

    program.sched ─load→ syntax tree ─expand→ schedule ─lower→ schedule with communication ─prove→ plan

`compile` is that line (schedlang/compiler.py). The compiler never imports torch; `schedlang.runtime` runs plans on it.
A name is imported when it is first used (PEP 562), so that a command pays for what it needs, and `--help` for nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.actions import Actions as Actions
    from schedlang.compiler import compile as compile
    from schedlang.costs import Costs as Costs
    from schedlang.diagnostics import CompileError as CompileError
    from schedlang.diagnostics import Diagnostic as Diagnostic
    from schedlang.execution import Execution as Execution
    from schedlang.kinds import Kind as Kind
    from schedlang.layout import Layout as Layout
    from schedlang.layout import Pipeline as Pipeline
    from schedlang.machine import prove as prove
    from schedlang.machine import simulate as simulate
    from schedlang.plan import Plan as Plan
    from schedlang.plan import write_plan as write_plan
    from schedlang.plan_reader import open_plan as open_plan
    from schedlang.plan_reader import read_plan as read_plan
    from schedlang.schedule import Schedule as Schedule
    from schedlang.source import Source as Source
    from schedlang.source import read_source as read_source
    from schedlang.timeline import Bar as Bar
    from schedlang.timeline import Timeline as Timeline

_MODULES = {
    "Actions": "actions", "Bar": "timeline", "CompileError": "diagnostics", "Costs": "costs",
    "Diagnostic": "diagnostics", "Execution": "execution", "Kind": "kinds", "Layout": "layout", "Pipeline": "layout",
    "Plan": "plan", "Schedule": "schedule", "Source": "source", "Timeline": "timeline", "compile": "compiler",
    "open_plan": "plan_reader", "prove": "machine", "read_plan": "plan_reader", "read_source": "source",
    "simulate": "machine", "write_plan": "plan",
}  # fmt: skip

__all__ = list(_MODULES)


def __dir__() -> list[str]:
    """The public names, also before they are imported."""
    return __all__


def __getattr__(name: str) -> Any:
    """A public name, from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module `schedlang` has no `{name}`")
    return getattr(import_module(f"schedlang.{_MODULES[name]}"), name)
