"""What a program claims of its schedule with `assert`, held against the figures of an execution."""

from schedlang.codegen import variable
from schedlang.diagnostics import CompileError
from schedlang.findings import Finding, diagnose
from schedlang.machine import Execution
from schedlang.recorder import Fault
from schedlang.schedule import Schedule


def check_claims(schedule: Schedule, execution: Execution) -> None:
    """CompileError for every claim that does not hold, with the figures it is about.

    `peak(r)` is the peak of rank r in the program's amounts of memory, by default stage activations; `makespan` goes
    from the first start to the last end, `work` is what the busiest rank works, `bubble` = makespan - work is the idle
    time of a synchronous flush; `span` is the longest time from a rank's own first start to its own last end, and
    `span_bubble` = span - work.
    """
    timeline = execution.timeline
    work, span = max(timeline.busy), timeline.span
    figures = {
        "makespan": timeline.makespan, "work": work, "bubble": timeline.makespan - work,
        "span": span, "span_bubble": span - work,
    }  # fmt: skip
    names = {variable(name): value for name, value in figures.items()}
    texts = [f"{name} {value:.10g}" for name, value in figures.items()]
    texts.append(f"peak per rank {' '.join(f'{peak:.10g}' for peak in execution.peak_memory)}")
    findings = []
    for claim in schedule.claims:
        claim.names.update(names, **{variable("peak"): lambda rank: _peak(execution, rank)})
        try:
            if claim.holds():
                continue
            message = f"the schedule claims: {claim.reason}" if claim.reason else "a claim does not hold"
        except Fault as fault:
            message = fault.message
        findings.append(Finding("assert", message, 0, claim.place, help=f"the figures are {', '.join(texts)}"))
    if findings:
        raise CompileError(diagnose(schedule, findings))


def _peak(execution: Execution, rank: int) -> float:
    if not 0 <= rank < len(execution.peak_memory):
        raise Fault("assert", f"`peak({rank})`, there are ranks 0 to {len(execution.peak_memory) - 1}", 0)
    return execution.peak_memory[rank]
