"""A schedule: which rank holds which stage, and what each rank does, in order.

The one intermediate form. A program expands to a schedule of compute ops; lowering adds sends and receives;
a plan is a lowered schedule that passed the checks.
"""

from array import array
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from attrs import define, field, frozen

from schedlang.costs import UNIT, Costs
from schedlang.kinds import Kind as Kind
from schedlang.source import Source, Span

NO_MICROBATCH = -1
#: What the text of ops that overlap ends with.
OVERLAP = "OVERLAP_F_B"


_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


def counterpart(kind: int, stage: int) -> tuple[Kind, int]:
    """The other end of a transfer: an activation goes from stage s to s + 1, a gradient from s to s - 1."""
    other, distance = _OTHER_END[Kind(kind)]
    return other, stage + distance


def is_transfer(kind: int) -> bool:
    """Whether an action moves a tensor between ranks."""
    return kind >= Kind.SEND_F


def is_send(kind: int) -> bool:
    """Whether an action sends a tensor."""
    return kind in (Kind.SEND_F, Kind.SEND_B)


def word(kind: int, stage: int, microbatch: int) -> str:
    """An action in torch's spelling: `2SEND_F0`, `1B3`, `0U`."""
    return f"{stage}{Kind(kind).name}{'' if microbatch == NO_MICROBATCH else microbatch}"


@define
class Actions:
    """What one rank does, in order, as columns of integers; row i of all columns is action i.

    `group` is 0 for an action issued alone; neighbours that share a number above 0 are issued as one: a batch of
    transfers, or compute ops that overlap.
    `source` is the index of the action's place in `Schedule.spans`.
    """

    kind: "array[int]" = field(factory=lambda: array("b"))
    stage: "array[int]" = field(factory=lambda: array("i"))
    microbatch: "array[int]" = field(factory=lambda: array("i"))
    group: "array[int]" = field(factory=lambda: array("i"))
    source: "array[int]" = field(factory=lambda: array("i"))

    def add(self, kind: int, stage: int, microbatch: int, source: int, group: int = 0) -> None:
        """Append one action."""
        self.kind.append(kind)
        self.stage.append(stage)
        self.microbatch.append(microbatch)
        self.source.append(source)
        self.group.append(group)

    def __len__(self) -> int:
        return len(self.kind)

    def row(self, index: int) -> tuple[int, int, int, int, int]:
        """Action `index` as `add` takes it."""
        return self.kind[index], self.stage[index], self.microbatch[index], self.source[index], self.group[index]

    def word(self, index: int) -> str:
        """Action `index` in torch's spelling."""
        return word(self.kind[index], self.stage[index], self.microbatch[index])

    def batch(self, index: int) -> range:
        """The actions issued together with action `index`: its group, or itself alone."""
        group, end = self.group[index], index + 1
        if group:
            while end < len(self) and self.group[end] == group:
                end += 1
        return range(index, end)

    def batches(self) -> Iterator[range]:
        """The actions in the order of issue."""
        index = 0
        while index < len(self):
            batch = self.batch(index)
            yield batch
            index = batch.stop

    def text(self) -> str:
        """All actions in torch's spelling, separated by blanks.

        A batch of transfers is `(0SEND_F4;0RECV_B1)`, ops that overlap are `(0F4;7B1)OVERLAP_F_B`.
        """
        return " ".join(map(self._batch_text, self.batches()))

    def _batch_text(self, batch: range) -> str:
        words = ";".join(map(self.word, batch))
        if len(batch) == 1:
            return words
        return f"({words}){'' if is_transfer(self.kind[batch.start]) else OVERLAP}"

    def compute(self) -> "Actions":
        """The actions that are not transfers."""
        return self.select(lambda kind: not is_transfer(kind))

    def select(self, keeps: Callable[[int], bool]) -> "Actions":
        """The actions of the kinds that `keeps` is true of; a batch of which some go is a batch of the others."""
        kept = Actions()
        for index, kind in enumerate(self.kind):
            if keeps(kind):
                kept.add(*self.row(index))
        return kept


@frozen
class Claim:
    """What a program says of itself: a condition on figures, which `scope` must have when it is evaluated."""

    holds: Callable[[], int]
    reason: str | None
    place: int
    scope: dict[str, Any]
    names: frozenset[str]


@frozen
class WeightRule:
    """Which version of its weights a stage reads in the forward, and again in the backward.

    `latest`: the newest, in both. `stash`: the newest in the forward, the same again in the backward. `delay`: for
    update k, the weights as they were after k - `delay` updates, in both.
    """

    name: str = "latest"
    delay: int = 0


@frozen
class Stream:
    """The ops of a schedule without a flush, per rank: before the first update, and of one update."""

    warmup: tuple[Actions, ...]
    steady: tuple[Actions, ...]


@frozen
class Kernel:
    """The rows `start` up to `stop` of a rank's actions, which repeat once per update."""

    start: int
    stop: int


@frozen
class Pipeline:
    """One way of microbatches through the model: the stages `start` up to `stop`, in order.

    Most schedules have one pipeline. Where there are two over the same ranks, the second one's stages are numbered on
    from the first one's, and stage `start + i` of either is a replica of the same piece of the model.
    """

    name: str
    start: int
    stop: int
    microbatches: int


@frozen
class Layout:
    """What runs where: `placement[s]` is the rank that holds stage s; the pipelines have the stages among them.

    A microbatch may be cut into `slices`, which pass through the stages one by one: an action's microbatch is then the
    number of the slice, counted through all microbatches of its pipeline. The microbatches are those of all `updates`
    that the schedule shows, in order; the action `U` of a stage has the number of its update for a microbatch.
    """

    placement: tuple[int, ...]
    pipelines: tuple[Pipeline, ...]
    slices: int = 1
    updates: int = 1

    @property
    def microbatches(self) -> int:
        """The microbatches of all pipelines."""
        return sum(pipeline.microbatches for pipeline in self.pipelines)

    @cached_property
    def pipeline_of(self) -> tuple[Pipeline, ...]:
        """The pipeline of each stage."""
        return tuple(pipeline for pipeline in self.pipelines for _ in range(pipeline.start, pipeline.stop))

    def units(self, stage: int) -> int:
        """How many microbatches, or slices of microbatches, pass through a stage."""
        return self.pipeline_of[stage].microbatches * self.slices

    def update_of(self, stage: int, microbatch: int) -> int:
        """The update that a microbatch, or a slice of one, adds its gradient to."""
        return microbatch * self.updates // self.units(stage)

    def is_first(self, stage: int) -> bool:
        """Whether a stage takes the inputs."""
        return self.pipeline_of[stage].start == stage

    def is_last(self, stage: int) -> bool:
        """Whether a stage makes the losses."""
        return self.pipeline_of[stage].stop == stage + 1

    def peer(self, kind: int, stage: int) -> int | None:
        """The rank at the other end of a transfer of `stage`.

        None where there is none to reach: past the first or last stage, or a stage of the same rank.
        """
        other, pipeline = counterpart(kind, stage)[1], self.pipeline_of[stage]
        if not pipeline.start <= other < pipeline.stop or self.placement[other] == self.placement[stage]:
            return None
        return self.placement[other]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]


@frozen
class Schedule:
    """Per-rank actions with their layout and the program they come from.

    `ranks[r]` is what rank r does. `spans[0]` is the schedule's name; `claims` are the program's, checked by `compile`.
    `weights` has the rule of each stage, or none where all read the latest.
    Ops that were drawn at time slots have them in `slots`, per rank and action, until the schedule is squeezed.
    `costs` are those that the program or its user gave; passes minimise the `objective`, a property of a timeline.
    """

    name: str
    params: dict[str, int]
    layout: Layout
    ranks: tuple[Actions, ...]
    source: Source = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    weights: tuple[WeightRule, ...] = ()
    slots: tuple[tuple[int, ...], ...] | None = None
    stream: Stream | None = None
    claims: tuple[Claim, ...] = field(default=(), eq=False, repr=False)
    costs: Costs = UNIT
    objective: str = "makespan"

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.layout.placement

    @property
    def microbatches(self) -> int:
        """The microbatches of all pipelines."""
        return self.layout.microbatches

    def weights_of(self, stage: int) -> WeightRule:
        """The rule by which a stage reads its weights."""
        return self.weights[stage] if self.weights else WeightRule()

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose forward is run again before their backward."""
        return frozenset(
            (stage, microbatch)
            for actions in self.ranks
            for kind, stage, microbatch in zip(actions.kind, actions.stage, actions.microbatch, strict=True)
            if kind == Kind.R
        )

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether there is no backward at all: inference."""
        return not any({Kind.B, Kind.I, Kind.W} & set(actions.kind) for actions in self.ranks)

    def keeps(self, kind: int, stage: int, microbatch: int) -> bool:
        """Whether what an op adds to the memory stays after it: not if there is no backward, or a recomputation."""
        return kind != Kind.F or not (self.is_forward_only or (stage, microbatch) in self.recomputed)

    def peer(self, kind: int, stage: int) -> int | None:
        """See `Layout.peer`."""
        return self.layout.peer(kind, stage)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return self.layout.stages_of(rank)
