"""schedlang: pipeline-parallel training schedules as programs.

    program.sched ─load→ syntax tree ─expand→ schedule of ops ─lower→ with transfers ─prove→ plan

`compile` is that line (schedlang/compiler.py). The compiler never imports torch;
`schedlang.runtime` runs plans on it. A name is imported when it is first used (PEP 562), so that a
command pays for what it needs, and `--help` for nothing.
"""

from __future__ import annotations

from importlib import import_module

# As type checkers know it; `typing` itself would be most of what `import schedlang` takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from schedlang.compiler import compile as compile
    from schedlang.diagnostics.diagnostic import CompileError as CompileError
    from schedlang.diagnostics.diagnostic import Diagnostic as Diagnostic
    from schedlang.diagnostics.diagnostic import ParameterError as ParameterError
    from schedlang.diagnostics.source import Source as Source
    from schedlang.extras.noise.noise import Noise as Noise
    from schedlang.extras.noise.runs import Delays as Delays
    from schedlang.extras.noise.runs import Runs as Runs
    from schedlang.extras.noise.scripts import simulate_runs as simulate_runs
    from schedlang.extras.plots.plot_scripts import Plot as Plot
    from schedlang.extras.plots.plot_scripts import plot as plot
    from schedlang.extras.prove.pieces.prover import prove_for_all as prove_for_all
    from schedlang.extras.prove.result import Law as Law
    from schedlang.extras.prove.result import Proof as Proof
    from schedlang.extras.prove.result import Verdict as Verdict
    from schedlang.files.reading import read_source as read_source
    from schedlang.plan.plan import Plan as Plan
    from schedlang.plan.proved_again import read_plan as read_plan
    from schedlang.plan.reader import open_plan as open_plan
    from schedlang.plan.write import write_plan as write_plan
    from schedlang.proof.execution import Execution as Execution
    from schedlang.proof.prove import prove as prove
    from schedlang.python.builder import Builder as Builder
    from schedlang.python.notebook import View as View
    from schedlang.python.notebook import view as view
    from schedlang.python.simulation import simulate as simulate
    from schedlang.python.sweep import load as load
    from schedlang.python.sweep import sweep as sweep
    from schedlang.report.views import write_view as write_view
    from schedlang.schedule.actions import Actions as Actions
    from schedlang.schedule.costs import Costs as Costs
    from schedlang.schedule.costs import read_costs as read_costs
    from schedlang.schedule.kinds import Kind as Kind
    from schedlang.schedule.layout import Layout as Layout
    from schedlang.schedule.layout import Pipeline as Pipeline
    from schedlang.schedule.schedule import Schedule as Schedule
    from schedlang.schedule.timeline import Bar as Bar
    from schedlang.schedule.timeline import Timeline as Timeline

_MODULES = {
    "Actions": "schedule.actions",
    "Bar": "schedule.timeline",
    "Builder": "python.builder",
    "CompileError": "diagnostics.diagnostic",
    "Costs": "schedule.costs",
    "Delays": "extras.noise.runs",
    "Diagnostic": "diagnostics.diagnostic",
    "Execution": "proof.execution",
    "Kind": "schedule.kinds",
    "Law": "extras.prove.result",
    "Layout": "schedule.layout",
    "Noise": "extras.noise.noise",
    "ParameterError": "diagnostics.diagnostic",
    "Pipeline": "schedule.layout",
    "Plan": "plan.plan",
    "Plot": "extras.plots.plot_scripts",
    "Proof": "extras.prove.result",
    "Runs": "extras.noise.runs",
    "Schedule": "schedule.schedule",
    "Source": "diagnostics.source",
    "Timeline": "schedule.timeline",
    "Verdict": "extras.prove.result",
    "View": "python.notebook",
    "compile": "compiler",
    "load": "python.sweep",
    "open_plan": "plan.reader",
    "plot": "extras.plots.plot_scripts",
    "prove": "proof.prove",
    "prove_for_all": "extras.prove.pieces.prover",
    "read_costs": "schedule.costs",
    "read_plan": "plan.proved_again",
    "read_source": "files.reading",
    "simulate": "python.simulation",
    "simulate_runs": "extras.noise.scripts",
    "sweep": "python.sweep",
    "view": "python.notebook",
    "write_plan": "plan.write",
    "write_view": "report.views",
}

__all__ = list(_MODULES)


def __dir__() -> list[str]:
    """The public names, also before they are imported."""
    return __all__


def __getattr__(name: str) -> Any:
    """A public name, from its module; or `__version__`, that of the installed package."""
    if name == "__version__":
        # Reading it takes as long as all else that `schedc --help` does.
        return import_module("importlib.metadata").version("schedlang")
    if name not in _MODULES:
        close = import_module("difflib").get_close_matches(name, __all__, n=1)
        there_is = f", there is `{close[0]}`" if close else ""
        raise AttributeError(f"module `schedlang` has no `{name}`{there_is}", name=name)
    # Whoever has a plan has it by one of these names: so a notebook can draw it.
    import_module("schedlang.schedule.notebook_views").draw_with(_html)
    # And whoever shows an error sees the repair that `schedc` proposes.
    import_module("schedlang.diagnostics.diagnostic").advise_with(_advise)
    # And a plan has its program compiled once more.
    import_module("schedlang.plan.compiled_again").compile_with(_compile)
    return getattr(import_module(f"schedlang.{_MODULES[name]}"), name)


def _compile(*given: Any) -> Any:
    """The plan of `compile`, also where claims do not hold; the compiler is imported here."""
    compiler = import_module("schedlang.compiler")
    try:
        return compiler.compile(*given)
    except compiler.ClaimError as error:
        return error.plan


def _html(shown: Any) -> Any:
    """What a notebook shows of a plan or an execution; what draws is imported when it draws."""
    return import_module("schedlang.python.notebook").html(shown)


def _advise(error: Any) -> None:
    """Add advice to what is wrong with a program."""
    import_module("schedlang.advice.advice").add_advice(error)


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the magic `%%sched`: `%load_ext schedlang` calls it."""
    import_module("schedlang.python.notebook").register(shell)
