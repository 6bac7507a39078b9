"""What a program claims of its schedule with `assert`, held against the figures of an execution."""

from collections.abc import Sequence
from functools import partial

from schedlang.codegen import variable
from schedlang.costs import UNIT, Costs
from schedlang.diagnostics import CompileError
from schedlang.execution import Execution
from schedlang.faults import Fault
from schedlang.findings import Finding, diagnose
from schedlang.schedule import Schedule
from schedlang.versions import follow_weights

_TIMES = frozenset(["makespan", "work", "bubble", "span", "span_bubble"])
_AMOUNTS = frozenset(["peak"])


def check_claims(schedule: Schedule, execution: Execution, given: Costs = UNIT) -> None:
    """CompileError for every claim that does not hold, with the figures it is about.

    A program's claims are about its own costs: where a user has `given` others, those that these enter are not checked.

    `peak(r)` is the peak of rank r in the program's amounts of memory, by default stage activations, `peak()` the
    highest of all ranks; `makespan` goes from the first start to the last end, `work` is what the busiest rank works,
    `bubble` = makespan - work is the idle time of a synchronous flush; `span` is the longest time from a rank's own
    first start to its own last end, and `span_bubble` = span - work. `versions(r)` is the most versions of a stage's
    weights that rank r holds, `staleness` the most updates by which any are behind.
    """
    figures, per_rank = _figures(schedule, execution)
    texts = [f"{name} {value:.10g}" for name, value in figures.items()]
    texts += [f"{name} per rank {' '.join(f'{each:.10g}' for each in values)}" for name, values in per_rank.items()]
    others = (_TIMES if given.gives_times else frozenset()) | (_AMOUNTS if given.gives_memory else frozenset())
    findings: dict[int, Finding] = {}
    for claim in schedule.claims:
        if claim.names & others:
            continue
        claim.scope.update((variable(name), value) for name, value in figures.items())
        claim.scope.update((variable(name), partial(_of_rank, name, values)) for name, values in per_rank.items())
        try:
            if claim.holds():
                continue
            message = f"the schedule claims: {claim.reason}" if claim.reason else "a claim does not hold"
            finding = Finding("assert", message, 0, claim.place, help=f"the figures are {', '.join(texts)}")
        except Fault as fault:
            finding = Finding(fault.code, fault.message, 0, claim.place, help=fault.help)
        # A claim in a rank block is made once per rank, and told once.
        findings.setdefault(claim.place, finding)
    if findings:
        raise CompileError(diagnose(schedule, list(findings.values())))


def _figures(schedule: Schedule, execution: Execution) -> tuple[dict[str, float], dict[str, Sequence[float]]]:
    """The figures of the schedule, and those of its ranks."""
    timeline, versions = execution.timeline, follow_weights(schedule)
    work = max(timeline.busy)
    figures = {
        "makespan": timeline.makespan, "work": work, "bubble": timeline.makespan - work,
        "span": timeline.span, "span_bubble": timeline.span - work, "staleness": versions.staleness,
    }  # fmt: skip
    return figures, {"peak": execution.peak_memory, "versions": versions.held}


def _of_rank(name: str, values: Sequence[float], rank: int | None = None) -> float:
    """A rank's figure, or the highest of all ranks."""
    if rank is None:
        return max(values)
    if not 0 <= rank < len(values):
        raise Fault("no-such-rank", f"`{name}({rank})`, there are ranks 0 to {len(values) - 1}", 0)
    return values[rank]
