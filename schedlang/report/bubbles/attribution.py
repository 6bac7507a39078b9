"""Why ranks are idle: every moment of idle time has one cause; docs/pictures.md says what each
means.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from schedlang.proof.durations import op_ends
from schedlang.report.bubbles.alternatives import Alternatives
from schedlang.report.bubbles.op_waits import ROUNDING, Step, Waits
from schedlang.report.bubbles.reasons import Gaps, Reasons, Why
from schedlang.schedule.arrays import Floats, Ints, counts_of
from schedlang.schedule.costs import Costs, Durations

#: The causes, in the order in which they are shown, and what each means.
CAUSES = {
    "fill": "nothing to run yet, before the rank's first backward",
    "drain": "nothing to run any more, after the rank's last forward",
    "dependency": "nothing to run in between: waits for an op of that stage",
    "imbalance": "waits for an op of that stage, beyond its average over the stages",
    "memory": "a later op could run here, but the rank would hold more than its peak",
    "order": "a later op could run here, and the rank would hold no more than its peak",
    "transfer": "what it waits for is on its way between those ranks",
    "transport": "what it waits for could be there: the transport holds it, or the rank, back",
    "copy": "what it waits for comes from the host",
    "collective": "gradients are summed, sharded weights gathered, or tokens exchanged",
}


#: The number of each cause.
_NUMBERS = {cause: number for number, cause in enumerate(CAUSES)}
#: The causes where nothing runs behind a wait.
_MOVING = {
    Why.COPY: "copy",
    Why.TRANSFER: "transfer",
    Why.TRANSPORT: "transport",
    Why.COLLECTIVE: "collective",
}
#: No stage or rank that a cause is about.
_NONE = -1


@frozen
class Idle:
    """A part of a rank's idle time and its cause; `subject` has the stage or the ranks that the
    cause is about.

    `behind` is the step at the end of the chain of waits: it runs, or its result is on its way.
    """

    rank: int
    start: float
    end: float
    cause: str
    behind: Step
    subject: tuple[int, ...] = ()

    @property
    def length(self) -> float:
        """How long it is."""
        return self.end - self.start


@frozen(eq=False)
class IdleTime:
    """All parts of the ranks' idle time, in order, as columns.

    `cause[i]` is the place of its cause in CAUSES, and `behind[i]` the number of the step; the
    cause is about the stage or the rank `about[i]`, and the rank `other[i]`, or nothing, which
    is -1.
    """

    waits: Waits
    rank: Ints
    start: Floats
    end: Floats
    cause: Ints
    behind: Ints
    about: Ints
    other: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Idle]:
        causes = list(CAUSES)
        steps = self.waits.steps
        fields = (
            self.rank,
            self.start,
            self.end,
            self.cause,
            self.behind,
            self.about,
            self.other,
        )
        for rank, start, end, cause, behind, about, other in zip(
            *(column.tolist() for column in fields), strict=True
        ):
            subject = tuple(number for number in (about, other) if number != _NONE)
            yield Idle(rank, start, end, causes[cause], steps[behind], subject)

    @cached_property
    def length(self) -> Floats:
        """How long each part is."""
        return self.end - self.start

    def of_ranks(self) -> dict[str, list[float]]:
        """For each cause, the idle time of each rank that is due to it."""
        ranks = len(self.waits.schedule.ranks)
        times: dict[str, list[float]] = {}
        for cause, number in _NUMBERS.items():
            parts = self.cause == number
            times[cause] = counts_of(
                self.rank[parts], self.length[parts], ranks
            ).tolist()
        return times

    def by_subject(
        self, cause: str
    ) -> list[tuple[tuple[int, ...], float, list[float]]]:
        """For what a cause is about, the most first: the idle time of all ranks, and of each."""
        parts = np.flatnonzero(self.cause == _NUMBERS[cause])
        ranks = len(self.waits.schedule.ranks)
        most = int(max(self.about.max(initial=0), self.other.max(initial=0))) + 2
        # The pair as one number, in which -1, for nothing, is a number like any other.
        key = (self.about[parts] + 1) * np.int64(most) + self.other[parts] + 1
        keys, first, subject = np.unique(key, return_index=True, return_inverse=True)
        times = counts_of(
            subject * ranks + self.rank[parts], self.length[parts], len(keys) * ranks
        ).reshape(-1, ranks)
        rows = []
        for number in np.argsort(first).tolist():
            part = parts[first[number]]
            about = (int(self.about[part]), int(self.other[part]))
            per_rank: list[float] = times[number].tolist()
            rows.append(
                (
                    tuple(each for each in about if each != _NONE),
                    sum(per_rank),
                    per_rank,
                )
            )
        return sorted(rows, key=lambda each: -each[1])


def bubbles(waits: Waits, gaps: Gaps, behind: Reasons, costs: Costs) -> IdleTime:
    """The idle time of every rank from the first start to the last end, in pieces of one cause
    each, from its gaps and what is behind them.

    `costs` are those that the execution was simulated with.
    """
    costs = costs.over(waits.schedule.costs)
    attribution = _Causes(waits, gaps, behind)
    attribution.moving()
    attribution.running(_choices(waits, gaps, costs), _even(waits, costs))
    return attribution.in_order()


@frozen(eq=False)
class _Choices:
    """What ranks could do in gaps, as columns: the cause if there is nothing else to run, and from
    when a later op could run, within the rank's peak or beyond; infinite, if none could.
    """

    phase: Ints
    order: Floats
    memory: Floats


def _choices(waits: Waits, gaps: Gaps, costs: Costs) -> _Choices:
    phases = []
    layout = waits.schedule.layout
    amounts = costs.memory(layout)
    # One row for `order`, one for `memory`, and a column for each gap.
    earliest = np.full((2, len(gaps)), np.inf)
    bounds = np.searchsorted(gaps.rank, np.arange(len(waits.schedule.ranks) + 1))
    for rank, (first, last) in enumerate(pairwise(bounds.tolist())):
        alternatives = Alternatives(waits, rank, amounts)
        for gap in range(first, last):
            index = int(gaps.index[gap])
            start = float(gaps.start[gap])
            end = float(gaps.end[gap])
            could_run = alternatives.between(index, start, end)
            for row, cause in enumerate(("order", "memory")):
                earliest[row, gap] = could_run.get(cause, np.inf)
            phases.append(_NUMBERS[_phase(alternatives, index)])
    return _Choices(np.array(phases, np.int64), *earliest)


def _phase(alternatives: Alternatives, index: int) -> str:
    """What keeps a rank from having anything to run before one of its steps."""
    if index > alternatives.last_forward:
        return "drain"
    return "fill" if index <= alternatives.first_backward else "dependency"


def _even(waits: Waits, costs: Costs) -> Floats:
    """How long each step would take if all stages were alike."""
    columns = waits.schedule.columns
    durations = costs.durations(waits.schedule.layout)
    overlap = durations.overlap and [fmean(durations.overlap)] * len(durations.overlap)
    even = Durations(
        {kind: [fmean(each)] * len(each) for kind, each in durations.by_kind.items()},
        overlap=overlap,
        components=durations.components,
    )
    ops = np.flatnonzero(~columns.is_transfer)
    ends: Floats = np.zeros(len(columns))
    ends[ops] = op_ends(columns, ops, even)
    last = waits.head + columns.sizes[waits.head] - 1
    end_of_even: Floats = ends[last]
    return end_of_even


@define(eq=False)
class _Causes:
    """The causes of gaps found so far, from what is behind them."""

    waits: Waits
    gaps: Gaps
    behind: Reasons
    parts: list[tuple[NDArray[Any], ...]] = field(factory=list)

    def moving(self) -> None:
        """Where something is on its way, or is held back, that is the cause."""
        behind = self.behind
        for why, cause in _MOVING.items():
            items = np.flatnonzero(behind.why == why)
            about = self.waits.rank[behind.step[items]]
            other = behind.receiver[items]
            if why == Why.COLLECTIVE:
                about = self.waits.schedule.columns.stage[
                    self.waits.head[behind.step[items]]
                ]
                other = np.full(len(items), _NONE)
            self.add(
                items,
                behind.start[items],
                behind.end[items],
                _NUMBERS[cause],
                about,
                other,
            )

    def running(self, choices: _Choices, even: Floats) -> None:
        """The causes while an op runs; `even` is how long each step would take if all stages were
        alike.
        """
        behind = self.behind
        items = np.flatnonzero(behind.why == Why.OP)
        start = behind.start[items]
        end = behind.end[items]
        step = behind.step[items]
        gap = behind.gap[items]
        # The time in which an op runs behind a gap is cut up from its end to its start:
        #
        #     start ├─ fill, drain, dependency ─┼─ memory ─┼─ order ─┼─ imbalance ─┤ end
        #                                       │          │         └ beyond the stages' average
        #                                       │          └ a later op could run from here on
        #                                       └ or from here, with more memory than the peak
        begun = self.waits.starts[step]
        beyond = np.minimum(np.maximum(begun + even[step], start), end)
        is_even = self.waits.ends[step] - begun <= even[step] * (1 + ROUNDING)
        beyond[is_even] = end[is_even]
        nothing = np.full(len(items), _NONE)
        stage = self.waits.schedule.columns.stage[self.waits.head[step]]
        self.add(items, beyond, end, _NUMBERS["imbalance"], stage, nothing)
        end = beyond
        for cause, could_run in (("order", choices.order), ("memory", choices.memory)):
            since = np.maximum(could_run[gap], start)
            self.add(items, since, end, _NUMBERS[cause], nothing, nothing)
            end = np.minimum(end, since)
        phase = choices.phase[gap]
        about = np.where(phase == _NUMBERS["dependency"], stage, _NONE)
        self.add(items, start, end, phase, about, nothing)

    def add(
        self,
        items: Ints,
        start: Floats,
        end: Floats,
        cause: Ints | int,
        about: Ints,
        other: Ints,
    ) -> None:
        """Note causes of some of what is behind gaps, where they last at all."""
        chosen = np.flatnonzero(start < end)
        of_each = np.broadcast_to(cause, start.shape)
        columns = self.gaps.rank[self.behind.gap[items]], start, end, of_each
        rows = (*columns, self.behind.step[items], about, other)
        self.parts.append(tuple(column[chosen] for column in rows))

    def in_order(self) -> IdleTime:
        """All of them, by rank and time."""
        columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        return IdleTime(self.waits, *(column[order] for column in columns))
