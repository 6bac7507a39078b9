"""What a program claims of its schedule with `assert`, held against the figures of an execution."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.language.codegen import variable
from schedlang.language.faults import Fault
from schedlang.proof.execution import Execution
from schedlang.ranks.weights import Versions, follow_weights
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Schedule

_TIMES = frozenset(["makespan", "work", "bubble", "span", "span_bubble"])
_AMOUNTS = frozenset(["peak"])
#: The figures in the order in which they are told: of the whole schedule, and of each rank.
_OF_ALL = ("makespan", "work", "bubble", "span", "span_bubble", "staleness")
_OF_RANKS = ("peak", "versions")
_FIGURES = frozenset(_OF_ALL + _OF_RANKS)


def check_claims(schedule: Schedule, execution: Execution, given: Costs = UNIT) -> None:
    """CompileError for every claim that does not hold, with the figures it is about.

    A program's claims are about its own costs: where a user has `given` others, those that these
    enter are not checked.

    `peak(r)` is the peak of rank r in the program's amounts of memory, by default stage
    activations, `peak()` the highest of all ranks; `makespan` goes from the first start to the last
    end, `work` is what the busiest rank works, `bubble` = makespan - work is the idle time of a
    synchronous flush; `span` is the longest time from a rank's own first start to its own last end,
    and `span_bubble` = span - work. `versions(r)` is the most versions of a stage's weights that
    rank r holds, `staleness` the most updates by which any are behind.
    """
    figures = _Figures(schedule, execution)
    others = (_TIMES if given.gives_times else frozenset()) | (
        _AMOUNTS if given.gives_memory else frozenset()
    )
    findings: dict[int, Finding] = {}
    for claim in schedule.claims:
        if claim.names & others:
            continue
        claim.scope.update((variable(name), figures.of(name)) for name in _FIGURES & claim.names)
        try:
            if claim.holds():
                continue
            message = (
                f"the schedule claims: {claim.reason}" if claim.reason else "a claim does not hold"
            )
            finding = Finding("assert", message, 0, claim.place, help=figures.text())
        except Fault as fault:
            finding = Finding(fault.code, fault.message, 0, claim.place, help=fault.help)
        # A claim in a rank block is made once per rank, and told once.
        findings.setdefault(claim.place, finding)
    if findings:
        raise CompileError(diagnose(schedule, list(findings.values())))


class _Figures:
    """The figures of a schedule, each found out when it is asked for."""

    def __init__(self, schedule: Schedule, execution: Execution) -> None:
        self._schedule = schedule
        self._execution = execution

    def of(self, name: str) -> Any:
        """A figure by its name; one of ranks as a function of a rank, or of none for the
        highest.
        """
        value = getattr(self, name)
        return partial(_of_rank, name, value) if name in _OF_RANKS else value

    def text(self) -> str:
        """All of them."""
        texts = [f"{name} {getattr(self, name):.10g}" for name in _OF_ALL]
        texts += [
            f"{name} per rank {' '.join(f'{each:.10g}' for each in getattr(self, name))}"
            for name in _OF_RANKS
        ]
        return f"the figures are {', '.join(texts)}"

    @cached_property
    def makespan(self) -> float:
        return self._execution.timeline.makespan

    @cached_property
    def work(self) -> float:
        return max(self._execution.timeline.busy)

    @property
    def bubble(self) -> float:
        return self.makespan - self.work

    @property
    def span(self) -> float:
        return self._execution.timeline.span

    @property
    def span_bubble(self) -> float:
        return self.span - self.work

    @property
    def staleness(self) -> int:
        return self._versions.staleness

    @property
    def peak(self) -> Sequence[float]:
        return self._execution.peak_memory

    @property
    def versions(self) -> Sequence[float]:
        return self._versions.held

    @cached_property
    def _versions(self) -> Versions:
        return follow_weights(self._schedule)


def _of_rank(name: str, values: Sequence[float], rank: int | None = None) -> float:
    """A rank's figure, or the highest of all ranks."""
    if rank is None:
        return max(values)
    if not 0 <= rank < len(values):
        raise Fault("no-such-rank", f"`{name}({rank})`, there are ranks 0 to {len(values) - 1}", 0)
    return values[rank]
