"""Schedule → schedule with communication.

Where a program writes no sends and receives, they are put in the order of one global execution: a send and its
receive are issued at the same moment, on their two ranks. Following that order, a rank that waits always waits for
the oldest transfer not yet done, whose two ends are both there; so it is safe on every transport. It is also a good
order, because the execution is the one with unit costs: a receive stands where its message would arrive.
"""

from heapq import heappop, heappush

from attrs import define, evolve, field

from schedlang.costs import Costs
from schedlang.schedule import Actions, Kind, Schedule, is_transfer


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
    ended: set[tuple[int, int, int]] = field(factory=set)
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
        """Whether the ops that an op needs have ended; the rank's own order is seen to by the proof."""
        kind, stage, microbatch = actions.kind[index], actions.stage[index], actions.microbatch[index]
        last = len(self.schedule.placement) - 1
        if kind == Kind.F:
            return stage == 0 or (Kind.F, stage - 1, microbatch) in self.ended
        if kind in (Kind.B, Kind.I):
            needs = (Kind.F, stage, microbatch) if stage == last else (Kind.B, stage + 1, microbatch)
            return needs in self.ended
        return True

    def issue(self, rank: int, index: int) -> None:
        actions = self.schedule.ranks[rank]
        self.issued[rank].add(
            actions.kind[index], actions.stage[index], actions.microbatch[index], actions.source[index]
        )

    def end(self, rank: int) -> None:
        """An op has ended: its result goes to the next stage, in one moment on both ranks."""
        actions, index = self.schedule.ranks[rank], self.position[rank]
        kind, stage, microbatch = actions.kind[index], actions.stage[index], actions.microbatch[index]
        self.position[rank] += 1
        self.idle.add(rank)
        if kind in (Kind.F, Kind.B, Kind.I):
            self.ended.add((Kind.F if kind == Kind.F else Kind.B, stage, microbatch))
            send = Kind.SEND_F if kind == Kind.F else Kind.SEND_B
            peer = self.schedule.peer(send, stage)
            if peer is not None:
                self.issued[rank].add(send, stage, microbatch, actions.source[index])
                self.receive(peer, send, stage, microbatch, actions.source[index])

    def receive(self, rank: int, send: int, stage: int, microbatch: int, place: int) -> None:
        """The receive that meets a send."""
        if send == Kind.SEND_F:
            self.issued[rank].add(Kind.RECV_F, stage + 1, microbatch, place)
        else:
            self.issued[rank].add(Kind.RECV_B, stage - 1, microbatch, place)

    def go_on(self, rank: int, index: int) -> None:
        """Issue an op after a standstill: receive what it still needs, run, send."""
        actions = self.schedule.ranks[rank]
        kind, stage, microbatch = actions.kind[index], actions.stage[index], actions.microbatch[index]
        place = actions.source[index]
        receive = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}.get(Kind(kind))
        if receive is not None and self.schedule.peer(receive, stage) is not None and not self.ready(actions, index):
            self.issued[rank].add(receive, stage, microbatch, place)
        self.issue(rank, index)
        send = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}.get(Kind(kind))
        if send is not None and self.schedule.peer(send, stage) is not None:
            self.issued[rank].add(send, stage, microbatch, place)
