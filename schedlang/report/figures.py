"""The figures of a simulation: for programs, and for people."""

from typing import Any

from schedlang.plan.plan import Plan
from schedlang.proof.capacity import fullness
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.ranks.lifetimes import peak_messages
from schedlang.ranks.weight_versions import follow_weights
from schedlang.report.bubbles.account import Account
from schedlang.report.bubbles.critical_path import path_by_ops
from schedlang.report.text_table import explained
from schedlang.report.views.terminal import draw, joined_ops


def figures(plan: Plan, account: Account) -> dict[str, Any]:
    """The figures of an execution of a plan, by the names that scripts rely on.

    Times are in the unit of the costs. Memory is in stage activations, in the program's own
    amounts, and in bytes if the costs have them.
    """
    execution = account.execution
    timeline = execution.timeline
    document = {
        "schedule": plan.name,
        "params": plan.params,
        "ranks": len(plan.ranks),
        "stages": plan.layout.pieces,
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
        "busy": timeline.busy,
        "copying": timeline.copying,
        "exposed": account.behind.exposed,
        "critical_path": path_by_ops(plan, account.path),
        "versions": list(follow_weights(plan).held),
    }
    if execution.peak_bytes is not None:
        document["peak_bytes"] = list(execution.peak_bytes)
    full = fullness(execution)
    if full is not None:
        document["capacity_bytes"] = execution.costs.capacities(len(full))
        document["full"] = full
    return document


# What some of the figures mean.
_MAKESPAN = "from the first start to the last end, over all ranks"
_SPAN = "idle share of the rank with the longest span,"
_SPAN_GOES_ON = "counted from its own first start to its own last end"
_EXPOSED = "idle time in which ranks wait for what is on its way, all ranks together"


def figures_text(plan: Plan, account: Account, ideal: float) -> str:
    """The picture of the timeline, and the figures with their definitions; `ideal` is the makespan
    of the ideal execution.
    """
    lines = explained(figure_rows(plan, account, ideal))
    wrong = {rank for diagnostic in plan.wrong for rank in diagnostic.ranks}
    timeline = account.execution.timeline
    drawn = draw(timeline, plan.names, wrong=wrong, joined=joined_ops(plan))
    return "\n".join([drawn, "", *lines])


def figure_rows(
    plan: Plan, account: Account, ideal: float
) -> list[tuple[str, str, str]]:
    """The figures for people: of each the name, the value, and what it means. A row without a name
    goes on with the one before.
    """
    execution = account.execution
    timeline = execution.timeline
    document = figures(plan, account)
    rows = [("makespan", _number(timeline.makespan), _MAKESPAN)]
    if _number(timeline.makespan) != _number(ideal):
        # What communication costs: the time in which no rank makes up for it.
        meaning = (
            f"longer on {execution.transport} than the ideal {_number(ideal)}, where no transfer "
            "waits"
        )
        rows.append(("beyond the ideal", _number(timeline.makespan - ideal), meaning))
    # The field has three definitions of a bubble, so all are printed, each with what it means.
    over_ideal = f"{timeline.bubble_over_ideal:.2%}"
    over_makespan = f"{timeline.bubble_over_makespan:.2%}"
    of_span = f"{timeline.bubble_of_span:.2%}"
    rows.append(("bubble over ideal", over_ideal, "idle time / working time"))
    rows.append(("bubble over makespan", over_makespan, "idle time / all time"))
    rows.append(("bubble of span", of_span, _SPAN))
    rows.append(("", "", _SPAN_GOES_ON))
    rows += _memory_rows(execution, document["peak_messages"])
    if any(timeline.copying):
        copying = " ".join(map(_number, timeline.copying))
        where = "another rank" if execution.schedule.layout.keepers else "the host"
        rows.append(("copying", copying, f"per rank, to and from {where}"))
    if execution.peak_bytes is not None:
        peaks = " ".join(f"{peak:,.0f}" for peak in execution.peak_bytes)
        of_messages = ", messages" if execution.costs.boundary_bytes else ""
        meaning = f"per rank, of activations{of_messages} and weights"
        rows.append(("peak bytes", peaks, meaning))
    if "full" in document:
        full = " ".join(f"{part:.1%}" for part in document["full"])
        rows.append(("full", full, "per rank, peak bytes of its capacity"))
    # How much of the chain each kind of op is.
    terms = [
        f"{what} {_number(time)}" for what, time in document["critical_path"].items()
    ]
    path = f"{' + '.join(terms)}: the chain of ops and waits that is the makespan"
    rows.append(("critical path", "", path))
    if document["exposed"]:
        rows.append(("exposed transfers", _number(document["exposed"]), _EXPOSED))
    return rows


def _memory_rows(
    execution: Execution, peak_messages: list[int]
) -> list[tuple[str, str, str]]:
    """What ranks hold at most; the program's own amounts, if it has any."""
    activations = " ".join(map(str, execution.peak_activations))
    messages = " ".join(map(str, peak_messages))
    rows = [
        ("peak activations", activations, "per rank, held until the last use"),
        (
            "peak messages",
            messages,
            "per rank, held until used, or known to be received",
        ),
    ]
    if execution.peak_memory != execution.peak_activations:
        memory = " ".join(map(_number, execution.peak_memory))
        rows.append(("peak memory", memory, "per rank, in the program's amounts"))
    return rows


def _number(value: float) -> str:
    """A number without the noise of the last bits."""
    return f"{value:.10g}"


def lowering_text(plan: Plan) -> str:
    """Which lowering a plan has, what it costs against the ideal, and what the others would, at the
    plan's costs.
    """
    execution = simulate(plan)
    makespan = execution.timeline.makespan
    ideal = simulate(plan, ideal=True).timeline.makespan
    line = (
        f"lowering: {plan.lowering}; makespan {_number(makespan)} on {execution.transport}, "
        f"{_number(ideal)} ideal"
    )
    if ideal:
        line += f" (+{makespan / ideal - 1:.1%})"
    lines = [line]
    # With one trial there was nothing to choose.
    if len(plan.trials) > 1:
        lines.append(f"tried: {', '.join(map(str, plan.trials))}")
    return "\n".join(lines)
