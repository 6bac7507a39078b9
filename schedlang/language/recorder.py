"""Records the ops of one rank while its program runs, and refuses those that it cannot mean."""

from collections import OrderedDict
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from attrs import define, field

from schedlang.language.faults import Fault
from schedlang.passes.slots import WIDTH
from schedlang.schedule.actions import NO_MICROBATCH, Actions, is_copy, word
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Stream

_TRANSFERS = {
    "send F": Kind.SEND_F,
    "recv F": Kind.RECV_F,
    "send B": Kind.SEND_B,
    "recv B": Kind.RECV_B,
}

#: An op of a program that runs: its word, its place, its arguments.
Call = tuple[Any, ...]

#: The kinds of ops by their words in a program; `B` is an input half where the program writes `W`.
KINDS = {
    "F": Kind.F,
    "B": Kind.B,
    "BW": Kind.B,
    "W": Kind.W,
    "R": Kind.R,
    "offload": Kind.OFFLOAD,
    "reload": Kind.RELOAD,
}


@define
class Done:
    """What an op has done on a stage: the microbatches, and one up to which all are done."""

    stage: int
    units: int
    microbatches: set[int] = field(factory=set)
    first: int = 0


@define
class Recorder:
    """The ops of one rank so far, and what is still to come, for `next` and a bare `W`."""

    rank: int
    layout: Layout
    splits_backward: bool
    sliced: bool
    actions: Actions = field(factory=Actions)
    slots: list[int] = field(factory=list)
    #: The ops of `warmup` and `steady`, in a schedule without a flush.
    parts: dict[str, Actions] = field(factory=dict)
    part: str = ""
    stages: list[int] = field(init=False)
    batches: int = 0
    batch: int = 0
    #: For each word and stage; None stands for the only stage of the rank.
    done: dict[tuple[str, int | None], Done] = field(factory=dict)
    #: For each stage, the microbatches whose weight gradients are owed, oldest first, each with
    #: where its `B` stands.
    owed: dict[int, OrderedDict[int, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.stages = self.layout.stages_of(self.rank)
        self.owed = {stage: OrderedDict() for stage in self.stages}

    def op(self, call: Call) -> None:
        """Record a compute op: its arguments are (), (stage,) for `U`, or what `which` takes."""
        word, place, *args = call
        if word == "U":
            for stage in self.stages if not args else [self.stage(word, args[0], place)]:
                self.actions.add(
                    Kind.U, stage, 0 if self.part else NO_MICROBATCH, place, self.batch
                )
            return
        if self.part and (not args or args[-1] is None):
            message = (
                f"`{word}` does not name its microbatch: in `{self.part}` it is counted "
                "from "
                "the update's first"
            )
            raise Fault("which-microbatch", message, place, f"write `{word}(m)`, or `{word}(s, m)`")
        stage, microbatch = self.which(word, args, place) if args else self.oldest_owed(None, place)
        kind = KINDS[word]
        if self.batch and is_copy(kind):
            raise Fault(
                "overlap", f"`{word}` goes on beside what follows by itself: it stands alone", place
            )
        if word == "B" and self.splits_backward:
            kind = Kind.I
            self.owed[stage].setdefault(microbatch, len(self.actions))
        elif word == "W":
            self.owed[stage].pop(microbatch, None)
        self.actions.add(kind, stage, microbatch, place, self.batch)

    def transfer(self, call: Call) -> None:
        """Record a send or a receive."""
        word, place, *args = call
        stage, microbatch = self.which(word, args, place)
        self.actions.add(_TRANSFERS[word], stage, microbatch, place, self.batch)

    def begin_part(self, part: str, place: int) -> bool:
        """The ops from here on stand before the first update, or once in every update."""
        if part in self.parts:
            raise Fault("repeated-part", f"a rank has one `{part}`", place)
        self.part = part
        self.parts[part] = Actions()
        self.actions, self.parts[""] = self.parts[part], self.actions
        return True

    def end_part(self) -> None:
        """The part is whole."""
        self.part, self.actions = "", self.parts.pop("")

    def begin_batch(self) -> None:
        """The transfers from here on are issued as one batch."""
        self.batches += 1
        self.batch = self.batches

    def end_batch(self) -> None:
        """The batch is whole."""
        self.batch = 0

    def which(self, word: str, args: Sequence[int | None], place: int) -> tuple[int, int]:
        """The stage and microbatch that an op means by `(m)`, `(s, m)`, or with slices `(m, k)`,
        `(s, m, k)`.
        """
        named = args[0] if len(args) == 2 + self.sliced else None
        done = self.done.get((word, named)) or self.begin(word, named, place)
        microbatch = args[-1]
        if microbatch is None:
            microbatch = (
                self.oldest_owed(done.stage, place)[1]
                if word == "W"
                else self.next(word, done, place)
            )
        elif self.sliced:
            microbatch = self.slice(word, args[-2] or 0, microbatch, place)
        # In a stream, microbatches run on into later updates.
        if microbatch < 0 or (microbatch >= done.units and not self.part):
            number = microbatch // self.layout.slices
            last = done.units // self.layout.slices - 1
            message = f"`{word}` of microbatch {number}, there are microbatches 0 to {last}"
            raise Fault("no-such-microbatch", message, place)
        done.microbatches.add(microbatch)
        return done.stage, microbatch

    def begin(self, word: str, named: int | None, place: int) -> Done:
        """What is done by an op that runs on a stage for the first time."""
        stage = self.stage(word, named, place)
        # A backward is one thing whether it is written B or BW.
        one = "B" if word == "BW" else word
        self.done[word, named] = self.done.setdefault(
            (one, stage), Done(stage, self.layout.units(stage))
        )
        return self.done[word, named]

    def slice(self, word: str, microbatch: int, slice: int, place: int) -> int:
        """The number of a microbatch's slice, counted through all microbatches."""
        if not 0 <= slice < self.layout.slices:
            message = f"`{word}` of slice {slice}, there are slices 0 to {self.layout.slices - 1}"
            raise Fault("no-such-slice", message, place)
        return microbatch * self.layout.slices + slice

    def stage(self, word: str, wanted: int | None, place: int) -> int:
        """The stage that an op means: the one it names, or the only one of the rank."""
        if wanted is None:
            if len(self.stages) != 1:
                held = ", ".join(map(str, self.stages)) or "none"
                message = f"`{word}` does not say which stage: rank {self.rank} holds {held}"
                raise Fault("which-stage", message, place, f"write `{word}(s, m)`")
            return self.stages[0]
        if not 0 <= wanted < len(self.layout.placement):
            message = (
                f"`{word}` of stage {wanted}, there are stages 0 to "
                f"{len(self.layout.placement) - 1}"
            )
            raise Fault("no-such-stage", message, place)
        if self.layout.placement[wanted] != self.rank:
            message = (
                f"`{word}` of stage {wanted} on rank {self.rank}, it is on rank "
                f"{self.layout.placement[wanted]}"
            )
            raise Fault("not-on-this-rank", message, place)
        return int(wanted)

    def next(self, word: str, done: Done, place: int) -> int:
        """The first microbatch of a stage that this op has not done yet."""
        while done.first in done.microbatches:
            done.first += 1
        if done.first >= done.units:
            message = (
                f"`{word}` of the next microbatch of stage {done.stage}, all {done.first} are done"
            )
            raise Fault("nothing-next", message, place)
        return done.first

    def oldest_owed(self, stage: int | None, place: int) -> tuple[int, int]:
        """The weight gradient that has waited longest, of one stage or of all."""
        stages = self.stages if stage is None else [stage]
        first = [(*next(iter(self.owed[each].items())), each) for each in stages if self.owed[each]]
        if first:
            microbatch, _, holder = min(first, key=itemgetter(1))
            return holder, microbatch
        of = "" if stage is None else f" of stage {stage}"
        raise Fault("nothing-next", f"`W`, but no weight gradient{of} is owed here", place)

    def sort_by_slot(self) -> None:
        """Put the ops of a building block in the order of their slots; two in one slot are a
        fault.
        """
        order = sorted(
            range(len(self.actions)), key=lambda index: (self.slots[index], self.width(index) > 0)
        )
        actions = Actions()
        slots = [self.slots[index] for index in order]
        free = 0
        for index in order:
            place = (row := self.actions.row(index))[3]
            if self.slots[index] < free:
                message = (
                    f"`{actions.word(len(actions) - 1)}` and `{word(*row[:3])}` collide on rank "
                    f"{self.rank} "
                    f"in slot {self.slots[index]}"
                )
                raise Fault("collision", message, place)
            free = self.slots[index] + self.width(index)
            actions.add(*row)
        self.actions = actions
        self.slots = slots

    def width(self, index: int) -> int:
        """How many slots an op of a building block takes."""
        return WIDTH[self.actions.kind[index]]


def place_op(
    recorders: list[Recorder], offset: int, word: str, args: tuple[int, ...], slot: int, place: int
) -> None:
    """Record an op of a building block on the rank of its stage, at its slot in the block plus the
    block's offset.

    In the last repeats of a block, microbatches beyond the last one of a pipeline have no ops.
    """
    layout = recorders[0].layout
    stage, microbatch = args[:2]
    if slot < 0:
        raise Fault("block", f"`{word}` at slot {slot}, a block's slots count from 0", place)
    if not 0 <= stage < len(layout.placement):
        message = f"`{word}` of stage {stage}, there are stages 0 to {len(layout.placement) - 1}"
        raise Fault("no-such-stage", message, place)
    if microbatch < layout.pipeline_of[stage].microbatches:
        recorder = recorders[layout.placement[stage]]
        recorder.op((word, place, *args))
        recorder.slots.append(slot + offset)


def make_stream(recorders: list[Recorder]) -> Stream | None:
    """The stream that a program describes, if any rank has a `steady` part."""
    if not any(recorder.parts for recorder in recorders):
        return None
    for recorder in recorders:
        if "steady" not in recorder.parts:
            raise Fault(
                "missing-part", f"rank {recorder.rank} has no `steady`, which other ranks have", 0
            )
        if len(recorder.actions):
            message = f"`{recorder.actions.word(0)}` stands outside of `warmup` and `steady`"
            raise Fault("steady", message, recorder.actions.source[0])
    nothing = Actions()
    return Stream(
        tuple(recorder.parts.get("warmup", nothing) for recorder in recorders),
        tuple(recorder.parts["steady"] for recorder in recorders),
    )
