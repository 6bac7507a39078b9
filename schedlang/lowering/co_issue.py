"""Sends and receives in the order of one global execution: a send and its receive are issued in the same moment.

Following that order, a rank that waits always waits for the oldest transfer not yet done, whose two ends are both
there; so it is safe on every transport. It is also a good order, because the execution is the one with the program's
costs: a receive stands where its message would arrive. It is what torch's own pipelining does, without costs.
"""

from heapq import heappop, heappush

from attrs import define, evolve, field

from schedlang.actions import Actions, counterpart, is_copy
from schedlang.costs import Durations
from schedlang.dependencies import MAKES, SENDS, Op, needs
from schedlang.kinds import Kind
from schedlang.schedule import Schedule


def co_issue(schedule: Schedule) -> Schedule:
    """The schedule with a send behind every op whose result another rank needs, and a receive there."""
    return evolve(schedule, ranks=_Insertion(schedule).ranks())


@define
class _Insertion:
    """The global execution: what each rank has issued, and which ops have ended.

    An op is ready once the ops it needs have ended; a rank runs its ops in its own order.
    """

    schedule: Schedule
    issued: list[Actions] = field(init=False)
    position: list[int] = field(init=False)
    #: The ranks that may have an op ready: they have ended one, or been handed something, since they last tried.
    woken: set[int] = field(init=False)
    busy: set[int] = field(factory=set)
    ended: set[Op] = field(factory=set)
    #: Ends of the ops that run, as (time, order, rank); no rank runs two at once.
    running: list[tuple[float, int, int]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        ranks = len(self.schedule.ranks)
        self.issued = [Actions() for _ in range(ranks)]
        self.position = [0] * ranks
        self.woken = set(range(ranks))

    def ranks(self) -> tuple[Actions, ...]:
        """Run to the end, or to a standstill, from where each rank just goes on: the proof will say why it hangs."""
        costs = self.schedule.costs.durations(len(self.schedule.placement))
        self.start(0.0, costs)
        while self.running:
            now = self.running[0][0]
            # All ops that end at this moment hand over before the next ones start, or a neighbour would wait longer.
            while self.running and self.running[0][0] == now:
                self.end(heappop(self.running)[2])
            self.start(now, costs)
        for rank, actions in enumerate(self.schedule.ranks):
            while self.position[rank] < len(actions):
                self.go_on(rank, actions.batch(self.position[rank]))
        return tuple(self.issued)

    def start(self, now: float, costs: Durations) -> None:
        """Issue the next op of every woken rank that has one ready, or the next ops that overlap."""
        woken, self.woken = sorted(self.woken - self.busy), set()
        for rank in woken:
            actions = self.schedule.ranks[rank]
            if self.position[rank] == len(actions):
                continue
            batch = actions.batch(self.position[rank])
            if not any(self.lacking(actions, index) for index in batch):
                self.issue(rank, batch)
                self.busy.add(rank)
                end = now + costs.ends(list(map(actions.row, batch)))[-1]
                # Of ops that end together, those hand over first whose ranks have done less.
                heappush(self.running, (end, batch.start, rank))

    def lacking(self, actions: Actions, index: int) -> list[Op]:
        """What an op needs that has not ended."""
        op = actions.kind[index], actions.stage[index], actions.microbatch[index]
        return [need for need in needs(self.schedule, *op) if need not in self.ended]

    def issue(self, rank: int, batch: range) -> None:
        actions = self.schedule.ranks[rank]
        for index in batch:
            self.issued[rank].add(*actions.row(index))

    def end(self, rank: int) -> None:
        """Ops have ended: their results go to the next stages, in one moment on both ranks."""
        actions = self.schedule.ranks[rank]
        batch = actions.batch(self.position[rank])
        self.position[rank] = batch.stop
        self.note(actions, batch)
        self.copy(rank)
        for index in batch:
            for made in MAKES[actions.kind[index]]:
                self.send(rank, index, made, receive=True)
        self.busy.discard(rank)
        self.woken.add(rank)

    def note(self, actions: Actions, batch: range) -> None:
        """What ops make is there."""
        for index in batch:
            op = actions.stage[index], actions.microbatch[index]
            self.ended.update((made, *op) for made in MAKES[actions.kind[index]])

    def copy(self, rank: int) -> None:
        """Begin the copies that come next: the rank does not wait for them, nor they for its transfers."""
        actions = self.schedule.ranks[rank]
        while (index := self.position[rank]) < len(actions) and is_copy(actions.kind[index]):
            if self.lacking(actions, index):
                break
            self.issue(rank, range(index, index + 1))
            self.note(actions, range(index, index + 1))
            self.position[rank] += 1

    def send(self, rank: int, index: int, made: Kind, receive: bool) -> None:
        """Issue the send of what an op has made, if it goes to another rank, and the receive there."""
        _, stage, microbatch, place, _ = self.schedule.ranks[rank].row(index)
        peer = self.schedule.peer(SENDS[made], stage) if made in SENDS else None
        if peer is not None:
            self.issued[rank].add(SENDS[made], stage, microbatch, place)
            if receive:
                self.woken.add(peer)
                self.issued[peer].add(*counterpart(SENDS[made], stage), microbatch, place)

    def go_on(self, rank: int, batch: range) -> None:
        """Issue ops after a standstill: receive what they still need from other ranks, run, send."""
        actions = self.schedule.ranks[rank]
        for index in batch:
            for kind, holder, microbatch in self.lacking(actions, index):
                if self.schedule.placement[holder] != rank:
                    self.issued[rank].add(*counterpart(SENDS[kind], holder), microbatch, actions.source[index])
        self.issue(rank, batch)
        for index in batch:
            for made in MAKES[actions.kind[index]]:
                self.send(rank, index, made, receive=False)
        self.position[rank] = batch.stop
