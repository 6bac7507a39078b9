"""The makespan of a plan on a transport, apart from the machine: times that are made longer until
all rules hold.

Written from the rules in docs/transports.md. It knows nothing of lanes that wait or of an order of
events: it matches sends and receives by counting, and goes over all actions again and again until
no time changes. For plans that run to their end, without offload.
"""

from collections import defaultdict
from collections.abc import Iterator

from schedlang import Costs, Kind, Schedule
from schedlang.schedule.actions import is_send, is_transfer
from tests.support.own_needs import needs, receive_of

Place = tuple[int, int]


class Replay:
    def __init__(self, schedule: Schedule, transport: str, costs: Costs) -> None:
        self.schedule = schedule
        self.transport = transport
        self.durations = costs.over(schedule.costs).durations(len(schedule.placement))
        self.p2p = costs.over(schedule.costs).p2p_time or 0.0
        self.capacity = (
            float(transport.partition(":")[2] or "inf") if transport.startswith("buffered") else 0
        )
        self.blocks = transport == "blocking" or self.capacity > 0
        self.partner: dict[Place, Place] = {}
        #: Of a send, the receive that makes room for its message in the buffer.
        self.room: dict[Place, Place] = {}
        self.match()
        self.times: dict[object, float] = defaultdict(float)
        self.changed = False

    def match(self) -> None:
        """Pair the n-th send of every channel with its n-th receive; on gloo, those of one message."""
        channels: dict[object, tuple[list[Place], list[Place]]] = defaultdict(lambda: ([], []))
        for rank, actions in enumerate(self.schedule.ranks):
            for batch in actions.batches():
                for index in batch:
                    kind, stage, microbatch, *_ = actions.row(index)
                    if is_transfer(kind):
                        ends = [rank, self.schedule.peer(kind, stage)]
                        channel: tuple[object, ...] = tuple(ends if is_send(kind) else ends[::-1])
                        if self.transport == "gloo":
                            sent = (
                                (kind, stage)
                                if is_send(kind)
                                else self.schedule.layout.counterpart(kind, stage)
                            )
                            channel = (*channel, *sent, microbatch)
                        if self.transport == "nccl":
                            channel = (*channel, len(batch) > 1)
                        channels[channel][0 if is_send(kind) else 1].append((rank, index))
        for sends, receives in channels.values():
            assert len(sends) == len(receives)
            self.partner |= dict(zip(sends, receives, strict=True)) | dict(
                zip(receives, sends, strict=True)
            )
            if 0 < self.capacity < len(sends):
                self.room |= dict(zip(sends[int(self.capacity) :], receives, strict=False))

    def makespan(self) -> float:
        self.changed = True
        ends: list[float] = []
        while self.changed:
            self.changed = False
            ends = [self.rank(rank) for rank in range(len(self.schedule.ranks))]
        return max(ends)

    def put(self, key: object, time: float) -> None:
        self.changed |= self.times.get(key) != time
        self.times[key] = time

    def rank(self, rank: int) -> float:
        """Go through a rank's actions, by what is known of the others so far; when it is done."""
        actions = self.schedule.ranks[rank]
        now = 0.0
        lanes: dict[object, float] = defaultdict(float)
        for batch in actions.batches():
            if is_transfer(actions.kind[batch.start]):
                end = self.transfers(rank, batch, now, lanes)
                now = end if self.blocks else now
                continue
            start = max(
                [now, *(self.times["there", rank, *each] for each in self.receives(rank, batch))]
            )
            start = max(
                [start, *(self.times["made", *each] for each in self.gradients(rank, batch))]
            )
            now = start + sum(
                self.durations[actions.kind[index]][actions.stage[index]] for index in batch
            )
            for index in batch:
                if actions.kind[index] in (Kind.B, Kind.W):
                    self.put(("made", actions.stage[index], actions.microbatch[index]), now)
        return now

    def gradients(self, rank: int, batch: range) -> Iterator[tuple[int, int]]:
        """What updates wait for of other ranks."""
        for index in batch:
            for kind, stage, microbatch in needs(
                self.schedule, *self.schedule.ranks[rank].row(index)[:3]
            ):
                if self.schedule.placement[stage] != rank and kind == Kind.W:
                    yield stage, microbatch

    def receives(self, rank: int, batch: range) -> Iterator[tuple[int, int, int]]:
        for op in (self.schedule.ranks[rank].row(index)[:3] for index in batch):
            for need in needs(self.schedule, *op):
                if self.schedule.placement[need[1]] != rank and need[0] != Kind.W:
                    yield receive_of(self.schedule, need, op[1])

    def transfers(self, rank: int, batch: range, now: float, lanes: dict[object, float]) -> float:
        actions = self.schedule.ranks[rank]
        lane: object = "rank"
        if self.transport == "nccl-edge":
            return self.on_edges(rank, batch, now, lanes)
        if self.transport == "gloo":
            lane = batch
        elif self.transport == "nccl" and len(batch) == 1:
            lane = self.schedule.peer(actions.kind[batch.start], actions.stage[batch.start])
        start = max(now, lanes[lane])
        ends = [self.transfer((rank, index), start) for index in batch]
        lanes[lane] = max(ends)
        for index, end in zip(batch, ends, strict=True):
            kind, stage, microbatch, *_ = actions.row(index)
            # On gloo, a batch is no more than its transfers.
            end = end if self.transport == "gloo" else max(ends)
            self.put(("end", rank, index), end)
            self.put(("there", rank, kind, stage, microbatch), end)
        return max(ends)

    def on_edges(self, rank: int, batch: range, now: float, lanes: dict[object, float]) -> float:
        """Each transfer for itself, behind those of its direction with the same rank."""
        actions = self.schedule.ranks[rank]
        for index in batch:
            kind, stage, microbatch, *_ = actions.row(index)
            lane = is_send(kind), self.schedule.peer(kind, stage)
            lanes[lane] = end = self.transfer((rank, index), max(now, lanes[lane]))
            self.put(("end", rank, index), end)
            self.put(("there", rank, kind, stage, microbatch), end)
        return now

    def transfer(self, place: Place, start: float) -> float:
        """When a transfer that starts is over."""
        sends = self.schedule.ranks[place[0]].kind[place[1]] in (Kind.SEND_F, Kind.SEND_B)
        if sends and place in self.room:
            start = max(start, self.times["end", *self.room[place]])
        self.put(("start", *place), start)
        other = self.times["start", *self.partner[place]]
        if self.capacity:
            return start if sends else max(start, other + self.p2p)
        if self.transport == "gloo":
            return start + self.p2p if sends else max(start, other + self.p2p)
        return max(start, other) + self.p2p
