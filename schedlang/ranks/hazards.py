"""Proves that no tensor of a rank is written or freed on one stream of its GPU while another stream
may use it.

The proof reads what the actions of a rank do, from their rows, and the steps that its host gives
the GPU (`schedlang.ranks.gpu_streams`), whoever has derived these. Each stream has a clock: how far
each other stream must have come by then, by the events that were waited for. Of two steps that use
one tensor, of which one writes it, the later one must know that the earlier one is over. To take
memory and to free it are writes of the compute stream, since that one uses the memory before and
afterwards.

A wait for an event that was not recorded yet waits for nothing, as in CUDA.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from attrs import define, field, frozen

from schedlang.ranks.gpu_streams import (
    Event,
    Free,
    Record,
    Run,
    Step,
    Take,
    Wait,
    gpu_steps,
)
from schedlang.schedule.actions import is_send, is_transfer
from schedlang.schedule.kept import keeps
from schedlang.schedule.kinds import HANDS_ON, OPS, READS, USES_WEIGHTS, Kind, Op
from schedlang.schedule.ops import COMPUTE
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport


@frozen
class Use:
    """The tensors that an action reads and writes, named as in the steps."""

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


@frozen
class Hazard:
    """A tensor that a step uses, though another step on the stream `other` may still write it or
    read it, or though nothing was written there (`other` is None).
    """

    tensor: int
    step: Step
    other: str | None = None

    def __str__(self) -> str:
        if self.other is None:
            return f"{self.step} uses tensor {self.tensor}, which is not there"
        return f"{self.step} uses tensor {self.tensor} beside the stream `{self.other}`"


def check_hazards(schedule: Schedule, rank: int, transport: Transport) -> None:
    """RuntimeError if the streams of a rank have a hazard, where messages go by a transport."""
    for hazard in hazards(schedule, rank, gpu_steps(schedule, rank, transport)):
        raise RuntimeError(f"the streams of rank {rank} have a hazard: {hazard}")


#: For each stream, how many of its steps are over.
Clock = dict[str, int]


@define
class _Tensor:
    """A tensor whose memory is taken: by which step it was written last, as the stream and its
    count, and the last step of each stream that has read it.
    """

    written: tuple[str, int]
    is_filled: bool = False
    reads: Clock = field(factory=dict)


def hazards(schedule: Schedule, rank: int, steps: Iterable[Step]) -> Iterator[Hazard]:
    """The hazards in the steps that a rank gives to its GPU."""
    uses = uses_of(schedule, rank)
    clocks: dict[str, Clock] = defaultdict(dict)
    events: dict[Event, Clock] = {}
    tensors: dict[int, _Tensor] = {}

    def begin(stream: str) -> tuple[str, int]:
        clock = clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        return stream, clock[stream]

    def may_run(tensor: _Tensor, stream: str, is_write: bool) -> str | None:
        """A stream that may still use a tensor, or write it, when another one does."""
        used = [tensor.written, *(tensor.reads.items() if is_write else ())]
        known = clocks[stream]
        return next((one for one, count in used if count > known.get(one, 0)), None)

    for step in steps:
        match step:
            case Record(stream, event):
                events[event] = dict(clocks[stream])
            case Wait(stream, event):
                clock = clocks[stream]
                for other, count in events.get(event, {}).items():
                    clock[other] = max(clock.get(other, 0), count)
            case Take(number):
                tensors[number] = _Tensor(begin(COMPUTE))
            case Free(number):
                tensor = tensors.pop(number, None)
                if tensor is None:
                    yield Hazard(number, step)
                elif using := may_run(tensor, COMPUTE, is_write=True):
                    yield Hazard(number, step, using)
                begin(COMPUTE)
            case Run(stream, actions):
                now = begin(stream)
                for action in actions:
                    use = uses[action, stream == COMPUTE]
                    for number in sorted(use.reads | use.writes):
                        is_write = number in use.writes
                        tensor = tensors.get(number)
                        is_read = number in use.reads
                        if tensor is None or (is_read and not tensor.is_filled):
                            yield Hazard(number, step)
                            continue
                        if using := may_run(tensor, stream, is_write):
                            yield Hazard(number, step, using)
                        if is_write:
                            tensor.written = now
                            tensor.is_filled = True
                        else:
                            tensor.reads[stream] = now[1]


def uses_of(schedule: Schedule, rank: int) -> dict[tuple[int, bool], Use]:
    """The tensors that each action of a rank reads and writes, by its index, on the compute stream
    (True) and on another one (False).
    """
    return _Uses(schedule, rank).found


class _Uses:
    """Reads the rows of a rank's actions, and tracks where each tensor is."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        actions = schedule.ranks[rank]
        self.places = {actions.at(index): index for index in range(len(actions))}
        self.found: dict[tuple[int, bool], Use] = defaultdict(Use)
        #: By stage and microbatch the activation on the GPU, and the one on the host.
        self.activations: dict[tuple[int, int], int] = {}
        self.on_host: dict[tuple[int, int], int] = {}
        #: By stage the weights that were brought, gradients that were received, and their sums.
        self.weights: dict[int, int] = {}
        self.gradients: dict[int, list[int]] = defaultdict(list)
        self.sums: dict[int, list[int]] = defaultdict(list)
        for index, (kind, stage, microbatch) in enumerate(actions.each()):
            if is_transfer(kind):
                own = frozenset({index})
                use = Use(reads=own) if is_send(kind) else Use(writes=own)
                self.found[index, False] = use
            elif OPS[kind].is_of_stage:
                self._use_of_stage(index, stage, OPS[kind])
            else:
                self._use_of_microbatch(index, kind, stage, microbatch)

    def _use_of_microbatch(
        self, index: int, kind: int, stage: int, microbatch: int
    ) -> None:
        op = OPS[kind]
        what = stage, microbatch
        reads = self._messages(READS, kind, stage, microbatch)
        writes = self._messages(HANDS_ON, kind, stage, microbatch)
        if kind in USES_WEIGHTS and stage in self.weights:
            reads.add(self.weights[stage])
        if op.is_copy and op.holds > 0:
            reads.add(self.on_host[what])
        elif op.holds <= 0 and op.of == "own" and what in self.activations:
            reads.add(self.activations[what])
        if op.is_copy and op.holds < 0:
            writes.add(index)
            self.on_host[what] = index
            del self.activations[what]
        elif op.holds > 0 and keeps(self.schedule, kind, stage, microbatch):
            writes.add(index)
            self.activations[what] = index
        elif op.before:
            # Others wait for the op, since it changes what they read.
            writes |= reads
        use = Use(frozenset(reads), frozenset(writes))
        self.found[index, not op.is_beside] = use

    def _messages(
        self, kinds: dict[int, Kind], kind: int, stage: int, microbatch: int
    ) -> set[int]:
        """The indices of the transfers that an op reads or hands on."""
        if kind not in kinds:
            return set()
        transfer = kinds[kind]
        keys = [
            (transfer, number, microbatch)
            for number in self.schedule.layout.numbers(transfer, stage)
        ]
        return {self.places[key] for key in keys if key in self.places}

    def _use_of_stage(self, index: int, stage: int, op: Op) -> None:
        own = frozenset({index})
        if op.is_update:
            self.found[index, True] = Use(reads=frozenset(self.sums.pop(stage, ())))
        elif op.weights == "bring":
            self.weights[stage] = index
            self.found[index, False] = Use(writes=own)
        elif op.weights == "pass on":
            brought = {self.weights[stage]} if stage in self.weights else ()
            self.found[index, False] = Use(reads=frozenset(brought))
        elif op.weights == "drop":
            self.weights.pop(stage, None)
        elif op.gradients == "take":
            self.gradients[stage].append(index)
            self.found[index, False] = Use(writes=own)
            self.found[index, True] = Use(reads=own)
        else:
            # Gradients are put in one piece first, with those that were received.
            received = frozenset(self.gradients.pop(stage, ()))
            is_sum = op.gradients == "sum"
            self.found[index, False] = Use(own, own if is_sum else frozenset())
            self.found[index, True] = Use(received, own)
            if is_sum:
                self.sums[stage].append(index)
