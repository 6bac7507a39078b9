"""The work that a rank gives to its GPU in a step, stream by stream. It follows from the rank's
order.

The host gives work to streams and goes on at once. The work of one stream runs in its order. The
work of two streams runs in any order, unless one stream records an event after its work and the
other one waits for that event:

    compute       F0 ● ─ F1 ───────────── ○ B0        ● records an event
                     ╎                    ╎           ○ waits for it
    copies out       ○ OFFLOAD0 ●         ╎
                                ╎         ╎
    copies in                   ○ RELOAD0 ●

An action that does not compute, such as a copy or a transfer, begins with an event that the compute
stream records where the rank comes to the action, and ends with an event of its own stream. The
compute stream waits for that second event:

- before the first op that needs what the action brings;
- for a send, where a message shows that it was received (`schedlang.ranks.receipts`): then the wait
  takes no time, and the tensor is freed;
- for a copy to the host, where the rank begins the next one, or before the backward that needs the
  activation again: then the activation's memory is freed. So a rank holds at most one activation
  more than `schedlang.ranks.lifetimes` counts, whose copy is on its way.

Memory belongs to the compute stream. Whatever that stream runs next may write memory that was
freed, and may have used until now what is taken. `schedlang.ranks.hazards` proves of these steps
that no tensor is written or freed on one stream while another one may use it. The runtime records
and waits for exactly these events.
"""

from collections import defaultdict
from collections.abc import Sequence

from attrs import frozen

from schedlang.ranks.lifetimes import Holds, lifetimes
from schedlang.ranks.overlaps import overlapped_pairs
from schedlang.schedule.actions import is_send, is_transfer
from schedlang.schedule.kept import keeps
from schedlang.schedule.kinds import AWAITS, OPS, USES_WEIGHTS, Kind, Op
from schedlang.schedule.ops import COMPUTE
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport


@frozen
class Event:
    """An event of an action, which is given by its index: the event on the compute stream with
    which it begins, or with `is_end`, the event on its own stream with which it ends. Transfers of
    a batch share the events of the first of them.
    """

    action: int
    is_end: bool


@frozen
class Take:
    """A tensor allocates its memory. Its number is the index of the action that makes it, or of the
    transfer that sends it.
    """

    tensor: int


@frozen
class Free:
    """A tensor frees its memory."""

    tensor: int


@frozen
class Run:
    """A stream runs actions as one, by their indices."""

    stream: str
    actions: tuple[int, ...]


@frozen
class Record:
    """A stream records an event after its work so far."""

    stream: str
    event: Event


@frozen
class Wait:
    """A stream waits for an event before its next work."""

    stream: str
    event: Event


Step = Take | Free | Run | Record | Wait


def gpu_steps(schedule: Schedule, rank: int, transport: Transport) -> list[Step]:
    """The steps that a rank's host gives to its GPU, in order, on a transport."""
    return _Host(schedule, rank, transport).steps


class _Host:
    """The host of a rank, which comes to its actions one after the other."""

    def __init__(self, schedule: Schedule, rank: int, transport: Transport) -> None:
        self.schedule = schedule
        self.rank = rank
        self.transport = transport
        self.actions = schedule.ranks[rank]
        self.steps: list[Step] = []
        self.pairs = overlapped_pairs(self.actions)
        self.places = {
            self.actions.at(index): index for index in range(len(self.actions))
        }
        #: By action: the outputs that it makes and others receive; the tensors that it uses for the
        #: last time; and the sends that are known there to have been received.
        self.sent_from: dict[int, list[int]] = defaultdict(list)
        self.used_last: dict[int, list[int]] = defaultdict(list)
        self.received_by: dict[int, list[int]] = defaultdict(list)
        self._place_tensors()
        #: The end event of each transfer that has begun.
        self.ends: dict[int, Event] = {}
        #: The copy to the host that began last, while nothing has waited for it.
        self.leaving: int | None = None
        #: By stage and microbatch, actions beside that an op has yet to wait for: the reload, and
        #: other ops of the microbatch.
        self.reloads: dict[tuple[int, int], int] = {}
        self.beside: dict[tuple[int, int], list[int]] = defaultdict(list)
        #: By stage: the action that brought the weights; that action, while nothing has waited for
        #: it; and sums, gradients that were received, and what was passed on, likewise.
        self.weights: dict[int, int] = {}
        self.arriving: dict[int, int] = {}
        self.sums: dict[int, list[int]] = defaultdict(list)
        self.gradients: dict[int, list[int]] = defaultdict(list)
        self.passed_on: dict[int, list[int]] = defaultdict(list)
        for batch in self.actions.batches():
            if is_transfer(self.actions.kind[batch.start]):
                self._transfers(batch)
            else:
                self._ops(batch)
        self._end()

    def _place_tensors(self) -> None:
        for each in lifetimes(self.schedule, self.rank):
            if each.what == Holds.SENT:
                self.sent_from[each.start].append(each.action)
                self.received_by[each.stop].append(each.action)
            elif each.what == Holds.RECEIVED:
                self.used_last[each.stop].append(each.action)
            elif each.what == Holds.ACTIVATION:
                is_copied = OPS[self.actions.kind[each.stop]].is_copy
                if each.start != each.stop and not is_copied:
                    self.used_last[each.stop].append(each.action)
        # The runtime waits for sends in the order in which they were issued.
        for sends in self.received_by.values():
            sends.sort()

    def _transfers(self, batch: range) -> None:
        if self.transport.splits_batches:
            parts = [range(index, index + 1) for index in batch]
        else:
            parts = [batch]
        for part in parts:
            for index in part:
                if not is_send(self.actions.kind[index]):
                    self._take(index)
            self._issue(self._lane(part), part)
            for index in part:
                self.ends[index] = Event(part.start, is_end=True)
            for index in part:
                self._end_sends(index)

    def _lane(self, part: range) -> str:
        """The stream of transfers that are issued as one."""
        if self.transport.lane == "none":
            return f"lane of {part.start}"
        peer = self.schedule.peer_of(self.rank, part.start)
        number = self.transport.lanes(
            len(self.schedule.ranks),
            -1 if peer is None else peer,
            is_send(self.actions.kind[part.start]),
            len(part),
        )
        return f"lane {number}"

    def _ops(self, batch: range) -> None:
        # The two of a pair take turns, so both begin once both have what they need.
        pairs = {each: self.pairs[each] for each in batch if each in self.pairs}
        for first, second in pairs.items():
            self._compute((first, second))
        together = {*pairs, *pairs.values()}
        for index in batch:
            if index in together:
                continue
            op = OPS[self.actions.kind[index]]
            if not op.is_beside:
                self._compute((index,))
            elif op.is_of_stage:
                self._collective(index, op)
            else:
                self._run_beside(index, op)

    def _compute(self, indices: tuple[int, ...]) -> None:
        for index in indices:
            self._wait_for_needs(index)
        for index in indices:
            kind, stage, microbatch = self.actions.at(index)
            stays = keeps(self.schedule, kind, stage, microbatch)
            if OPS[kind].holds > 0 and stays:
                self._take(index)
            for send in self.sent_from[index]:
                self._take(send)
        self.steps.append(Run(COMPUTE, indices))
        for index in indices:
            for tensor in self.used_last[index]:
                self._free(tensor)
            if OPS[self.actions.kind[index]].is_update:
                for tensor in self.sums.pop(self.actions.stage[index], ()):
                    self._free(tensor)

    def _wait_for_needs(self, index: int) -> None:
        """Before an op, wait for what it needs from other streams."""
        kind, stage, microbatch = self.actions.at(index)
        if kind in USES_WEIGHTS:
            self._wait_for_weights(stage)
        if OPS[kind].is_update:
            for action in self.sums[stage]:
                self._wait(Event(action, is_end=True))
        if kind in AWAITS:
            for number in self.schedule.layout.numbers(AWAITS[kind], stage):
                receive = self.places.get((AWAITS[kind], number, microbatch))
                if receive in self.ends:
                    self._wait(self.ends[receive])
        self._end_sends(index)
        if (stage, microbatch) in self.reloads:
            reload = self.reloads.pop((stage, microbatch))
            self._wait(Event(reload, is_end=True))
            offload = self._offload_of(reload)
            # The reload has waited for the copy to the host.
            if self.leaving == offload:
                self._free_activation()
            self._free(offload)
        for action in [
            each
            for each in self.beside[stage, microbatch]
            if kind in OPS[self.actions.kind[each]].before
        ]:
            self._wait(Event(action, is_end=True))
            self.beside[stage, microbatch].remove(action)

    def _run_beside(self, index: int, op: Op) -> None:
        """A copy, or another op of a microbatch on a stream of its own."""
        _, stage, microbatch = self.actions.at(index)
        if not op.is_copy:
            self._issue(op.stream, (index,))
            self.beside[stage, microbatch].append(index)
        elif op.holds < 0:
            if self.leaving is not None:
                self._wait(Event(self.leaving, is_end=True))
                self._free_activation()
            self._take(index)
            self._issue(op.stream, (index,))
            self.leaving = index
        else:
            self._take(index)
            offload = self._offload_of(index)
            self._issue(op.stream, (index,), [Event(offload, is_end=True)])
            self.reloads[stage, microbatch] = index

    def _offload_of(self, reload: int) -> int:
        kind, stage, microbatch = self.actions.at(reload)
        offload = OPS[kind].follows
        assert offload is not None
        return self.places[offload, stage, microbatch]

    def _free_activation(self) -> None:
        """Free the activation whose copy to the host began last, which is over."""
        assert self.leaving is not None
        _, stage, microbatch = self.actions.at(self.leaving)
        self._free(self.places[Kind.F, stage, microbatch])
        self.leaving = None

    def _collective(self, index: int, op: Op) -> None:
        """An op that moves weights or gradients of a stage, or lets go of weights."""
        stage = self.actions.stage[index]
        if op.weights == "bring":
            self._take(index)
            self._issue(op.stream, (index,))
            self.weights[stage] = self.arriving[stage] = index
        elif op.weights == "pass on":
            self._wait_for_weights(stage)
            self._issue(op.stream, (index,))
            self.passed_on[stage].append(index)
        elif op.weights == "drop":
            self._wait_for_weights(stage)
            self._end_passing_on(stage)
            if stage in self.weights:
                self._free(self.weights.pop(stage))
        elif op.gradients == "take":
            self._take(index)
            self._issue(op.stream, (index,))
            self.gradients[stage].append(index)
        else:
            # The gradients are put in one piece of memory, which is summed or sent.
            received = self.gradients.pop(stage, [])
            for action in received:
                self._wait(Event(action, is_end=True))
            self._take(index)
            self.steps.append(Run(COMPUTE, (index,)))
            for action in received:
                self._free(action)
            self._issue(op.stream, (index,))
            of_kind = self.sums if op.gradients == "sum" else self.passed_on
            of_kind[stage].append(index)

    def _wait_for_weights(self, stage: int) -> None:
        if stage in self.arriving:
            self._wait(Event(self.arriving.pop(stage), is_end=True))

    def _end_passing_on(self, stage: int) -> None:
        """Wait for all weights and gradients of a stage that were passed on."""
        for action in self.passed_on.pop(stage, []):
            self._wait(Event(action, is_end=True))
            if OPS[self.actions.kind[action]].gradients:
                self._free(action)

    def _end_sends(self, index: int) -> None:
        """Free what is known to have been received by the time the rank is at an action."""
        for send in self.received_by[index]:
            self._wait(self.ends[send])
            self._free(send)

    def _end(self) -> None:
        """The end of the step: wait for all that goes on, and take the gradients that came."""
        self._end_sends(len(self.actions))
        for stage in sorted({*self.passed_on, *self.gradients, *self.sums}):
            self._end_passing_on(stage)
            came = [*self.gradients.pop(stage, ()), *self.sums.pop(stage, ())]
            for action in came:
                self._wait(Event(action, is_end=True))
            if came:
                self.steps.append(Run(COMPUTE, tuple(came)))
            for action in came:
                self._free(action)

    def _issue(
        self, stream: str, actions: Sequence[int], events: Sequence[Event] = ()
    ) -> None:
        """Let a stream run actions as one, behind what was computed so far and behind events."""
        begin = Event(actions[0], is_end=False)
        self.steps.append(Record(COMPUTE, begin))
        for event in (begin, *events):
            self.steps.append(Wait(stream, event))
        self.steps.append(Run(stream, tuple(actions)))
        self.steps.append(Record(stream, Event(actions[0], is_end=True)))

    def _wait(self, event: Event) -> None:
        self.steps.append(Wait(COMPUTE, event))

    def _take(self, tensor: int) -> None:
        self.steps.append(Take(tensor))

    def _free(self, tensor: int) -> None:
        self.steps.append(Free(tensor))
