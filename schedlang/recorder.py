"""Records the ops of one rank while its program runs, and refuses those that it cannot mean."""

from attrs import define, field

from schedlang.actions import NO_MICROBATCH, Actions, is_copy, word
from schedlang.faults import Fault
from schedlang.kinds import Kind
from schedlang.layout import Layout
from schedlang.passes.slots import WIDTH
from schedlang.schedule import Stream

_TRANSFERS = {
    "send F": Kind.SEND_F, "recv F": Kind.RECV_F, "send B": Kind.SEND_B, "recv B": Kind.RECV_B,
}  # fmt: skip

_KINDS = {
    "F": Kind.F,
    "B": Kind.B,
    "BW": Kind.B,
    "W": Kind.W,
    "R": Kind.R,
    "offload": Kind.OFFLOAD,
    "reload": Kind.RELOAD,
}


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
    #: For each word and stage, the microbatches done; for a rank's weight gradients, those owed, oldest first.
    done: dict[tuple[str, int], set[int]] = field(factory=dict)
    owed: dict[tuple[int, int], None] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.stages = self.layout.stages_of(self.rank)

    def op(self, word: str, args: tuple[int | None, ...], place: int) -> None:
        """Record a compute op: `args` is (), (stage,) for `U`, or what `which` takes."""
        if word == "U":
            for stage in self.stages if not args else [self.stage(word, args[0], place)]:
                self.actions.add(Kind.U, stage, 0 if self.part else NO_MICROBATCH, place, self.batch)
            return
        if self.part and (not args or args[-1] is None):
            message = f"`{word}` does not name its microbatch: in `{self.part}` it is counted from the update's first"
            raise Fault("which-microbatch", message, place, f"write `{word}(m)`, or `{word}(s, m)`")
        stage, microbatch = self.which(word, args, place) if args else self.oldest_owed(None, place)
        kind = _KINDS[word]
        if is_copy(kind) and self.batch:
            raise Fault("overlap", f"`{word}` goes on beside what follows by itself: it stands alone", place)
        if word == "B" and self.splits_backward:
            kind = Kind.I
            self.owed[stage, microbatch] = None
        elif word == "W":
            self.owed.pop((stage, microbatch), None)
        self.actions.add(kind, stage, microbatch, place, self.batch)

    def transfer(self, word: str, args: tuple[int | None, ...], place: int) -> None:
        """Record a send or a receive."""
        stage, microbatch = self.which(word, args, place)
        self.actions.add(_TRANSFERS[word], stage, microbatch, place, self.batch)

    def begin_part(self, part: str, place: int) -> bool:
        """The ops from here on stand before the first update, or once in every update."""
        if part in self.parts:
            raise Fault("repeated-part", f"a rank has one `{part}`", place)
        self.part, self.parts[part] = part, Actions()
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

    def which(self, word: str, args: tuple[int | None, ...], place: int) -> tuple[int, int]:
        """The stage and microbatch that an op means by `(m)`, `(s, m)`, or with slices `(m, k)`, `(s, m, k)`."""
        stage = self.stage(word, args[0] if len(args) == 2 + self.sliced else None, place)
        wanted = args[-1]
        # A backward is one thing whether it is written B or BW.
        done = self.done.setdefault(("B" if word == "BW" else word, stage), set())
        if wanted is None:
            microbatch = self.oldest_owed(stage, place)[1] if word == "W" else self.next(word, stage, done, place)
        elif self.sliced:
            microbatch = self.slice(word, args[-2] or 0, wanted, place)
        else:
            microbatch = int(wanted)
        microbatches = self.layout.units(stage) // self.layout.slices
        # In a stream, microbatches run on into later updates.
        if microbatch < 0 or (microbatch >= self.layout.units(stage) and not self.part):
            number = microbatch // self.layout.slices
            message = f"`{word}` of microbatch {number}, there are microbatches 0 to {microbatches - 1}"
            raise Fault("no-such-microbatch", message, place)
        done.add(microbatch)
        return stage, microbatch

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
            message = f"`{word}` of stage {wanted}, there are stages 0 to {len(self.layout.placement) - 1}"
            raise Fault("no-such-stage", message, place)
        if self.layout.placement[wanted] != self.rank:
            message = f"`{word}` of stage {wanted} on rank {self.rank}, it is on rank {self.layout.placement[wanted]}"
            raise Fault("not-on-this-rank", message, place)
        return int(wanted)

    def next(self, word: str, stage: int, done: set[int], place: int) -> int:
        """The first microbatch of a stage that this op has not done yet."""
        microbatch = len(done)
        if microbatch and max(done) != microbatch - 1:
            microbatch = next(each for each in range(microbatch + 1) if each not in done)
        if microbatch >= self.layout.units(stage):
            message = f"`{word}` of the next microbatch of stage {stage}, all {microbatch} are done"
            raise Fault("nothing-next", message, place)
        return microbatch

    def oldest_owed(self, stage: int | None, place: int) -> tuple[int, int]:
        """The weight gradient that has waited longest, of one stage or of all."""
        for owed in self.owed:
            if stage is None or owed[0] == stage:
                return owed
        of = "" if stage is None else f" of stage {stage}"
        raise Fault("nothing-next", f"`W`, but no weight gradient{of} is owed here", place)

    def sort_by_slot(self) -> None:
        """Put the ops of a building block in the order of their slots; two in one slot are a fault."""
        order = sorted(range(len(self.actions)), key=lambda index: (self.slots[index], self.width(index) > 0))
        actions, slots = Actions(), [self.slots[index] for index in order]
        free = 0
        for index in order:
            place = (row := self.actions.row(index))[3]
            if self.slots[index] < free:
                message = (
                    f"`{actions.word(len(actions) - 1)}` and `{word(*row[:3])}` collide on rank {self.rank} "
                    f"in slot {self.slots[index]}"
                )
                raise Fault("collision", message, place)
            free = self.slots[index] + self.width(index)
            actions.add(*row)
        self.actions, self.slots = actions, slots

    def width(self, index: int) -> int:
        """How many slots an op of a building block takes."""
        return WIDTH[self.actions.kind[index]]


def place_op(recorders: list[Recorder], offset: int, word: str, args: tuple[int, ...], slot: int, place: int) -> None:
    """Record an op of a building block on the rank of its stage, at its slot in the block plus the block's offset.

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
        recorder.op(word, args, place)
        recorder.slots.append(slot + offset)


def make_stream(recorders: list[Recorder]) -> Stream | None:
    """The stream that a program describes, if any rank has a `steady` part."""
    if not any(recorder.parts for recorder in recorders):
        return None
    for recorder in recorders:
        if "steady" not in recorder.parts:
            raise Fault("missing-part", f"rank {recorder.rank} has no `steady`, which other ranks have", 0)
        if len(recorder.actions):
            message = f"`{recorder.actions.word(0)}` stands outside of `warmup` and `steady`"
            raise Fault("steady", message, recorder.actions.source[0])
    nothing = Actions()
    return Stream(
        tuple(recorder.parts.get("warmup", nothing) for recorder in recorders),
        tuple(recorder.parts["steady"] for recorder in recorders),
    )
