"""What a simulation says: the figures for machines, and for people."""

from typing import Any

from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.ranks.lifetimes import peak_messages
from schedlang.ranks.weights import follow_weights
from schedlang.report.bubbles.critical_path import critical_path, path_by_ops
from schedlang.report.bubbles.exposed import exposed
from schedlang.report.bubbles.waits import waits
from schedlang.report.views.terminal import draw
from schedlang.schedule.costs import UNIT, Costs


def figures(plan: Plan, execution: Execution, costs: Costs = UNIT) -> dict[str, Any]:
    """The figures of an execution with some costs under their stable names.

    Times are in the unit of the costs, memory in stage activations, in the program's amounts, and
    if given in bytes.
    """
    timeline = execution.timeline
    found = waits(plan, timeline, costs)
    bytes = {} if execution.peak_bytes is None else {"peak_bytes": list(execution.peak_bytes)}
    return {
        "schedule": plan.name,
        "params": plan.params,
        "ranks": len(plan.ranks),
        "stages": plan.layout.pipelines[0].stop,
        "microbatches": plan.microbatches,
        "actions": sum(map(len, plan.ranks)),
        "transport": execution.transport,
        "makespan": timeline.makespan,
        "bubble": {
            "over_ideal": timeline.bubble_over_ideal,
            "over_makespan": timeline.bubble_over_makespan,
            "span": timeline.bubble_of_span,
        },
        "span": timeline.span,
        "spans": timeline.spans,
        "peak_activations": list(execution.peak_activations),
        "peak_messages": peak_messages(plan),
        "peak_memory": list(execution.peak_memory),
        **bytes,
        "busy": timeline.busy,
        "copying": timeline.copying,
        "exposed": exposed(found),
        "critical_path": path_by_ops(plan, critical_path(found)),
        "versions": list(follow_weights(plan).held),
    }


def figures_text(plan: Plan, execution: Execution, ideal: float, costs: Costs = UNIT) -> str:
    """The figures with their definitions, and the picture of the timeline; `ideal` is the ideal
    makespan.
    """
    timeline = execution.timeline
    found = figures(plan, execution, costs)
    rows = [
        (
            "makespan",
            f"{timeline.makespan:.10g}",
            "from the first start to the last end, over all ranks",
        ),
        ("bubble over ideal", f"{timeline.bubble_over_ideal:.2%}", "idle time / working time"),
        ("bubble over makespan", f"{timeline.bubble_over_makespan:.2%}", "idle time / all time"),
        (
            "bubble of span",
            f"{timeline.bubble_of_span:.2%}",
            "idle share of the rank with the longest span,",
        ),
        ("", "", "counted from its own first start to its own last end"),
        (
            "peak activations",
            " ".join(map(str, execution.peak_activations)),
            "per rank, held until the last use",
        ),
        (
            "peak messages",
            " ".join(map(str, found["peak_messages"])),
            "per rank, held until used, or known to be received",
        ),
    ]
    if execution.peak_memory != execution.peak_activations:
        peaks = " ".join(f"{peak:.10g}" for peak in execution.peak_memory)
        rows.append(("peak memory", peaks, "per rank, in the program's amounts"))
    if any(timeline.copying):
        rows.append(
            (
                "copying",
                " ".join(f"{each:.10g}" for each in timeline.copying),
                "per rank, to and from the host",
            )
        )
    if f"{timeline.makespan:.10g}" != f"{ideal:.10g}":
        rows.insert(1, _exposed(execution, ideal))
    if execution.peak_bytes is not None:
        peaks = " ".join(f"{peak:,.0f}" for peak in execution.peak_bytes)
        rows.append(("peak bytes", peaks, "per rank, of activations and weights"))
    path = " + ".join(f"{what} {time:.10g}" for what, time in found["critical_path"].items())
    rows.append(("critical path", "", f"{path}: the chain of ops and waits that is the makespan"))
    if found["exposed"]:
        meaning = "idle time in which ranks wait for what is on its way, all ranks together"
        rows.append(("exposed transfers", f"{found['exposed']:.10g}", meaning))
    width = max(len(value) for _, value, _ in rows)
    lines = [f"{name:<22}{value:<{width}}  {meaning}" for name, value, meaning in rows]
    return "\n".join([draw(timeline), "", *lines])


def _exposed(execution: Execution, ideal: float) -> tuple[str, str, str]:
    """What communication costs: time in which no rank makes up for it."""
    exposed = execution.timeline.makespan - ideal
    meaning = (
        f"longer on {execution.transport} than the ideal {ideal:.10g}, where no transfer waits"
    )
    return "beyond the ideal", f"{exposed:.10g}", meaning


def lowering_text(plan: Plan) -> str:
    """Which lowering a plan has, what it costs against the ideal at the plan's costs, and what
    others would.
    """
    execution = simulate(plan)
    ideal = simulate(plan, ideal=True).timeline.makespan
    makespan = execution.timeline.makespan
    over = f" (+{makespan / ideal - 1:.1%})" if ideal else ""
    lines = [
        f"lowering: {plan.lowering}; makespan {makespan:.10g} on {execution.transport}, "
        f"{ideal:.10g} ideal{over}"
    ]
    if len(plan.trials) > 1:
        lines.append(f"tried: {', '.join(map(str, plan.trials))}")
    return "\n".join(lines)
