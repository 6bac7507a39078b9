"""A recorded run of a plan: when each op ran on each rank, in every recorded step."""

import json
from collections.abc import Sequence
from pathlib import Path

from attrs import field, frozen

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.files.reading import read_source
from schedlang.plan.plan import Plan
from schedlang.plan.reader import plan_in
from schedlang.proof.execution import Execution
from schedlang.schedule.costs import Costs, measured_costs
from schedlang.schedule.costs.traces import Traced, ops_with_sends, traced_actions
from schedlang.schedule.timeline import Bar, Bars, Timeline


@frozen
class Run:
    """What a run of a plan has recorded, in microseconds: all `actions`, and of each step the ops
    with their sends.

    The steps are in order; each starts at 0. All ranks are in one clock.
    """

    plan: Plan
    steps: tuple[Timeline, ...]
    actions: tuple[Traced, ...] = field(repr=False)

    @property
    def costs(self) -> Costs:
        """What ops and transfers took: means over all steps."""
        return measured_costs(self.actions)

    @property
    def median(self) -> Timeline:
        """The step whose makespan is the median one; of an even number of steps, the shorter of the
        two.
        """
        return sorted(self.steps, key=lambda step: step.makespan)[(len(self.steps) - 1) // 2]

    def execution(self) -> Execution:
        """The median step as an execution: its memory is what the plan holds at these times."""
        return Execution("measured", self.plan, self.plan.costs, self.median)


def is_trace(text: str) -> bool:
    """Whether the text of a file is that of a trace: in JSON, quotes within a text are escaped."""
    return text.lstrip().startswith("{") and '"traceEvents"' in text


def read_run(path: str | Path) -> Run:
    """The run in a trace that `schedc run --trace` has written; CompileError says what is wrong
    with it.
    """
    try:
        document = json.loads(read_source(path).text)
        actions = traced_actions(document.get("traceEvents"))
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"not a whole trace: {error}") from None
    match document.get("otherData"):
        case {"plan": plan}:
            try:
                return run_of(plan_in(path, plan), actions)
            except ValueError as error:
                raise _wrong(path, str(error)) from None
    raise _wrong(
        path,
        "the trace has no plan",
        "`schedc run PLAN --trace FILE` writes it with its plan; of any other "
        "trace, `--costs` takes what its ops cost",
    )


def run_of(plan: Plan, actions: Sequence[Traced]) -> Run:
    """The run that actions, in order of time, are of; ValueError if they are not those of some
    steps of the plan.
    """
    ops = ops_with_sends(actions)
    steps = [
        _steps(plan, rank, [bar for each, bar in ops if each == rank])
        for rank in range(len(plan.ranks))
    ]
    recorded = {len(each) for each in steps}
    if len(recorded) > 1:
        raise ValueError("the trace does not have as many steps of every rank")
    if recorded == {0}:
        raise ValueError("the trace has no step")
    timelines = tuple(_from_zero(ranks) for ranks in zip(*steps, strict=True))
    return Run(plan, timelines, tuple(actions))


def _steps(plan: Plan, rank: int, ops: list[Bar]) -> list[list[Bar]]:
    """A rank's ops by step."""
    actions = plan.ranks[rank].compute()
    words = list(map(actions.word, range(len(actions))))
    steps = [ops[start : start + len(words)] for start in range(0, len(ops), len(words) or 1)]
    for number, step in enumerate(steps):
        if list(map(str, step)) != words:
            raise ValueError(
                f"step {number} of rank {rank} in the trace does not have the ops of the plan in "
                "order"
            )
    return steps


def _from_zero(ranks: Sequence[list[Bar]]) -> Timeline:
    start = min((bar.start for bars in ranks for bar in bars), default=0.0)
    moved = (
        (bar._replace(start=bar.start - start, end=bar.end - start) for bar in bars)
        for bars in ranks
    )
    return Timeline(tuple(map(Bars.of, moved)), tuple(Bars() for _ in ranks))


def _wrong(path: str | Path, message: str, help: str | None = None) -> CompileError:
    return CompileError([Diagnostic("trace", f"`{path}`: {message}", help=help, file=str(path))])
