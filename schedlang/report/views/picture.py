"""Where everything stands in a picture of an execution: rectangles in time, arrows, memory. Every
view draws this.

A picture has no colours and no sizes: time in the unit of the costs from left to right, one row per
rank.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.timeline import Bar, Timeline

Steps = tuple[tuple[float, float], ...]
#: The most of a program line that is kept: a row of a table can be as long as the training.
_LONGEST = 120


@frozen
class Box:
    """One action as a rectangle: in the row of its rank, or, for a copy to or from the host, in the
    lane beside it.

    `label` is its microbatch, `3`, or slice of one, `3.1`; an optimizer step has `U`. `chunk`
    counts the stages of a rank, `version` is that of the weights it reads. Boxes with the same
    `overlap` above 0 are ops that run as one. `place` is the index of its program line in
    `Picture.places`.
    """

    rank: int
    bar: Bar
    label: str
    chunk: int
    version: int
    overlap: int
    place: int


@frozen
class Place:
    """A line of the program."""

    where: str
    text: str


@frozen
class Picture:
    """What a view shows of an execution.

    `ops` and `copies` have the boxes of each rank, in order of time; `boxes` is all of them. An
    arrow (a, b) says that box b needs what box a makes, both counted in `boxes`. `memory[r]` is
    what rank r holds, as in an execution. Where it is `measured`, a unit of time is a microsecond.
    """

    name: str
    params: dict[str, int]
    layout: Layout
    timeline: Timeline
    ops: tuple[tuple[Box, ...], ...]
    copies: tuple[tuple[Box, ...], ...]
    arrows: tuple[tuple[int, int], ...]
    places: tuple[Place, ...]
    memory: tuple[Steps, ...]
    measured: bool = False

    @cached_property
    def boxes(self) -> list[Box]:
        """The ops of rank 0, 1, …, then the copies of rank 0, 1, …"""
        return [box for rows in (self.ops, self.copies) for row in rows for box in row]

    @cached_property
    def title(self) -> str:
        """The schedule's name with its parameters."""
        params = ", ".join(f"{name} = {value}" for name, value in self.params.items())
        return f"{self.name} ({params}){', measured, in microseconds' if self.measured else ''}"

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
        """Whether there are copies to or from the host."""
        return any(self.copies)


def lay_out(plan: Plan, execution: Execution) -> Picture:
    """The picture of a plan's execution."""
    scribe = _Scribe(plan)
    timeline = execution.timeline
    ops = tuple(scribe.row(rank, bars) for rank, bars in enumerate(timeline.ranks))
    copies = tuple(scribe.row(rank, bars) for rank, bars in enumerate(timeline.copies))
    boxes = [box.bar for rows in (ops, copies) for row in rows for box in row]
    return Picture(
        plan.name,
        plan.params,
        plan.layout,
        timeline,
        ops,
        copies,
        _arrows(plan, boxes),
        tuple(scribe.lines),
        execution.memory,
        execution.transport == "measured",
    )


def _arrows(plan: Plan, bars: list[Bar]) -> tuple[tuple[int, int], ...]:
    """From what makes something to what needs it."""
    boxes = {tuple(bar[:3]): index for index, bar in enumerate(bars)}
    columns = plan.columns
    ops = zip(
        columns.kind.tolist(), columns.stage.tolist(), columns.microbatch.tolist(), strict=True
    )
    box_of = np.array([boxes.get(op, -1) for op in ops])
    items = np.flatnonzero(~columns.is_transfer[plan.needs.user])
    makers = box_of[plan.needs.maker[items]]
    users = box_of[plan.needs.user[items]]
    order = np.argsort(users, kind="stable")
    return tuple(zip(makers[order].tolist(), users[order].tolist(), strict=True))


class _Scribe:
    """Knows of each action what stands on its box."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chunk = {
            stage: chunk
            for rank in range(len(plan.ranks))
            for chunk, stage in enumerate(plan.stages_of(rank))
        }
        self.versions = follow_weights(plan).read
        #: The actions of each rank, and the program lines that they come from.
        self.index = [
            {
                (kind, stage, microbatch): index
                for index, (kind, stage, microbatch) in enumerate(
                    zip(actions.kind, actions.stage, actions.microbatch, strict=True)
                )
                if not is_transfer(kind)
            }
            for actions in plan.ranks
        ]
        #: The lines that have boxes, and for each place in the program the number of its line.
        self.lines: dict[Place, int] = {}
        self.line_of: dict[int, int] = {}

    def row(self, rank: int, bars: Sequence[Bar]) -> tuple[Box, ...]:
        return tuple(self.box(rank, bar) for bar in bars)

    def box(self, rank: int, bar: Bar) -> Box:
        actions = self.plan.ranks[rank]
        index = self.index[rank][bar.kind, bar.stage, bar.microbatch]
        place = self.place(actions.source[index])
        version = self.versions.get((bar.stage, bar.microbatch), 0)
        return Box(
            rank, bar, self.label(bar), self.chunk[bar.stage], version, actions.group[index], place
        )

    def label(self, bar: Bar) -> str:
        if bar.kind == Kind.U:
            return "U"
        microbatch, slice = divmod(bar.microbatch, self.plan.layout.slices)
        return f"{microbatch}.{slice}" if self.plan.layout.slices > 1 else str(microbatch)

    def place(self, span: int) -> int:
        if span not in self.line_of:
            source = self.plan.source
            start = self.plan.spans[span].start
            line = Place(source.where(start), source.line(start).strip()[:_LONGEST])
            self.line_of[span] = self.lines.setdefault(line, len(self.lines))
        return self.line_of[span]
