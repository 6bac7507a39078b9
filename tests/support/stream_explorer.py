"""The streams of a GPU, run in many orders: the verdict that `schedlang.ranks.hazards` reaches by
clocks.

Written from docs/proof.md, "On a GPU", apart from the proof. A stream runs what it was given, one
piece of work after the other; a piece begins, goes on for any time, and ends. Memory that a tensor
takes was used until now by a probe, which the compute stream has waited for; memory that it gives
back is written at once by another probe, which waits for the compute stream. Two pieces of work
conflict if both go on, use one tensor, and one of them writes it; or if one reads what another one
than the last before it in the host's order has written.

Each piece of work in turn goes on for as long as anything else can run, and the rest runs in a
random order: so each two that may ever run side by side do so once.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence

from attrs import define, evolve, field

from schedlang import Kind, Schedule
from schedlang.ranks.gpu_streams import Free, Record, Run, Step, Take, Wait

COMPUTE = "compute"
USES_WEIGHTS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
BACKWARDS = (Kind.B, Kind.I, Kind.W)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)

#: What tensors an action reads and writes.
Uses = tuple[set[int], set[int]]


def has_conflict(
    schedule: Schedule, rank: int, steps: Sequence[Step], rng: random.Random
) -> bool:
    """Whether the steps that a rank gives its GPU conflict in some order."""
    work = _Work(own_uses(schedule, rank), steps)
    return work.is_wrong or any(
        _conflicts(work, held, rng) for held in range(len(work.uses))
    )


class _Work:
    """What each stream is given: to run a piece of work, by its number, to record an event, or to
    wait for one; and of each piece the tensors that it uses, and for each that it reads the piece
    that has written it.
    """

    def __init__(
        self, uses_of: dict[tuple[int, bool], Uses], steps: Sequence[Step]
    ) -> None:
        self.queues: dict[str, list[tuple[str, Hashable]]] = defaultdict(list)
        self.uses: list[Uses] = []
        self.writers: list[dict[int, int]] = []
        self.is_wrong = False
        self._written: dict[int, int] = {}
        recorded: dict[Hashable, int] = {}
        for number, step in enumerate(steps):
            probe = f"probe {number}"
            if isinstance(step, Run):
                both = [
                    uses_of.get((each, step.stream == COMPUTE), (set(), set()))
                    for each in step.actions
                ]
                reads = set().union(*(reads for reads, _ in both))
                writes = set().union(*(writes for _, writes in both))
                self._run(step.stream, (reads, writes))
            elif isinstance(step, Record):
                recorded[step.event] = number
                self.queues[step.stream].append(("record", number))
            elif isinstance(step, Wait):
                if step.event in recorded:
                    event = recorded[step.event]
                    self.queues[step.stream].append(("wait", event))
            elif isinstance(step, Take):
                self._run(probe, (set(), {step.tensor}))
                self.queues[probe].append(("record", probe))
                self.queues[COMPUTE].append(("wait", probe))
                self._written.pop(step.tensor, None)
            else:
                self.queues[COMPUTE].append(("record", probe))
                self.queues[probe].append(("wait", probe))
                self._run(probe, (set(), {step.tensor}))
                self._written.pop(step.tensor, None)

    def _run(self, stream: str, uses: Uses) -> None:
        reads, writes = uses
        self.queues[stream].append(("run", len(self.uses)))
        if any(tensor not in self._written for tensor in reads):
            # Even one after the other, it would read what is not there.
            self.is_wrong = True
        self.writers.append({tensor: self._written.get(tensor, -1) for tensor in reads})
        self._written |= dict.fromkeys(writes, len(self.uses))
        self.uses.append(uses)


@define
class _Tensor:
    """Who reads and writes a tensor now, and who has written it last."""

    readers: int = 0
    writer: int | None = None
    content: int = -1


def _conflicts(work: _Work, held: int, rng: random.Random) -> bool:
    """Whether pieces of work conflict in a random order, in which one of them is held as long as
    anything else can run.
    """
    tensors: dict[int, _Tensor] = defaultdict(_Tensor)
    places = dict.fromkeys(work.queues, 0)
    running: set[int] = set()
    over: set[Hashable] = set()
    waiting: dict[Hashable, list[str]] = defaultdict(list)
    ready = list(work.queues)
    parked: str | None = None
    while ready or parked is not None:
        if not ready:
            # Nothing else can run any more.
            assert parked is not None
            ready.append(parked)
            parked = None
            held = -1
        at = rng.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        stream = ready.pop()
        if places[stream] == len(work.queues[stream]):
            continue
        does, what = work.queues[stream][places[stream]]
        if does == "wait" and what not in over:
            waiting[what].append(stream)
            continue
        if does == "run" and what not in running:
            assert isinstance(what, int)
            if not _begin(work, what, tensors):
                return True
            running.add(what)
            if what == held:
                parked = stream
            else:
                ready.append(stream)
            continue
        if does == "run":
            assert isinstance(what, int)
            running.remove(what)
            _end(work, what, tensors)
        elif does == "record":
            over.add(what)
            ready += waiting.pop(what, [])
        places[stream] += 1
        ready.append(stream)
    return False


def _begin(work: _Work, piece: int, tensors: dict[int, _Tensor]) -> bool:
    """Begin a piece of work; whether it is right to do so now."""
    reads, writes = work.uses[piece]
    for number in reads | writes:
        tensor = tensors[number]
        if tensor.writer is not None or (number in writes and tensor.readers):
            return False
        if number in reads and tensor.content != work.writers[piece][number]:
            return False
    for number in writes:
        tensors[number].writer = piece
    for number in reads - writes:
        tensors[number].readers += 1
    return True


def _end(work: _Work, piece: int, tensors: dict[int, _Tensor]) -> None:
    reads, writes = work.uses[piece]
    for number in writes:
        tensors[number].writer = None
        tensors[number].content = piece
    for number in reads - writes:
        tensors[number].readers -= 1


@define
class _Rank:
    """What a rank has by the time it comes to an action."""

    activations: dict[tuple[int, int], int] = field(factory=dict)
    on_host: dict[tuple[int, int], int] = field(factory=dict)
    weights: dict[int, int] = field(factory=dict)
    received: dict[int, set[int]] = field(factory=lambda: defaultdict(set))
    summed: dict[int, set[int]] = field(factory=lambda: defaultdict(set))


def own_uses(schedule: Schedule, rank: int) -> dict[tuple[int, bool], Uses]:
    """What each action of a rank reads and writes, on the compute stream (True) or beside it."""
    actions = schedule.ranks[rank]
    rows = list(actions.each())
    # By op, the transfers that bring what it reads, or take what it makes.
    brings: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    takes: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for index, (kind, number, unit) in enumerate(rows):
        if kind not in (*SENDS, *RECEIVES):
            continue
        ends = schedule.layout.ends(kind, number)
        is_onwards = kind in (Kind.SEND_F, Kind.RECV_B)
        earlier, later = ends if is_onwards else ends[::-1]
        if kind == Kind.SEND_F:
            takes[Kind.F, earlier, unit].add(index)
        elif kind == Kind.SEND_B:
            takes[Kind.B, later, unit].add(index)
        elif kind == Kind.RECV_F:
            brings[Kind.F, later, unit].add(index)
        else:
            brings[Kind.B, earlier, unit].add(index)
    has = _Rank()
    found: dict[tuple[int, bool], Uses] = {}
    for index, (kind, stage, unit) in enumerate(rows):
        what = stage, unit
        weights = {has.weights[stage]} if stage in has.weights else set()
        if kind in SENDS:
            found[index, False] = {index}, set()
        elif kind in (*RECEIVES, Kind.UNSHARD, Kind.RECV_WEIGHTS, Kind.RECV_GRADIENTS):
            found[index, False] = set(), {index}
            if kind == Kind.RECV_GRADIENTS:
                has.received[stage].add(index)
                found[index, True] = {index}, set()
            elif kind not in RECEIVES:
                has.weights[stage] = index
        elif kind == Kind.SEND_WEIGHTS:
            found[index, False] = weights, set()
        elif kind == Kind.RESHARD:
            has.weights.pop(stage, None)
        elif kind in (Kind.REDUCE_GRAD, Kind.SEND_GRADIENTS):
            found[index, True] = has.received.pop(stage, set()), {index}
            is_sum = kind == Kind.REDUCE_GRAD
            found[index, False] = {index}, {index} if is_sum else set()
            if is_sum:
                has.summed[stage].add(index)
        elif kind in (Kind.EXCHANGE_F, Kind.EXCHANGE_B):
            # What passes between two stages of a rank is no tensor of this list.
            found[index, False] = set(), set()
        elif kind == Kind.U:
            found[index, True] = has.summed.pop(stage, set()), set()
        elif kind == Kind.OFFLOAD:
            found[index, False] = {has.activations.pop(what)}, {index}
            has.on_host[what] = index
        elif kind == Kind.RELOAD:
            found[index, False] = {has.on_host[what]}, {index}
            has.activations[what] = index
        else:
            direction = Kind.F if kind in (Kind.F, Kind.R) else Kind.B
            reads = brings[(direction, *what)] | weights
            writes: set[int] = set()
            if kind in (Kind.F, Kind.B, Kind.I):
                writes |= takes[(direction, *what)]
            if kind in BACKWARDS and what in has.activations:
                reads.add(has.activations[what])
            if kind == Kind.R or (kind == Kind.F and _is_kept(rows, *what)):
                writes.add(index)
                has.activations[what] = index
            found[index, True] = reads, writes
    return found


def _is_kept(rows: list[tuple[int, int, int]], stage: int, unit: int) -> bool:
    """Whether a backward uses what a forward keeps."""
    kinds = {kind for kind, *what in rows if what == [stage, unit]}
    return bool(kinds & {Kind.B, Kind.I}) and Kind.R not in kinds


def damaged(steps: Sequence[Step], rng: random.Random) -> list[Step]:
    """The steps with one change: an event that is not recorded, or not waited for; work on another
    stream; an event, or a tensor's begin or end, at another place.
    """
    found = list(steps)
    change = rng.choice(["leave out", "leave out", "exchange", "move"])
    if change == "leave out":
        kinds: tuple[type, ...] = (Wait, Record)
    elif change == "exchange":
        kinds = (Run, Wait, Record)
    else:
        kinds = (Wait, Record, Take, Free)
    places = [at for at, step in enumerate(found) if isinstance(step, kinds)]
    if not places:
        return found
    at = rng.choice(places)
    step = found.pop(at)
    if isinstance(step, Run | Wait | Record) and change == "exchange":
        streams = [each.stream for each in steps if isinstance(each, Run)]
        found.insert(at, evolve(step, stream=rng.choice(streams)))
    elif change == "move":
        near = at + rng.choice([-3, -2, -1, 1, 2, 3])
        found.insert(rng.choice([max(near, 0), rng.randrange(len(steps))]), step)
    return found
