"""Runs a schedule without data: order, transfers, deadlock, memory and time in one execution.

Every rank does its actions in order. A send and its receive complete together, once both their ranks stand there:
sends are completed only by their receives, which is the strictest thing a transport can do (`blocking`). A batch is
issued as one, and its rank goes on when all of it is complete. Whatever a rank waits for stays there once it is there,
so the order in which ranks are visited does not matter, and one execution decides (Kahn 1974): it reaches the end, or
the standstill that every execution reaches. It takes time linear in the actions.
"""

from collections import deque

from attrs import frozen

from schedlang.costs import Costs
from schedlang.diagnostics import CompileError
from schedlang.findings import Finding, diagnose
from schedlang.schedule import Kind, Schedule, is_send, is_transfer, word
from schedlang.standstill import explain_standstill
from schedlang.structure import check_structure
from schedlang.timeline import Bar, Timeline

# What has happened to a microbatch on a stage, one bit each.
_FORWARD, _BACKWARD, _WEIGHT, _INPUT, _GRADIENT, _SENT_F, _SENT_B = (1 << bit for bit in range(7))

# What a transfer needs on its own rank, what marks it as sent, and what its arrival gives.
_PRODUCED = {Kind.SEND_F: _FORWARD, Kind.SEND_B: _BACKWARD}
_SENT = {Kind.SEND_F: _SENT_F, Kind.SEND_B: _SENT_B}
_ARRIVED = {Kind.RECV_F: _INPUT, Kind.RECV_B: _GRADIENT}
_COUNTERPART = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


@frozen
class Execution:
    """What an execution shows of a schedule that runs to its end.

    `peak_activations[r]` counts stage activations, one per stage and microbatch, held from the forward to the last
    use: the whole backward, or the weight half.
    """

    timeline: Timeline
    peak_activations: tuple[int, ...]


def prove(schedule: Schedule) -> Execution:
    """Check a schedule with communication in every way; CompileError with all that is wrong with it."""
    check_structure(schedule)
    return simulate(schedule, Costs())


def simulate(schedule: Schedule, costs: Costs) -> Execution:
    """The execution with durations: an op starts when its rank is free and what it needs is there.

    What crosses ranks takes `costs.p2p` from the end of the op that made it. ValueError for a wrong number of costs;
    CompileError for a schedule that does not run.
    """
    return _Machine(schedule, costs).run()


class _Machine:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.p2p = schedule, costs.p2p
        self.durations = costs.table(len(schedule.placement))
        self.findings: list[Finding] = []
        ranks, slots = len(schedule.ranks), len(schedule.placement) * schedule.microbatches
        self.position = [0] * ranks
        self.clock = [0.0] * ranks
        self.bars: list[list[Bar]] = [[] for _ in range(ranks)]
        self.held = [0] * ranks
        self.peak = [0] * ranks
        #: How much of the batch that a rank stands at is not complete.
        self.incomplete = [0] * ranks
        self.ready = deque(range(ranks))
        #: For each ordered pair of ranks, the sends or the receives that wait for the other side, as (rank, index).
        self.channels: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        #: Indexed by stage * microbatches + microbatch.
        self.state = bytearray(slots)
        self.forward_end = [0.0] * slots
        self.backward_end = [0.0] * slots

    def run(self) -> Execution:
        while self.ready:
            self.advance(self.ready.popleft())
        if any(position < len(actions) for position, actions in zip(self.position, self.schedule.ranks, strict=True)):
            self.findings += explain_standstill(self.schedule, self.position, self.waiting(), bool(self.findings))
        if self.findings:
            raise CompileError(diagnose(self.schedule, self.findings))
        return Execution(Timeline(tuple(map(tuple, self.bars))), tuple(self.peak))

    def advance(self, rank: int) -> None:
        """Do the rank's actions up to a batch that does not complete, or the end."""
        actions = self.schedule.ranks[rank]
        while self.position[rank] < len(actions):
            index = self.position[rank]
            if is_transfer(actions.kind[index]):
                batch = actions.batch(index)
                self.incomplete[rank] = len(batch)
                for each in batch:
                    self.offer(rank, each)
                if self.incomplete[rank]:
                    return
                self.position[rank] = batch.stop
            else:
                self.compute(rank, index)
                self.position[rank] += 1

    def compute(self, rank: int, index: int) -> None:
        """Do a compute op: check what it needs, give it its time, note what it makes."""
        actions = self.schedule.ranks[rank]
        kind, stage, microbatch = actions.kind[index], actions.stage[index], actions.microbatch[index]
        start = self.clock[rank]
        if kind == Kind.U:
            self.update(rank, index)
        else:
            slot = stage * self.schedule.microbatches + microbatch
            if kind == Kind.F:
                start = max(start, self.forward(rank, index, slot))
                self.held[rank] += 1
                self.peak[rank] = max(self.peak[rank], self.held[rank])
            elif kind == Kind.W:
                if not self.state[slot] & _BACKWARD:
                    self.too_early(rank, index, word(Kind.I, stage, microbatch))
            else:
                start = max(start, self.backward(rank, index, slot))
            self.state[slot] |= {Kind.F: _FORWARD, Kind.B: _BACKWARD | _WEIGHT, Kind.I: _BACKWARD, Kind.W: _WEIGHT}[
                Kind(kind)
            ]
            self.held[rank] -= kind in (Kind.B, Kind.W)
        end = self.clock[rank] = start + self.durations[kind][stage]
        self.bars[rank].append(Bar(kind, stage, microbatch, start, end))
        if kind == Kind.F:
            self.forward_end[slot] = end
        elif kind in (Kind.B, Kind.I):
            self.backward_end[slot] = end

    def forward(self, rank: int, index: int, slot: int) -> float:
        """Check that a forward has its input; the time at which it is there."""
        stage, microbatch = self.named(rank, index)
        if stage == 0:
            return 0.0
        return self.input(rank, index, slot, Kind.RECV_F, slot - self.schedule.microbatches,
                          word(Kind.F, stage - 1, microbatch), _FORWARD, self.forward_end)  # fmt: skip

    def backward(self, rank: int, index: int, slot: int) -> float:
        """Check that a backward has its forward and its gradient; the time at which they are there."""
        stage, microbatch = self.named(rank, index)
        if not self.state[slot] & _FORWARD:
            self.too_early(rank, index, word(Kind.F, stage, microbatch))
        if stage == len(self.schedule.placement) - 1:
            return self.forward_end[slot]
        return self.input(rank, index, slot, Kind.RECV_B, slot + self.schedule.microbatches,
                          f"the backward of stage {stage + 1}", _BACKWARD, self.backward_end)  # fmt: skip

    def input(
        self, rank: int, index: int, slot: int, receive: Kind, maker: int, made_by: str, bit: int, ends: list[float]
    ) -> float:
        """Check that what a neighbour stage makes is on this rank: made here, or received; the time it is there."""
        stage, microbatch = self.named(rank, index)
        if self.schedule.peer(receive, stage) is None:
            if not self.state[maker] & bit:
                self.too_early(rank, index, made_by)
            return ends[maker]
        if not self.state[slot] & _ARRIVED[receive]:
            help = "a program that writes any `send` or `recv` must write all of them"
            self.too_early(rank, index, word(receive, stage, microbatch), help)
        return ends[maker] + self.p2p

    def update(self, rank: int, index: int) -> None:
        """Check that an optimizer step has all gradients of its stage."""
        stage = self.schedule.ranks[rank].stage[index]
        microbatches = self.schedule.microbatches
        for microbatch in range(microbatches):
            if not self.state[stage * microbatches + microbatch] & _WEIGHT:
                self.too_early(rank, index, f"the weight gradient of microbatch {microbatch}")
                return

    def offer(self, rank: int, index: int) -> None:
        """Put a transfer on its channel, where it meets the other side or waits for it."""
        actions = self.schedule.ranks[rank]
        kind, stage, microbatch = Kind(actions.kind[index]), actions.stage[index], actions.microbatch[index]
        peer = self.schedule.peer(kind, stage)
        if peer is None:
            self.find("transfer", f"`{actions.word(index)}` has no other rank to reach", rank, index)
            self.incomplete[rank] -= 1
            return
        if is_send(kind):
            slot = stage * self.schedule.microbatches + microbatch
            if not self.state[slot] & _PRODUCED[kind]:
                self.too_early(rank, index, word(Kind.F if kind == Kind.SEND_F else Kind.B, stage, microbatch))
            elif self.state[slot] & _SENT[kind]:
                self.find("repeated-send", f"`{actions.word(index)}` is sent twice", rank, index)
            self.state[slot] |= _SENT[kind]
        channel = self.channels.setdefault((rank, peer) if is_send(kind) else (peer, rank), deque())
        if channel and channel[0][0] != rank:
            self.meet((rank, index), channel.popleft())
        else:
            channel.append((rank, index))

    def meet(self, here: tuple[int, int], there: tuple[int, int]) -> None:
        """A send and a receive complete; the rank that waited goes on when its batch is complete."""
        sent, received = (here, there) if is_send(self.schedule.ranks[here[0]].kind[here[1]]) else (there, here)
        actions, index = self.schedule.ranks[sent[0]], sent[1]
        kind = Kind(actions.kind[index])
        stage = actions.stage[index] + (1 if kind == Kind.SEND_F else -1)
        expected = word(_COUNTERPART[kind], stage, actions.microbatch[index])
        receiver, at = self.schedule.ranks[received[0]], received[1]
        if receiver.word(at) != expected:
            message = (
                f"rank {received[0]} receives `{receiver.word(at)}` where rank {sent[0]} sends `{actions.word(index)}`"
            )
            place = (actions.source[index], f"`{actions.word(index)}` is next on this channel")
            help = "messages between two ranks arrive in the order of their sends"
            self.find("mismatched-transfer", message, received[0], at, (place,), help)
        slot = receiver.stage[at] * self.schedule.microbatches + receiver.microbatch[at]
        self.state[slot] |= _ARRIVED[Kind(receiver.kind[at])]
        for rank in (here[0], there[0]):
            self.incomplete[rank] -= 1
        waiter = there[0]
        if not self.incomplete[waiter]:
            self.position[waiter] = self.schedule.ranks[waiter].batch(self.position[waiter]).stop
            self.ready.append(waiter)

    def waiting(self) -> list[tuple[int, int]]:
        """The transfers that wait for their other side, as (rank, index)."""
        return sorted(each for channel in self.channels.values() for each in channel)

    def named(self, rank: int, index: int) -> tuple[int, int]:
        """Stage and microbatch of an action."""
        return self.schedule.ranks[rank].stage[index], self.schedule.ranks[rank].microbatch[index]

    def too_early(self, rank: int, index: int, needs: str, help: str | None = None) -> None:
        """Report an action that runs before what it needs."""
        what = needs if " " in needs else f"`{needs}`"
        message = f"`{self.schedule.ranks[rank].word(index)}` on rank {rank} runs before {what}"
        self.find("order", message, rank, index, help=help)

    def find(
        self,
        code: str,
        message: str,
        rank: int,
        index: int,
        related: tuple[tuple[int, str], ...] = (),
        help: str | None = None,
    ) -> None:
        """Report what is wrong with an action."""
        place = self.schedule.ranks[rank].source[index]
        self.findings.append(Finding(code, message, rank, place, related=related, help=help))
