"""A recorded run of a plan: when each op ran on each rank, in every recorded step."""

import json
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, field, frozen

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.files.file_kinds import FileKind, kind_of_file
from schedlang.files.reading import read_source
from schedlang.plan.plan import Plan
from schedlang.plan.proved_again import plan_in
from schedlang.proof.execution import Execution
from schedlang.schedule.costs import Costs
from schedlang.schedule.costs.measured import measured_costs
from schedlang.schedule.costs.traces import Traced, ops_with_sends, traced_actions
from schedlang.schedule.timeline import Bar, Bars, Timeline


@frozen
class Run:
    """What a run of a plan has recorded: all `actions`, and for each step a timeline.

    Times are in microseconds, of one clock for all ranks; a step starts at 0. An op of a timeline
    ends when the sends behind it have begun: the rank does nothing else meanwhile.
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
        """The step with the median makespan; of an even number of steps, the shorter of the two in
        the middle.
        """
        steps = sorted(self.steps, key=lambda step: step.makespan)
        return steps[(len(steps) - 1) // 2]

    def execution(self) -> Execution:
        """The median step as an execution: its memory is what the plan holds at these times, and
        its costs are those that the run shows.
        """
        return Execution(
            "measured", self.plan, self.costs.over(self.plan.costs), self.median
        )


def read_run(path: str | Path) -> Run:
    """The run in a trace that `schedc run --trace` has written; CompileError says what is wrong
    with the trace.
    """
    try:
        document = json.loads(read_source(path).text)
        actions = traced_actions(document.get("traceEvents"))
    except (ValueError, RecursionError) as error:
        kind = kind_of_file(path)
        if kind not in (
            FileKind.TRACE,
            FileKind.OBJECT,
            FileKind.DAMAGED,
            FileKind.TEXT,
        ):
            message = f"it is {kind.called}, not a trace"
            raise _wrong(path, message, kind.help(path)) from None
        raise _wrong(path, f"not a whole trace: {error}") from None
    other_data = document.get("otherData")
    if not isinstance(other_data, dict) or "plan" not in other_data:
        help = (
            "`schedc run PLAN --trace FILE` writes it with its plan; of any other trace, `--costs` "
            "takes what its ops cost"
        )
        raise _wrong(path, "the trace has no plan", help)
    try:
        return run_of(plan_in(path, other_data["plan"]), actions)
    except ValueError as error:
        raise _wrong(path, str(error)) from None


def run_of(plan: Plan, actions: Sequence[Traced]) -> Run:
    """The run of a plan with these actions, in order of time; ValueError if they are not those of
    some steps of the plan.
    """
    plan = _recorded(plan)
    ops: list[list[Bar]] = [[] for _ in plan.ranks]
    for rank, bar in ops_with_sends(actions):
        if 0 <= rank < len(ops):
            ops[rank].append(bar)
    # For each rank its steps, and for each of these the ops.
    steps = [_steps(plan, rank, bars) for rank, bars in enumerate(ops)]
    numbers = {len(steps_of_rank) for steps_of_rank in steps}
    if len(numbers) > 1:
        raise ValueError("the trace does not have as many steps of every rank")
    if numbers == {0}:
        raise ValueError("the trace has no step")
    timelines = [_timeline_from_zero(ranks) for ranks in zip(*steps, strict=True)]
    return Run(plan, tuple(timelines), tuple(actions))


def _recorded(plan: Plan) -> Plan:
    """The plan without its gathers and sums: a run does not record when they begin."""
    if not plan.columns.is_collective.any():
        return plan
    without: Plan = evolve(
        plan, ranks=tuple(actions.without_collectives() for actions in plan.ranks)
    )
    return without


def _steps(plan: Plan, rank: int, ops: list[Bar]) -> list[list[Bar]]:
    """A rank's ops, step by step; ValueError if they are not those of the plan."""
    actions = plan.ranks[rank].compute()
    words = list(map(actions.word, range(len(actions))))
    overlaps = [batch for batch in actions.batches() if len(batch) > 1]
    # A rank without ops has no steps, and none should be looked for in steps of 0.
    length = len(words) or 1
    steps = [ops[start : start + length] for start in range(0, len(ops), length)]
    for number, step in enumerate(steps):
        # Of ops that overlap, a run may begin the second one first.
        for batch in overlaps:
            together = slice(batch.start, batch.stop)
            turn = {words[index]: index for index in batch}
            step[together] = sorted(
                step[together], key=lambda bar: turn.get(str(bar), batch.stop)
            )
        # Transfers are not compared: a run records waits for them, whose order is that of arrival.
        if list(map(str, step)) != words:
            raise ValueError(
                f"step {number} of rank {rank} in the trace does not have the ops of the plan in "
                "order"
            )
    return steps


def _timeline_from_zero(ranks: Sequence[list[Bar]]) -> Timeline:
    """The ops of a step as a timeline in which the first one starts at 0."""
    first = min((bar.start for bars in ranks for bar in bars), default=0.0)
    moved = []
    for bars in ranks:
        moved.append(
            Bars.of(
                bar._replace(start=bar.start - first, end=bar.end - first)
                for bar in bars
            )
        )
    return Timeline(tuple(moved), tuple(Bars() for _ in ranks))


def _wrong(path: str | Path, message: str, help: str | None = None) -> CompileError:
    diagnostic = Diagnostic("trace", f"`{path}`: {message}", help=help, file=str(path))
    return CompileError([diagnostic])
