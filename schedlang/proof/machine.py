"""Runs a schedule without data: order, transfers, deadlock, memory and time in one execution.

Every rank does its actions in order; its transfers go their way on the network, by the rules of the
transport. Whatever a rank or a transfer waits for stays there once it is there, so the order in
which ranks are visited does not matter, and one execution decides (Kahn 1974): it reaches the end,
or the standstill that every execution reaches. It takes time linear in the actions.

Nor does that order matter for times: an op, a transfer or a rank goes on at the latest of the times
of what it waits for, and what that is follows from the plan alone. Only copies on a link that ranks
share are taken in order of time.
"""

from array import array
from heapq import heappop, heappush
from itertools import compress

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.proof.columnwise import is_large
from schedlang.proof.execution import Execution
from schedlang.proof.first_use import check_first_use
from schedlang.proof.network import Flight, Network
from schedlang.proof.standstill import Standstill
from schedlang.proof.structure import check_structure
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.actions import Actions, is_copy, is_send, is_transfer, word
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.kinds import Kind
from schedlang.schedule.needs import MAKES, SENDS, Op, needs, receive_of
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bars, Timeline
from schedlang.schedule.transports import Transport, timed, transports

# What has happened to a microbatch on a stage, one bit each: made there, arrived there, sent from
# there.
_MADE: dict[int, int] = {
    Kind.F: 1,
    Kind.B: 2,
    Kind.W: 4,
    Kind.R: 128,
    Kind.OFFLOAD: 256,
    Kind.RELOAD: 512,
}
_ARRIVED: dict[int, int] = {Kind.RECV_F: 8, Kind.RECV_B: 16}
_SENT: dict[int, int] = {Kind.SEND_F: 32, Kind.SEND_B: 64}
_SENT_OF: dict[int, Kind] = {send: made for made, send in SENDS.items()}


def prove(schedule: Schedule) -> Execution:
    """Check a schedule with communication in every way; CompileError with all that is wrong with
    it.

    The execution is the ideal one, see `simulate`.
    """
    check_structure(schedule)
    rules = transports(schedule.transport, any(map(has_batches, schedule.ranks)))
    execution, *_ = [_run(schedule, schedule.costs, each, ideal=True) for each in rules]
    findings = follow_weights(schedule).findings
    if findings:
        raise CompileError(diagnose(schedule, list(findings)))
    return execution


def has_batches(actions: Actions) -> bool:
    """Whether some transfers are issued as one."""
    return any(map(is_transfer, set(compress(actions.kind, actions.group))))


def simulate(schedule: Schedule, costs: Costs = UNIT, ideal: bool = False) -> Execution:
    """The execution with durations: an op starts when its rank is free and what it needs is there.

    Transfers go by the rules of the schedule's transport, those of a portable plan by gloo's
    (docs/transports.md, "How long transfers take"). In the `ideal` execution no transfer waits for
    another, nor a rank for its sends: only the time of `costs.transfers` counts. What `costs` leave
    open is as the program gave it. ValueError for a wrong number of costs; CompileError for a
    schedule that does not run there.
    """
    costs = costs.over(schedule.costs)
    costs.check(len(schedule.placement))
    return _run(schedule, costs, timed(schedule.transport), ideal)


def _run(schedule: Schedule, costs: Costs, transport: Transport, ideal: bool) -> Execution:
    timeline = None
    if is_large(schedule):
        from schedlang.proof.columnwise import execution

        timeline = execution.timeline(schedule, costs, transport, ideal)
    if timeline is None:
        timeline = _Machine(schedule, costs, transport, ideal).run()
    if transport.first_use:
        check_first_use(schedule)
    return Execution("ideal" if ideal else transport.name, schedule, costs, timeline)


class _Machine:
    def __init__(self, schedule: Schedule, costs: Costs, transport: Transport, ideal: bool) -> None:
        self.schedule = schedule
        self.ideal = ideal
        stages = len(schedule.placement)
        self.durations = costs.durations(stages)
        self.transfers = costs.transfers(stages)
        self.transport = transport
        self.network = Network(schedule, transport, self.transfers)
        self.findings: list[Finding] = []
        self.stride = max(map(schedule.layout.units, range(stages)))
        ranks = len(schedule.ranks)
        slots = (stages + len(schedule.layout.skip_stages)) * self.stride
        self.position = [0] * ranks
        self.clock = [0.0] * ranks
        self.bars = [Bars() for _ in range(ranks)]
        self.copies = [Bars() for _ in range(ranks)]
        #: The link to the host of each rank, and when each is free again.
        self.links = schedule.layout.links or tuple(range(ranks))
        self.link_free = dict.fromkeys(self.links, 0.0)
        self.shares_links = len(self.link_free) < ranks and bool(schedule.offloaded)
        #: The ranks that can go on, by their clocks.
        self.ready = [(0.0, rank) for rank in range(ranks)]
        #: Where ranks do not block: the receives issued, and the one that a rank waits for before
        #: an op.
        self.posted: dict[tuple[int, int, int], int] = {}
        self.awaited: dict[int, int] = {}
        #: Whether optimizer steps wait for gradients of replicas; the ranks that do, by a gradient
        #: that is not there.
        self.has_sums = len(schedule.layout.pipelines) > 1 and schedule.has_updates
        self.summing: dict[Op, list[int]] = {}
        #: Indexed by `slot`.
        self.state = array("H", bytes(2 * slots))
        self.ends = {kind: [0.0] * slots for kind in _MADE}
        self.arrivals = {kind: [0.0] * slots for kind in _ARRIVED}

    def run(self) -> Timeline:
        while self.ready:
            self.advance(heappop(self.ready)[1])
        self.findings += self.network.findings
        waiting = self.network.waiting()
        if waiting or any(map(self.held_at, range(len(self.position)))):
            standstill = Standstill(
                self.schedule, self.network, [self.held_at(r) for r in range(len(self.position))]
            )
            self.findings += standstill.explain(waiting, bool(self.findings))
        if self.findings:
            raise CompileError(diagnose(self.schedule, self.findings))
        return Timeline(tuple(self.bars), tuple(self.copies))

    def held_at(self, rank: int) -> int | None:
        """The transfer, or the optimizer step, that keeps a rank from going on, if it has not come
        to its end.
        """
        if self.position[rank] == len(self.schedule.ranks[rank]):
            return None
        return self.position[rank] if self.transport.blocks else self.awaited[rank]

    def advance(self, rank: int) -> None:
        """Do the rank's actions up to where it has to wait, or the end."""
        actions = self.schedule.ranks[rank]
        while self.position[rank] < len(actions):
            index = self.position[rank]
            batch = actions.batch(index)
            if is_transfer(actions.kind[index]):
                self.post(rank, batch)
                if self.transport.blocks and self.position[rank] == index:
                    return
            elif is_copy(actions.kind[index]):
                self.copy(rank, index)
            elif (self.posted or self.has_sums) and self.must_wait(rank, batch):
                return
            else:
                self.compute(rank, batch)
            self.position[rank] = batch.stop
            if self.shares_links:
                # Copies of several ranks take their turns on a link in order of time.
                heappush(self.ready, (self.clock[rank], rank))
                return

    def must_wait(self, rank: int, batch: range) -> bool:
        """Whether ops need what is on its way: what a receive will bring, or gradients that
        replicas have to add.
        """
        for index in batch:
            for need in needs(self.schedule, *self.schedule.ranks[rank].row(index)[:3]):
                if self.schedule.placement[need[1]] == rank:
                    continue
                if need[0] == Kind.W:
                    if not self.state[self.slot(*need[1:])] & _MADE[Kind.W]:
                        self.awaited[rank] = index
                        self.summing.setdefault(need, []).append(rank)
                        return True
                elif (
                    posted := self.on_its_way(need, self.schedule.ranks[rank].stage[index])
                ) is not None:
                    self.awaited[rank] = posted
                    return True
        return False

    def on_its_way(self, need: Op, stage: int) -> int | None:
        """The receive, issued and not over, that will bring what an op of a stage needs."""
        receive = kind, number, microbatch = receive_of(self.schedule, need, stage)
        arrived = self.state[self.slot(number, microbatch)] & _ARRIVED[kind]
        return None if arrived else self.posted.get(receive)

    def compute(self, rank: int, batch: range) -> None:
        """Do a compute op, or ops that overlap: check what they need, give them their time, note
        what they make.
        """
        ops = [self.schedule.ranks[rank].row(index)[:3] for index in batch]
        start = self.clock[rank]
        for index, op in zip(batch, ops, strict=True):
            for need in needs(self.schedule, *op):
                start = max(start, self.available(rank, index, need))
        end = start
        for (kind, stage, microbatch), after in zip(ops, self.durations.ends(ops), strict=True):
            begin = end
            end = start + after
            self.bars[rank].add(kind, stage, microbatch, begin, end)
        self.clock[rank] = end
        for op in ops:
            self.made(*op, end)

    def copy(self, rank: int, index: int) -> None:
        """Begin a copy to or from the host: it takes its turn on the rank's link, while the rank
        goes on.
        """
        kind, stage, _ = op = self.schedule.ranks[rank].row(index)[:3]
        link = self.links[rank]
        (need,) = needs(self.schedule, *op)
        begin = max(self.clock[rank], self.link_free[link], self.available(rank, index, need))
        end = self.link_free[link] = begin + self.durations[kind][stage]
        self.copies[rank].add(*op, begin, end)
        self.made(*op, end)

    def made(self, kind: int, stage: int, microbatch: int, end: float) -> None:
        """Note what an op has made."""
        for made in MAKES[kind]:
            slot = self.slot(stage, microbatch)
            self.state[slot] |= _MADE[made]
            self.ends[made][slot] = end
            for rank in self.summing.pop((made, stage, microbatch), ()):
                heappush(self.ready, (self.clock[rank], rank))

    def slot(self, number: int, microbatch: int) -> int:
        """The index of a stage's or a skip's microbatch in `state`, `ends` and `arrivals`."""
        return number * self.stride + microbatch

    def available(self, rank: int, index: int, need: Op) -> float:
        """Check that what an op needs is on its rank, made here or received; the time from which it
        is there.
        """
        kind, stage, microbatch = need
        slot = self.slot(stage, microbatch)
        if self.schedule.placement[stage] == rank or kind == Kind.W:
            if not self.state[slot] & _MADE[kind]:
                self.too_early(rank, index, (kind, stage, microbatch))
            return self.ends[kind][slot]
        user = self.schedule.ranks[rank].stage[index]
        receive, number, _ = receive_of(self.schedule, need, user)
        there = self.slot(number, microbatch)
        if not self.state[there] & _ARRIVED[receive]:
            help = "a program that writes any `send` or `recv` must write all of them"
            self.too_early(rank, index, (receive, number, microbatch), help)
        if self.ideal:
            latency = self.transfers.time(
                kind, min(stage, user), self.schedule.placement[stage], rank
            )
            return self.ends[kind][slot] + latency
        return self.arrivals[receive][there]

    def post(self, rank: int, batch: range) -> None:
        """Issue transfers: check what they send, and note what has come to an end."""
        actions = self.schedule.ranks[rank]
        for index in batch:
            kind, number, microbatch, *_ = actions.row(index)
            slot = self.slot(number, microbatch)
            stage = self.schedule.layout.stage_of(kind, number)
            if not is_send(kind):
                if not self.transport.blocks:
                    self.posted[kind, number, microbatch] = index
            elif not self.state[self.slot(stage, microbatch)] & _MADE[_SENT_OF[kind]]:
                self.too_early(rank, index, (_SENT_OF[kind], stage, microbatch))
            elif self.state[slot] & _SENT[kind]:
                self.find("repeated-send", f"`{actions.word(index)}` is sent twice", rank, index)
            if is_send(kind):
                self.state[slot] |= _SENT[kind]
        self.network.post(rank, batch, self.clock[rank])
        while self.network.completed:
            self.arrive(self.network.completed.popleft(), poster=rank)

    def arrive(self, flight: Flight, poster: int) -> None:
        """Transfers are complete: what they bring is there, and the rank may go on."""
        rank = flight.rank
        batch = flight.batch
        actions = self.schedule.ranks[rank]
        for index in batch:
            kind, number, microbatch, *_ = actions.row(index)
            if not is_send(kind):
                slot = self.slot(number, microbatch)
                self.state[slot] |= _ARRIVED[kind]
                self.arrivals[kind][slot] = flight.end
        if self.transport.blocks:
            self.position[rank] = batch.stop
            if not self.ideal:
                self.clock[rank] = flight.end
        if rank != poster and (self.transport.blocks or self.awaited.get(rank) in batch):
            heappush(self.ready, (self.clock[rank], rank))

    def too_early(
        self, rank: int, index: int, need: tuple[int, int, int], help: str | None = None
    ) -> None:
        """Report an action that runs before what it needs."""
        early = self.schedule.ranks[rank].word(index)
        message = f"`{early}` on rank {rank} runs before `{word(*need)}`"
        self.find("order", message, rank, index, need[1], help=help)

    def find(
        self, code: str, message: str, rank: int, index: int, *others: int, help: str | None = None
    ) -> None:
        """Report what is wrong with an action; the message names `others` by their numbers too."""
        actions = self.schedule.ranks[rank]
        numbers = (actions.stage[index], *others)
        self.findings.append(
            Finding(code, message, rank, actions.source[index], help=help, numbers=numbers)
        )
