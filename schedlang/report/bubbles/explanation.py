"""What `schedc simulate --why` says: the causes of idle time, the critical path, and what a faster
op would give.
"""

from collections import Counter
from typing import Any

from attrs import frozen

from schedlang.plan.plan import Plan
from schedlang.proof.prove import makespan_at, simulate
from schedlang.report.bubbles.account import Account
from schedlang.report.bubbles.attribution import CAUSES, IdleTime
from schedlang.report.bubbles.critical_path import Segment
from schedlang.report.bubbles.op_waits import Step
from schedlang.report.changed_costs import faster
from schedlang.report.text_table import rounded
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import OPS, Kind

#: How much faster an op is made, and of how many ops on the critical path this is tried.
_FACTOR = 0.9
_TRIED = 5
#: Of how many stages, links or kinds of op a table speaks at most.
_SHOWN = 4


@frozen
class Faster:
    """What it would give if an op took less time on a stage: the makespan then, by simulation."""

    field: str
    stage: int
    duration: float
    makespan: float


@frozen
class Explanation:
    """Why an execution of a plan takes as long as it does."""

    plan: Plan
    makespan: float
    idle: IdleTime
    exposed: float
    path: list[Segment]
    faster: list[Faster]

    @property
    def idle_time(self) -> float:
        """The idle time of all ranks."""
        return sum(self.idle.length.tolist(), 0.0)


def explain_bubble(plan: Plan, costs: Costs) -> Explanation:
    """Simulate a plan with some costs, and say where its time goes."""
    return explained(plan, Account(simulate(plan, costs)))


def explained(plan: Plan, account: Account) -> Explanation:
    """Where the time of an execution of a plan goes."""
    execution = account.execution
    faster = _faster(plan, execution.costs, account.path)
    return Explanation(
        plan,
        execution.timeline.makespan,
        account.idle,
        account.behind.exposed,
        account.path,
        faster,
    )


def _faster(plan: Plan, costs: Costs, path: list[Segment]) -> list[Faster]:
    """Of the ops that take most of the critical path, what it would give if each took less time."""
    durations = costs.every_duration(plan.layout)
    takes = costs.durations(plan.layout)
    on_path: dict[tuple[str, int], float] = {}
    for segment in path:
        if segment.kind in ("op", "copy"):
            # Ops that overlap run as one, and take what is given for that, if it is.
            rows = [plan.ranks[segment.step.rank].row(row) for row in segment.step.rows]
            ops = [
                (OPS[kind].cost, stage, takes.time(kind, stage, microbatch))
                for kind, stage, microbatch, *_ in rows
            ]
            if len(ops) > 1 and takes.overlap is not None:
                first = ops[0][1]
                ops = [("overlap", first, takes.overlap[first])]
            for field, stage, time in ops:
                on_path[field, stage] = on_path.get((field, stage), 0.0) + time
    # An op on the critical path need not give all that it saves: another path may be next to as
    # long. So each is simulated, and not read off the path.
    gains = []
    for field, stage in sorted(on_path, key=lambda op: -on_path[op])[:_TRIED]:
        quicker = faster(costs, field, stage, plan.layout, _FACTOR)
        gains.append(
            Faster(field, stage, durations[field][stage], makespan_at(plan, quicker))
        )
    return gains


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation for machines; times in the unit of the costs."""
    plan = explanation.plan
    return {
        "schedule": plan.name,
        "params": plan.params,
        "makespan": explanation.makespan,
        "idle": explanation.idle_time,
        "exposed": explanation.exposed,
        "causes": [
            {"cause": cause, "about": list(subject), "time": time, "per_rank": per_rank}
            for cause in CAUSES
            for subject, time, per_rank in explanation.idle.by_subject(cause)
        ],
        "intervals": [
            {
                "rank": each.rank,
                "start": each.start,
                "end": each.end,
                "cause": each.cause,
                "about": list(each.subject),
                "behind": _place(plan, each.behind),
            }
            for each in explanation.idle
        ],
        "critical_path": [
            {
                "kind": each.kind,
                "start": each.start,
                "end": each.end,
                "at": _place(plan, each.step),
            }
            for each in explanation.path
        ],
        "faster": [
            {
                "op": each.field,
                "stage": each.stage,
                "duration": each.duration,
                "faster": each.duration * _FACTOR,
                "makespan": each.makespan,
            }
            for each in explanation.faster
        ],
    }


def _place(plan: Plan, step: Step) -> dict[str, Any]:
    """A step for machines: its rank, its actions as in a plan, its line."""
    words = plan.ranks[step.rank].batch_text(step.rows)
    return {
        "rank": step.rank,
        "actions": words,
        "line": plan.where(step.rank, step.rows.start),
    }


def explanation_text(explanation: Explanation) -> str:
    """The explanation for people: three tables, with what their rows mean."""
    head = f"{explanation.plan.title}: makespan {explanation.makespan:.10g}"
    return "\n".join(
        [
            head,
            "",
            *_causes_text(explanation),
            "",
            *_path_text(explanation),
            "",
            *_faster_text(explanation),
        ]
    )


def _causes_text(explanation: Explanation) -> list[str]:
    whole = explanation.makespan * len(explanation.plan.ranks)
    lines = [
        f"idle time {explanation.idle_time:.10g} of {whole:.10g}, all ranks together, by its cause"
    ]
    for cause, meaning in CAUSES.items():
        subjects = explanation.idle.by_subject(cause)
        if subjects:
            time = sum(time for _, time, _ in subjects)
            share = _share(time, explanation.idle_time)
            lines.append(f"  {rounded(time):>10} {share:>6.1%}  {cause:<11} {meaning}")
        shown = [each for each in subjects if each[0]][:_SHOWN]
        lines += [
            f"  {rounded(time):>10} {'':6}  {'':11} {_about(explanation.plan, subject)}"
            for subject, time, _ in shown
        ]
    return lines


def _about(plan: Plan, subject: tuple[int, ...]) -> str:
    """The stage, or the ranks, that a cause is about."""
    if len(subject) == 1:
        return f"stage {plan.names.stage(subject[0])}"
    return (
        f"rank {subject[0]} to rank {subject[1]}"
        if subject[0] != subject[1]
        else f"rank {subject[0]}"
    )


def _share(time: float, whole: float) -> float:
    return time / whole if whole else 0.0


def _path_text(explanation: Explanation) -> list[str]:
    """The critical path by source lines, and the waits on it."""
    times: dict[str, float] = {}
    counts: dict[str, Counter[str]] = {}
    for segment in explanation.path:
        rank = segment.step.rank
        rows = segment.step.rows
        runs = segment.kind in ("op", "copy")
        place = explanation.plan.where(rank, rows.start) if runs else segment.kind
        times[place] = times.get(place, 0.0) + segment.length
        words = [
            f" {Kind(explanation.plan.ranks[rank].kind[row]).name}" for row in rows
        ]
        if segment.kind == "collective":
            stage = explanation.plan.ranks[rank].stage[rows.start]
            words = [f" x stage {explanation.plan.names.stage(stage)}"]
        elif not runs:
            words = [f" x rank {segment.sender} to {rank}"]
        counts.setdefault(place, Counter()).update(words)
    # A place is a line of the program, or for what no line says, the kind of wait.
    width = max(map(len, times))
    lines = [
        f"critical path {sum(times.values()):.10g}: from the first start to the last end without "
        "a gap"
    ]
    for place, time in sorted(times.items(), key=lambda each: -each[1]):
        what = ", ".join(
            f"{count}{word}" for word, count in counts[place].most_common(_SHOWN)
        )
        share = _share(time, explanation.makespan)
        lines.append(f"  {rounded(time):>10} {share:>6.1%}  {place:<{width}}  {what}")
    return lines


def _faster_text(explanation: Explanation) -> list[str]:
    lines = [
        f"makespan with one op {1 - _FACTOR:.0%} faster, simulated with the same order of ops"
    ]
    for each in explanation.faster:
        change = _share(each.makespan - explanation.makespan, explanation.makespan)
        stage = explanation.plan.names.stage(each.stage)
        faster = rounded(each.duration * _FACTOR)
        op = f"{each.field} on stage {stage}: {rounded(each.duration)} -> {faster}"
        lines.append(f"  {rounded(each.makespan):>10} {change:>+6.1%}  {op}")
    return lines
