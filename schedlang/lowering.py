"""Schedule → schedule with communication.

Where a program writes no sends and receives, they are put in the order of one global execution: a send and its
receive are issued at the same moment, on their two ranks. Following that order, a rank that waits always waits for
the oldest transfer not yet done, whose two ends are both there; so it is safe on every transport. It is also a good
order, because the execution is the one with unit costs: a receive stands where its message would arrive.
"""

from heapq import heappop, heappush

from attrs import define, evolve, field

from schedlang.costs import Costs
from schedlang.dependencies import MAKES, SENDS, Op, needs
from schedlang.schedule import Actions, Kind, Schedule, counterpart, is_transfer


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its communication: the program's own, or inserted where the program writes none.

    A program's own transfers to a stage of the same rank, or past the ends of the pipeline, become nothing.
    """
    written = any(is_transfer(kind) for actions in schedule.ranks for kind in actions.kind)
    ranks = tuple(_reachable(schedule, each) for each in schedule.ranks) if written else _Insertion(schedule).ranks()
    return evolve(schedule, ranks=ranks)


def _reachable(schedule: Schedule, actions: Actions) -> Actions:
    """The actions without the transfers that have no other rank to reach."""
    kept = Actions()
    for row in zip(actions.kind, actions.stage, actions.microbatch, actions.source, actions.group, strict=True):
        if not is_transfer(row[0]) or schedule.peer(row[0], row[1]) is not None:
            kept.add(*row)
    return kept


@define
class _Insertion:
    """The global execution: what each rank has issued, and which ops have ended.

    An op is ready once the ops it needs have ended; a rank runs its ops in its own order.
    """

    schedule: Schedule
    issued: list[Actions] = field(init=False)
    position: list[int] = field(init=False)
    idle: set[int] = field(init=False)
    ended: set[Op] = field(factory=set)
    #: Ends of the ops that run, as (time, order, rank); no rank runs two at once.
    running: list[tuple[float, int, int]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        ranks = len(self.schedule.ranks)
        self.issued = [Actions() for _ in range(ranks)]
        self.position = [0] * ranks
        self.idle = set(range(ranks))

    def ranks(self) -> tuple[Actions, ...]:
        """Run to the end, or to a standstill, from where each rank just goes on: the proof will say why it hangs."""
        costs = Costs().table(len(self.schedule.placement))
        self.start(0.0, costs)
        while self.running:
            now = self.running[0][0]
            # All ops that end at this moment hand over before the next ones start, or a neighbour would wait longer.
            while self.running and self.running[0][0] == now:
                self.end(heappop(self.running)[2])
            self.start(now, costs)
        for rank, actions in enumerate(self.schedule.ranks):
            for index in range(self.position[rank], len(actions)):
                self.go_on(rank, index)
        return tuple(self.issued)

    def start(self, now: float, costs: dict[int, list[float]]) -> None:
        """Issue the next op of every idle rank that has one ready."""
        for rank in sorted(self.idle):
            actions, index = self.schedule.ranks[rank], self.position[rank]
            if index < len(actions) and self.ready(actions, index):
                self.issue(rank, index)
                self.idle.discard(rank)
                kind, stage = actions.kind[index], actions.stage[index]
                # Of ops that end together, the one further on its way hands over first, so that a rank sends its
                # result before it receives its next input.
                order = -stage if kind == Kind.F else stage
                heappush(self.running, (now + costs[kind][stage], order, rank))

    def ready(self, actions: Actions, index: int) -> bool:
        """Whether all that an op needs has ended."""
        return not self.lacking(actions, index)

    def lacking(self, actions: Actions, index: int) -> list[Op]:
        """What an op needs that has not ended."""
        op = actions.kind[index], actions.stage[index], actions.microbatch[index]
        return [need for need in needs(self.schedule, *op) if need not in self.ended]

    def issue(self, rank: int, index: int) -> None:
        actions = self.schedule.ranks[rank]
        self.issued[rank].add(
            actions.kind[index], actions.stage[index], actions.microbatch[index], actions.source[index]
        )

    def end(self, rank: int) -> None:
        """An op has ended: its result goes to the next stage, in one moment on both ranks."""
        actions, index = self.schedule.ranks[rank], self.position[rank]
        self.position[rank] += 1
        self.idle.add(rank)
        stage, microbatch = actions.stage[index], actions.microbatch[index]
        for made in MAKES[actions.kind[index]]:
            self.ended.add((made, stage, microbatch))
            self.send(rank, index, made, receive=True)

    def send(self, rank: int, index: int, made: Kind, receive: bool) -> None:
        """Issue the send of what an op has made, if it goes to another rank, and the receive there."""
        actions = self.schedule.ranks[rank]
        stage, microbatch, place = actions.stage[index], actions.microbatch[index], actions.source[index]
        peer = self.schedule.peer(SENDS[made], stage) if made in SENDS else None
        if peer is not None:
            self.issued[rank].add(SENDS[made], stage, microbatch, place)
            if receive:
                self.issued[peer].add(*counterpart(SENDS[made], stage), microbatch, place)

    def go_on(self, rank: int, index: int) -> None:
        """Issue an op after a standstill: receive what it still needs from other ranks, run, send."""
        actions = self.schedule.ranks[rank]
        microbatch, place = actions.microbatch[index], actions.source[index]
        for kind, holder, _ in self.lacking(actions, index):
            if self.schedule.placement[holder] != rank:
                self.issued[rank].add(*counterpart(SENDS[kind], holder), microbatch, place)
        self.issue(rank, index)
        for made in MAKES[actions.kind[index]]:
            self.send(rank, index, made, receive=False)
