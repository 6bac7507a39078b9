"""Runs a schedule without data: order, transfers, deadlock, memory and time in one execution.

Every rank does its actions in order. A send and its receive complete together, once both their ranks stand there:
sends are completed only by their receives, which is the strictest thing a transport can do (`blocking`). A batch is
issued as one, and its rank goes on when all of it is complete. Whatever a rank waits for stays there once it is there,
so the order in which ranks are visited does not matter, and one execution decides (Kahn 1974): it reaches the end, or
the standstill that every execution reaches. It takes time linear in the actions.
"""

from array import array
from collections import deque
from heapq import heappop, heappush

from attrs import frozen

from schedlang.actions import counterpart, is_copy, is_send, is_transfer, word
from schedlang.costs import UNIT, Costs
from schedlang.dependencies import MAKES, SENDS, Op, needs
from schedlang.diagnostics import CompileError
from schedlang.findings import Finding, diagnose
from schedlang.kinds import Kind
from schedlang.memory import Level
from schedlang.schedule import Schedule
from schedlang.standstill import explain_standstill
from schedlang.structure import check_structure
from schedlang.timeline import Bar, Timeline
from schedlang.versions import follow_weights

# What has happened to a microbatch on a stage, one bit each: made there, arrived there, sent from there.
_MADE = {Kind.F: 1, Kind.B: 2, Kind.W: 4, Kind.R: 128, Kind.OFFLOAD: 256, Kind.RELOAD: 512}
_ARRIVED = {Kind.RECV_F: 8, Kind.RECV_B: 16}
_SENT = {Kind.SEND_F: 32, Kind.SEND_B: 64}
_SENT_OF = {send: made for made, send in SENDS.items()}


@frozen
class Execution:
    """What an execution shows of a schedule that runs to its end.

    `peak_activations[r]` counts stage activations, one per stage and microbatch, held from the forward to the last
    use: the whole backward, or the weight half. `peak_memory[r]` is the same in the program's amounts.
    """

    timeline: Timeline
    peak_activations: tuple[int, ...]
    peak_memory: tuple[float, ...]


def prove(schedule: Schedule) -> Execution:
    """Check a schedule with communication in every way; CompileError with all that is wrong with it."""
    check_structure(schedule)
    execution = simulate(schedule)
    findings = follow_weights(schedule).findings
    if findings:
        raise CompileError(diagnose(schedule, list(findings)))
    return execution


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Execution:
    """The execution with durations: an op starts when its rank is free and what it needs is there.

    What crosses ranks takes `costs.p2p` from the end of the op that made it. What `costs` leave open is as the program
    gave it. ValueError for a wrong number of costs; CompileError for a schedule that does not run.
    """
    return _Machine(schedule, costs.over(schedule.costs)).run()


class _Machine:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.p2p = schedule, costs.p2p or 0.0
        self.durations = costs.durations(len(schedule.placement))
        self.findings: list[Finding] = []
        self.stride = max(map(schedule.layout.units, range(len(schedule.placement))))
        ranks, slots = len(schedule.ranks), len(schedule.placement) * self.stride
        self.position = [0] * ranks
        self.clock = [0.0] * ranks
        self.bars: list[list[Bar]] = [[] for _ in range(ranks)]
        self.copies: list[list[Bar]] = [[] for _ in range(ranks)]
        #: The link to the host of each rank, and when each is free again.
        self.links = schedule.layout.links or tuple(range(ranks))
        self.link_free = dict.fromkeys(self.links, 0.0)
        self.shares_links = len(self.link_free) < ranks and bool(schedule.offloaded)
        #: By stage activations, and by the program's amounts: what each op adds, and the level of each rank.
        self.memories = [
            (each.memory(len(schedule.placement)), [Level() for _ in range(ranks)]) for each in (UNIT, costs)
        ]
        #: How much of the batch that a rank stands at is not complete.
        self.incomplete = [0] * ranks
        #: The ranks that can go on, by their clocks.
        self.ready = [(0.0, rank) for rank in range(ranks)]
        #: For each ordered pair of ranks, the sends or the receives that wait for the other side, as (rank, index).
        self.channels: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        #: Indexed by `slot`.
        self.state = array("H", bytes(2 * slots))
        self.ends = {kind: [0.0] * slots for kind in _MADE}

    def run(self) -> Execution:
        while self.ready:
            self.advance(heappop(self.ready)[1])
        if any(position < len(actions) for position, actions in zip(self.position, self.schedule.ranks, strict=True)):
            self.findings += explain_standstill(self.schedule, self.position, self.waiting(), bool(self.findings))
        if self.findings:
            raise CompileError(diagnose(self.schedule, self.findings))
        for _, levels in self.memories:
            for level in levels:
                level.advance()
        activations, memory = ([level.peak for level in levels] for _, levels in self.memories)
        timeline = Timeline(tuple(map(tuple, self.bars)), tuple(map(tuple, self.copies)))
        return Execution(timeline, tuple(map(int, activations)), tuple(memory))

    def advance(self, rank: int) -> None:
        """Do the rank's actions up to a batch that does not complete, or the end."""
        actions = self.schedule.ranks[rank]
        while self.position[rank] < len(actions):
            index = self.position[rank]
            batch = actions.batch(index)
            if is_transfer(actions.kind[index]):
                self.incomplete[rank] = len(batch)
                for each in batch:
                    self.offer(rank, each)
                if self.incomplete[rank]:
                    return
            elif is_copy(actions.kind[index]):
                self.copy(rank, index)
            else:
                self.compute(rank, batch)
            self.position[rank] = batch.stop
            if self.shares_links:
                # Copies of several ranks take their turns on a link in order of time.
                heappush(self.ready, (self.clock[rank], rank))
                return

    def compute(self, rank: int, batch: range) -> None:
        """Do a compute op, or ops that overlap: check what they need, give them their time, note what they make."""
        ops = [self.schedule.ranks[rank].row(index)[:3] for index in batch]
        start = self.clock[rank]
        for index, op in zip(batch, ops, strict=True):
            for need in needs(self.schedule, *op):
                start = max(start, self.available(rank, index, need))
        end = start
        for kind, stage, microbatch in ops:
            begin, end = end, end + self.durations[kind][stage]
            self.bars[rank].append(Bar(kind, stage, microbatch, begin, end))
            self.hold(rank, kind, stage, microbatch, begin, end)
        self.clock[rank] = end
        for op in ops:
            self.made(*op, end)

    def copy(self, rank: int, index: int) -> None:
        """Begin a copy to or from the host: it takes its turn on the rank's link, while the rank goes on."""
        kind, stage, microbatch = op = self.schedule.ranks[rank].row(index)[:3]
        link = self.links[rank]
        (need,) = needs(self.schedule, *op)
        begin = max(self.clock[rank], self.link_free[link], self.available(rank, index, need))
        end = self.link_free[link] = begin + self.durations[kind][stage]
        self.copies[rank].append(Bar(kind, stage, microbatch, begin, end))
        self.hold(rank, kind, stage, microbatch, begin, end)
        self.made(*op, end)

    def made(self, kind: int, stage: int, microbatch: int, end: float) -> None:
        """Note what an op has made."""
        for made in MAKES[kind]:
            slot = self.slot(stage, microbatch)
            self.state[slot] |= _MADE[made]
            self.ends[made][slot] = end

    def hold(self, rank: int, kind: int, stage: int, microbatch: int, begin: float, end: float) -> None:
        """Note what an op begins to hold when it begins, or ceases to hold when it ends."""
        for amounts, levels in self.memories:
            amount = amounts[kind][stage]
            levels[rank].advance(self.clock[rank])
            if not self.schedule.keeps(kind, stage, microbatch):
                levels[rank].hold(begin, amount)
            else:
                levels[rank].change(begin if amount > 0 else end, amount)

    def slot(self, stage: int, microbatch: int) -> int:
        """The index of a stage's microbatch in `state` and `ends`."""
        return stage * self.stride + microbatch

    def available(self, rank: int, index: int, need: Op) -> float:
        """Check that what an op needs is on its rank, made here or received; the time from which it is there."""
        kind, stage, microbatch = need
        slot = self.slot(stage, microbatch)
        if self.schedule.placement[stage] == rank:
            if not self.state[slot] & _MADE[kind]:
                self.too_early(rank, index, word(kind, stage, microbatch))
            return self.ends[kind][slot]
        receive, receiver = counterpart(SENDS[kind], stage)
        if not self.state[self.slot(receiver, microbatch)] & _ARRIVED[receive]:
            help = "a program that writes any `send` or `recv` must write all of them"
            self.too_early(rank, index, word(receive, receiver, microbatch), help)
        return self.ends[kind][slot] + self.p2p

    def offer(self, rank: int, index: int) -> None:
        """Put a transfer on its channel, where it meets the other side or waits for it."""
        actions = self.schedule.ranks[rank]
        kind, stage, microbatch = Kind(actions.kind[index]), actions.stage[index], actions.microbatch[index]
        peer = self.schedule.peer(kind, stage)
        if peer is None:
            message = f"`{actions.word(index)}` has no other rank to reach"
            self.find("unmatched-send" if is_send(kind) else "unmatched-receive", message, rank, index)
            self.incomplete[rank] -= 1
            return
        if is_send(kind):
            slot = self.slot(stage, microbatch)
            if not self.state[slot] & _MADE[_SENT_OF[kind]]:
                self.too_early(rank, index, word(_SENT_OF[kind], stage, microbatch))
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
        expected = word(*counterpart(kind, actions.stage[index]), actions.microbatch[index])
        receiver, at = self.schedule.ranks[received[0]], received[1]
        if receiver.word(at) != expected:
            message = (
                f"rank {received[0]} receives `{receiver.word(at)}` where rank {sent[0]} sends `{actions.word(index)}`"
            )
            place = (actions.source[index], f"`{actions.word(index)}` is next on this channel")
            help = "messages between two ranks arrive in the order of their sends"
            self.find("mismatched-transfer", message, received[0], at, (place,), help)
        slot = self.slot(receiver.stage[at], receiver.microbatch[at])
        self.state[slot] |= _ARRIVED[Kind(receiver.kind[at])]
        for rank in (here[0], there[0]):
            self.incomplete[rank] -= 1
        waiter = there[0]
        if not self.incomplete[waiter]:
            self.position[waiter] = self.schedule.ranks[waiter].batch(self.position[waiter]).stop
            heappush(self.ready, (self.clock[waiter], waiter))

    def waiting(self) -> list[tuple[int, int]]:
        """The transfers that wait for their other side, as (rank, index)."""
        return sorted(each for channel in self.channels.values() for each in channel)

    def too_early(self, rank: int, index: int, need: str, help: str | None = None) -> None:
        """Report an action that runs before what it needs."""
        message = f"`{self.schedule.ranks[rank].word(index)}` on rank {rank} runs before `{need}`"
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
