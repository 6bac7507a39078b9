"""A picture of an execution: boxes in time, arrows between them, and memory. Every view draws this.

A picture has no colours and no sizes. It has a row for each rank, and time from left to right, in
the unit of the costs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

import numpy as np
from attrs import evolve, frozen

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.ranks.weight_versions import follow_weights
from schedlang.report.bubbles.account import Account
from schedlang.report.model_share import Share
from schedlang.report.views.boxes import Box
from schedlang.report.views.labels import Labels
from schedlang.report.views.lanes import Lane, lanes_of
from schedlang.report.views.units import bytes_text, time_text
from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.kinds import OF_STAGE, OPS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.needs import all_needs_of
from schedlang.schedule.timeline import Bar, Timeline

#: What a rank holds, from each time on at which that changes.
Steps = tuple[tuple[float, float], ...]
#: The most characters of a program line that are kept: a row of one of torch's tables can have
#: thousands.
_LONGEST = 120
#: What a unit of time is in the trace of a run.
_MICROSECOND = 1e-6


@frozen
class Line:
    """A line of the program."""

    where: str
    text: str


@frozen
class Part:
    """The part of a picture that is drawn, and how: the ranks `ranks`, or all; the times from
    `start` to `end`, or to the first or last; in a drawing as wide as it needs, or of `width`
    pixels, or as wide as a `column` or a `page` of a paper; with what ranks hold, if `memory`; with
    idle time coloured by its cause, if `causes`; with a `legend`; in the letters of a `font`.
    """

    ranks: tuple[int, ...] | None = None
    start: float | None = None
    end: float | None = None
    width: int | str | None = None
    memory: bool = False
    causes: bool = False
    legend: bool = True
    font: str | None = None

    def ranks_of(self, picture: "Picture") -> tuple[int, ...]:
        """The ranks that are drawn; ValueError for one that is not there."""
        count = len(picture.ops)
        ranks = self.ranks or tuple(range(count))
        if max(ranks) >= count:
            raise ValueError(
                f"there is no rank {max(ranks)}, the last one is rank {count - 1}"
            )
        return ranks

    def window(self, picture: "Picture") -> tuple[float, float]:
        """The first and the last time that are drawn; ValueError if nothing lies between them."""
        first = min((box.bar.start for box in picture.boxes), default=0.0)
        last = max((box.bar.end for box in picture.boxes), default=first)
        start = first if self.start is None else max(self.start, first)
        end = last if self.end is None else min(self.end, last)
        if start > end or (start == end and last > first):
            # As it was asked for, not what is left of it.
            asked = f"{start if self.start is None else self.start:g}.."
            asked += f"{end if self.end is None else self.end:g}"
            raise ValueError(
                f"nothing runs in {asked}: the schedule runs in {first:g}..{last:g}"
            )
        return start, end


#: All of a picture.
WHOLE = Part()


@frozen
class Picture:
    """What a view shows of an execution.

    `ops` and `copies` have the boxes of each rank, in order of time; `boxes` has all of them. An
    arrow (a, b) says that box b needs what box a makes, where a and b are indices of `boxes`.
    `lanes` are the resources of the ranks, where ops have components. `account` knows why ranks
    are idle.
    `wrong` are the claims that do not hold. Beside schedules with other numbers of stages, `share`
    is the part of the model that a stage is, and its ops take this part of the time. `notes` say
    what stands out in a recorded run.
    `memory[r]` is what rank r holds, in bytes where the costs give these. A unit of time has so
    many `seconds`, where that is known: in a recorded run, which is `measured`, it is a
    microsecond.
    """

    name: str
    params: dict[str, int]
    layout: Layout
    timeline: Timeline
    ops: tuple[tuple[Box, ...], ...]
    copies: tuple[tuple[Box, ...], ...]
    lanes: tuple[Lane, ...]
    arrows: tuple[tuple[int, int], ...]
    lines: tuple[Line, ...]
    memory: tuple[Steps, ...]
    account: Account
    seconds: float | None = None
    wrong: tuple[Diagnostic, ...] = ()
    share: Share | None = None
    notes: tuple[str, ...] = ()

    @property
    def execution(self) -> Execution:
        """The execution that is shown."""
        return self.account.execution

    @cached_property
    def boxes(self) -> list[Box]:
        """The ops of rank 0, 1, …, then the copies of rank 0, 1, …"""
        return [box for rows in (self.ops, self.copies) for row in rows for box in row]

    @cached_property
    def names(self) -> Labels:
        """What stages, microbatches and ops are called."""
        return Labels(self.layout)

    @cached_property
    def title(self) -> str:
        """The name of the schedule, with its parameters."""
        params = ", ".join(f"{name} = {value}" for name, value in self.params.items())
        title = f"{self.name} ({params})"
        return f"{title}, measured" if self.measured else title

    @property
    def measured(self) -> bool:
        """Whether a run has recorded it."""
        return self.execution.transport == "measured"

    @cached_property
    def peaks(self) -> list[float]:
        """The most that each rank holds."""
        return [
            max((amount for _, amount in steps), default=0.0) for steps in self.memory
        ]

    @cached_property
    def peak(self) -> float:
        """The most that any rank holds."""
        return max(self.peaks, default=0.0)

    @property
    def memory_unit(self) -> str:
        """What `memory` counts: bytes, activations, or amounts that the program has given."""
        if self.execution.memory_bytes is not None:
            return "bytes"
        is_plain = self.execution.peak_memory == self.execution.peak_activations
        return "activations" if is_plain else "amounts"

    def time(self, value: float) -> str:
        """A time as text, with its unit if that is known."""
        return time_text(value, self.seconds)

    def amount(self, value: float) -> str:
        """An amount of memory as text."""
        return bytes_text(value) if self.memory_unit == "bytes" else f"{value:.6g}"

    @cached_property
    def figures(self) -> str:
        """The makespan, and how much of all time is idle."""
        makespan = self.time(self.timeline.makespan)
        figures = f"makespan {makespan}, {self.timeline.bubble_over_makespan:.1%} idle"
        return figures if self.share is None else f"{figures}; {self.share.text}"

    @cached_property
    def wrong_texts(self) -> list[str]:
        """A line for each claim that does not hold."""
        return [f"! {wrong.message}" for wrong in self.wrong]

    @cached_property
    def wrong_ranks(self) -> list[int]:
        """The ranks of which claims do not hold, to be marked."""
        return sorted({rank for wrong in self.wrong for rank in wrong.ranks})

    @cached_property
    def chunks(self) -> int:
        """The most stages that a rank holds."""
        return max(len(self.layout.stages_of(rank)) for rank in range(len(self.ops)))

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of action that there are."""
        return [Kind(kind) for kind in sorted({box.bar.kind for box in self.boxes})]

    @cached_property
    def has_versions(self) -> bool:
        """Whether ops read different versions of the weights."""
        return any(box.version for box in self.boxes)

    @cached_property
    def has_copies(self) -> bool:
        """Whether there are copies to or from the host, or gathers and sums that are written."""
        return any(self.copies)


def lay_out(
    plan: Plan,
    execution: Execution,
    seconds: float | None = None,
    share: Share | None = None,
) -> Picture:
    """The picture of a plan's execution; a unit of its costs has so many `seconds`, if that is
    known; beside schedules with other numbers of stages, `share` is what its stages are.
    """
    maker = _BoxMaker(plan)
    timeline = execution.timeline
    ops = tuple(maker.row(rank, bars) for rank, bars in enumerate(timeline.ranks))
    copies = tuple(maker.row(rank, bars) for rank, bars in enumerate(timeline.copies))
    bars = [box.bar for rows in (ops, copies) for row in rows for box in row]
    return Picture(
        name=plan.name,
        params=plan.params,
        layout=plan.layout,
        timeline=timeline,
        ops=ops,
        copies=copies,
        lanes=lanes_of(execution, ops),
        arrows=_arrows(plan, bars),
        lines=tuple(maker.lines),
        memory=execution.memory_bytes or execution.memory,
        account=Account(execution),
        seconds=_MICROSECOND if execution.transport == "measured" else seconds,
        wrong=plan.wrong,
        share=share,
    )


def _arrows(plan: Plan, bars: list[Bar]) -> tuple[tuple[int, int], ...]:
    """From what makes something to what needs it."""
    boxes = {tuple(bar[:3]): index for index, bar in enumerate(bars)}
    columns = plan.columns
    ops = zip(
        columns.kind.tolist(),
        columns.stage.tolist(),
        columns.microbatch.tolist(),
        strict=True,
    )
    box_of = np.array([boxes.get(op, -1) for op in ops])
    # Receives need something as well, but have no box: the op that needs the message gets the
    # arrow.
    needs = all_needs_of(plan)
    items = np.flatnonzero(~columns.is_transfer[needs.user])
    makers = box_of[needs.maker[items]]
    users = box_of[needs.user[items]]
    order = np.argsort(users, kind="stable")
    return tuple(zip(makers[order].tolist(), users[order].tolist(), strict=True))


class _BoxMaker:
    """Makes the boxes of a plan's actions, and collects the lines of the program that these come
    from.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.labels = Labels(plan.layout)
        #: The chunk of each stage: how many stages its rank has before it.
        self.chunks: dict[int, int] = {}
        for rank in range(len(plan.ranks)):
            for chunk, stage in enumerate(plan.stages_of(rank)):
                self.chunks[stage] = chunk
        self.versions = follow_weights(plan).read
        #: For each rank the indices of every action that is not a transfer, in order.
        self.indices = [_indices(actions) for actions in plan.ranks]
        #: The lines that have boxes, each with its number; and the number for each span.
        self.lines: dict[Line, int] = {}
        self.line_numbers: dict[int, int] = {}

    def row(self, rank: int, bars: Sequence[Bar]) -> tuple[Box, ...]:
        # Gathers and sums of a stage look all the same: the first bar is of the first one.
        count = Counter[tuple[int, int, int]]()
        boxes = []
        for bar in bars:
            action = bar.kind, bar.stage, bar.microbatch
            boxes.append(self.box(rank, bar, self.indices[rank][action][count[action]]))
            count[action] += 1
        return tuple(_joined(boxes))

    def box(self, rank: int, bar: Bar, index: int) -> Box:
        actions = self.plan.ranks[rank]
        is_of_stage = bar.kind in OF_STAGE
        label = OPS[bar.kind].word if is_of_stage else self.labels.label(bar.microbatch)
        return Box(
            rank=rank,
            bar=bar,
            label=label,
            chunk=self.chunks[bar.stage],
            version=self.versions.get((bar.kind, bar.stage, bar.microbatch), 0),
            overlap=actions.group[index],
            line=self.line_number(actions.source[index]),
        )

    def line_number(self, span: int) -> int:
        """The number of the line that a span starts in; many spans are in one line."""
        # A program has few spans and a plan many actions.
        if span not in self.line_numbers:
            source = self.plan.source
            start = self.plan.spans[span].start
            text = source.line(start).strip()[:_LONGEST]
            line = Line(source.where(start), text)
            self.line_numbers[span] = self.lines.setdefault(line, len(self.lines))
        return self.line_numbers[span]


def _joined(boxes: Sequence[Box]) -> Iterator[Box]:
    """The boxes of a rank: each that runs as one with others has the bars of all of them."""
    for overlap, group in groupby(boxes, key=lambda box: box.overlap):
        if not overlap:
            yield from group
            continue
        members = list(group)
        together = tuple(box.bar for box in members)
        for box in members:
            yield evolve(box, together=together)


def _indices(actions: Actions) -> dict[tuple[int, int, int], list[int]]:
    """The indices of every action that is not a transfer, by its kind, stage and microbatch."""
    found: dict[tuple[int, int, int], list[int]] = {}
    ops = actions.each()
    for index, op in enumerate(ops):
        if not is_transfer(op[0]):
            found.setdefault(op, []).append(index)
    return found
