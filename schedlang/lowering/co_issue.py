"""Sends and receives in the order of one global execution: a send and its receive are issued in the
same moment.

Following that order, a rank that waits always waits for the oldest transfer not yet done, whose two
ends are both there; so it is safe on every transport. It is also a good order, because the
execution is the one with the program's costs: a receive stands where its message would arrive. It
is what torch's own pipelining does, without costs.
"""

from heapq import heappop, heappush

from attrs import evolve

from schedlang.proof.columnwise import is_large
from schedlang.schedule.actions import Actions, is_copy
from schedlang.schedule.kinds import Kind
from schedlang.schedule.needs import MAKES, SENDS, Numbers, Op, needs, receive_of
from schedlang.schedule.schedule import Schedule

#: A send of what an op has made: its kind and number, the rank that receives, and the receive's
#: kind and number.
_Route = tuple[Kind, int, int, Kind, int]


def co_issue(schedule: Schedule) -> Schedule:
    """The schedule with a send behind every op for each other rank that needs its result, and a
    receive there.
    """
    ranks = None
    if is_large(schedule):
        from schedlang.proof.columnwise.co_issue import co_issued

        ranks = co_issued(schedule)
    return evolve(schedule, ranks=ranks or _Insertion(schedule).ranks())


class _Insertion:
    """The global execution: what each rank has issued, and which ops have ended.

    An op is ready once the ops it needs have ended; a rank runs its ops in its own order.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.numbers = Numbers(schedule)
        ranks = len(schedule.ranks)
        stages = len(schedule.placement)
        self.durations = schedule.costs.durations(stages)
        self.routes = {
            (kind, stage): _routes(schedule, kind, stage)
            for kind in MAKES
            for stage in range(stages)
        }
        self.issued = [Actions() for _ in range(ranks)]
        self.position = [0] * ranks
        #: Whether an op has ended, by its number.
        self.ended = bytearray(self.numbers.count)
        #: The ranks that may have an op ready: they have ended one, or been handed something, since
        #: they last tried.
        self.woken = set(range(ranks))
        self.busy: set[int] = set()
        #: For each stage the ranks whose optimizer steps wait for its gradients.
        self.summing = _summing(schedule)
        #: The ops that each busy rank runs.
        self.runs: dict[int, range] = {}
        #: Ends of the ops that run, as (time, order, rank); no rank runs two at once.
        self.running: list[tuple[float, int, int]] = []

    def ranks(self) -> tuple[Actions, ...]:
        """Run to the end, or to a standstill, from where each rank just goes on: the proof will say
        why it hangs.
        """
        self.start(0.0)
        while self.running:
            now = self.running[0][0]
            # All ops that end at this moment hand over before the next ones start, or a neighbour
            # would wait longer.
            while self.running and self.running[0][0] == now:
                self.end(heappop(self.running)[2])
            self.start(now)
        for rank, actions in enumerate(self.schedule.ranks):
            while self.position[rank] < len(actions):
                self.go_on(rank, actions.batch(self.position[rank]))
        return tuple(self.issued)

    def start(self, now: float) -> None:
        """Issue the next op of every woken rank that has one ready, or the next ops that
        overlap.
        """
        woken = sorted(self.woken - self.busy)
        self.woken = set()
        for rank in woken:
            actions = self.schedule.ranks[rank]
            index = self.position[rank]
            if index == len(actions):
                continue
            batch = actions.batch(index)
            if self.ready(actions, batch):
                for each in batch:
                    self.issued[rank].add(*actions.row(each))
                self.busy.add(rank)
                self.runs[rank] = batch
                # Of ops that end together, those hand over first whose ranks have done less.
                heappush(self.running, (now + self.duration(actions, batch), index, rank))

    def duration(self, actions: Actions, batch: range) -> float:
        """How long ops that are issued together take."""
        if len(batch) == 1:
            return self.durations[actions.kind[batch.start]][actions.stage[batch.start]]
        return self.durations.ends([actions.row(index) for index in batch])[-1]

    def ready(self, actions: Actions, batch: range) -> bool:
        """Whether all that some ops need has ended."""
        for index in batch:
            for each in self.numbers.needs(
                actions.kind[index], actions.stage[index], actions.microbatch[index]
            ):
                if not self.ended[each]:
                    return False
        return True

    def end(self, rank: int) -> None:
        """Ops have ended: their results go to the next stages, in one moment on both ranks."""
        actions = self.schedule.ranks[rank]
        batch = self.runs[rank]
        self.position[rank] = batch.stop
        for index in batch:
            self.note(actions, index)
            self.woken |= self.summing.get(actions.stage[index], set())
        if self.schedule.offloaded:
            self.copy(rank)
        for index in batch:
            self.send(rank, index, receive=True)
        self.busy.discard(rank)
        self.woken.add(rank)

    def note(self, actions: Actions, index: int) -> None:
        """What an op makes is there."""
        for first in self.numbers.made[actions.kind[index], actions.stage[index]]:
            self.ended[first + actions.microbatch[index]] = True

    def copy(self, rank: int) -> None:
        """Begin the copies that come next: the rank does not wait for them, nor they for its
        transfers.
        """
        actions = self.schedule.ranks[rank]
        while (index := self.position[rank]) < len(actions) and is_copy(actions.kind[index]):
            if not self.ready(actions, range(index, index + 1)):
                break
            self.issued[rank].add(*actions.row(index))
            self.note(actions, index)
            self.position[rank] += 1

    def send(self, rank: int, index: int, receive: bool) -> None:
        """Issue the sends of what an op has made to other ranks, and the receives there."""
        actions = self.schedule.ranks[rank]
        microbatch = actions.microbatch[index]
        place = actions.source[index]
        for send, number, peer, other, there in self.routes[
            actions.kind[index], actions.stage[index]
        ]:
            self.issued[rank].add(send, number, microbatch, place)
            if receive:
                self.issued[peer].add(other, there, microbatch, place)
                self.woken.add(peer)

    def go_on(self, rank: int, batch: range) -> None:
        """Issue ops after a standstill: receive what they still need from other ranks, run,
        send.
        """
        actions = self.schedule.ranks[rank]
        issued = self.issued[rank]
        for index in batch:
            for need in self.lacking(actions, index):
                if self.schedule.placement[need[1]] != rank and need[0] in SENDS:
                    issued.add(
                        *receive_of(self.schedule, need, actions.stage[index]),
                        actions.source[index],
                    )
        for index in batch:
            issued.add(*actions.row(index))
        for index in batch:
            self.send(rank, index, receive=False)
        self.position[rank] = batch.stop

    def lacking(self, actions: Actions, index: int) -> list[Op]:
        """What an op needs that has not ended."""
        needed = needs(self.schedule, *actions.row(index)[:3])
        return [need for need in needed if not self.ended[self.numbers.first(*need[:2]) + need[2]]]


def _summing(schedule: Schedule) -> dict[int, set[int]]:
    if len(schedule.layout.pipelines) == 1 or not schedule.has_updates:
        return {}
    return {
        stage: {schedule.placement[each] for each in schedule.layout.replicas(stage)}
        for stage in range(len(schedule.placement))
    }


def _routes(schedule: Schedule, kind: int, stage: int) -> list[_Route]:
    """Where what an op of a kind makes on a stage goes, of other ranks: to a neighbour first, then
    by skips.
    """
    layout = schedule.layout
    found = list[_Route]()
    for send in (SENDS[made] for made in MAKES[kind] if made in SENDS):
        for number in layout.numbers(send, stage):
            peer = layout.peer(send, number)
            if peer is not None:
                found.append((send, number, peer, *layout.counterpart(send, number)))
    return found
