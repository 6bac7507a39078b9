"""The makespan of a plan on a transport, apart from the machine: times that are made longer until
all rules hold.

Written from the rules in docs/transports.md. It knows nothing of lanes that wait or of an order of
events: it matches sends and receives by counting, and goes over all actions again and again until
no time changes. For plans that run to their end, without offload, whose exchanges meet no others.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator

from attrs import frozen

from schedlang import Costs, Kind, Schedule
from schedlang.schedule.actions import is_send, is_transfer
from tests.support.own_collectives import EXCHANGES
from tests.support.own_needs import needs, receive_of

Place = tuple[int, int]


@frozen
class _Ops:
    """Ops that run as one: how long, and the times that they wait for and that they set. Exchanges
    run beside the others.
    """

    takes: float
    waits: list[Hashable]
    makes: list[Hashable]
    is_beside: bool = False


@frozen
class _Transfers:
    """Transfers that are issued as one: of each its place, whether it sends, and the time that it
    sets.
    """

    lane: Hashable
    places: list[Place]
    sends: list[bool]
    there: list[Hashable]


class Replay:
    def __init__(self, schedule: Schedule, transport: str, costs: Costs) -> None:
        self.schedule = schedule
        self.transport = transport
        self.durations = costs.over(schedule.costs).durations(schedule.layout)
        self.p2p = costs.over(schedule.costs).p2p_time or 0.0
        self.links = costs.over(schedule.costs).link_times
        self.capacity = (
            float(transport.partition(":")[2] or "inf")
            if transport.startswith("buffered")
            else 0
        )
        self.blocks = transport == "blocking" or self.capacity > 0
        self.partner: dict[Place, Place] = {}
        #: Of a send, the receive that makes room for its message in the buffer.
        self.room: dict[Place, Place] = {}
        self.match()
        self.times: dict[Hashable, float] = defaultdict(float)
        self.changed = False

    def match(self) -> None:
        """Pair the n-th send of every channel with its n-th receive; on gloo, those of one message."""
        channels: dict[object, tuple[list[Place], list[Place]]] = defaultdict(
            lambda: ([], [])
        )
        for rank, actions in enumerate(self.schedule.ranks):
            for batch in actions.batches():
                for index in batch:
                    kind, stage, microbatch, *_ = actions.row(index)
                    if is_transfer(kind):
                        ends = [rank, self.schedule.peer(kind, stage)]
                        # Always sender, then receiver.
                        channel: tuple[object, ...] = tuple(
                            ends if is_send(kind) else ends[::-1]
                        )
                        if self.transport == "gloo":
                            sent = (
                                (kind, stage)
                                if is_send(kind)
                                else self.schedule.layout.counterpart(kind, stage)
                            )
                            channel = (*channel, *sent, microbatch)
                        if self.transport == "nccl":
                            channel = (*channel, len(batch) > 1)
                        channels[channel][0 if is_send(kind) else 1].append(
                            (rank, index)
                        )
        for sends, receives in channels.values():
            assert len(sends) == len(receives)
            self.partner |= dict(zip(sends, receives, strict=True)) | dict(
                zip(receives, sends, strict=True)
            )
            if 0 < self.capacity < len(sends):
                # With room for 2, send 2 waits for receive 0, send 3 for receive 1, and so on.
                self.room |= dict(
                    zip(sends[int(self.capacity) :], receives, strict=False)
                )

    def steps(self, rank: int) -> Iterator[_Ops | _Transfers]:
        """What a rank does, batch by batch."""
        actions = self.schedule.ranks[rank]
        for batch in actions.batches():
            rows = [actions.row(index)[:3] for index in batch]
            if is_transfer(actions.kind[batch.start]):
                places = [(rank, index) for index in batch]
                sends = [is_send(kind) for kind, _, _ in rows]
                there = [("there", rank, *row) for row in rows]
                if self.transport == "nccl-edge":
                    # Each by itself, behind those of its direction with the same rank.
                    for row, *one in zip(rows, places, sends, there, strict=True):
                        lane = is_send(row[0]), self.schedule.peer(*row[:2])
                        yield _Transfers(lane, *([each] for each in one))
                else:
                    yield _Transfers(self.lane(rank, batch), places, sends, there)
            else:
                waits = [key for row in rows for key in self.waits(rank, *row)]
                makes = [
                    ("made", s, m) for kind, s, m in rows if kind in (Kind.B, Kind.W)
                ]
                makes += [("exchanged", *row) for row in rows if row[0] in EXCHANGES]
                takes = sum(self.durations.time(*row) for row in rows)
                yield _Ops(takes, waits, makes, rows[0][0] in EXCHANGES)

    def lane(self, rank: int, batch: range) -> Hashable:
        """Transfers of one lane go one after the other."""
        if self.transport == "gloo":
            return batch
        if self.transport == "nccl" and len(batch) == 1:
            actions = self.schedule.ranks[rank]
            return self.schedule.peer(
                actions.kind[batch.start], actions.stage[batch.start]
            )
        return "rank"

    def waits(
        self, rank: int, kind: int, stage: int, microbatch: int
    ) -> Iterator[Hashable]:
        """What an op waits for: what is received or exchanged, and updates for gradients."""
        for need in needs(self.schedule, kind, stage, microbatch):
            if need[0] in EXCHANGES:
                yield "exchanged", *need
            elif self.schedule.placement[need[1]] != rank:
                if need[0] == Kind.W:
                    yield "made", need[1], need[2]
                else:
                    yield "there", rank, *receive_of(self.schedule, need, stage)

    def makespan(self) -> float:
        ranks = [list(self.steps(rank)) for rank in range(len(self.schedule.ranks))]
        # Times only ever grow, towards those of the execution: once a round changes none, all rules
        # hold.
        self.changed = True
        ends: list[float] = []
        while self.changed:
            self.changed = False
            ends = [self.rank(steps) for steps in ranks]
        return max(ends)

    def put(self, key: Hashable, time: float) -> None:
        self.changed |= self.times.get(key) != time
        self.times[key] = time

    def rank(self, steps: list[_Ops | _Transfers]) -> float:
        """Go through what a rank does, by what is known of the others so far; when it is done."""
        now = 0.0
        lanes: dict[Hashable, float] = defaultdict(float)
        for step in steps:
            if isinstance(step, _Transfers):
                end = self.transfers(step, now, lanes)
                # A rank that does not block goes on at once, and its lane is busy until the end.
                now = end if self.blocks else now
                continue
            begin = max([now, *(self.times[key] for key in step.waits)])
            if step.is_beside:
                begin = max(begin, lanes["exchanges"])
            end = begin + step.takes
            for key in step.makes:
                self.put(key, end)
            if step.is_beside:
                lanes["exchanges"] = end
            else:
                now = end
        return now

    def transfers(
        self, step: _Transfers, now: float, lanes: dict[Hashable, float]
    ) -> float:
        start = max(now, lanes[step.lane])
        pairs = zip(step.places, step.sends, strict=True)
        ends = [self.transfer(place, sends, start) for place, sends in pairs]
        lanes[step.lane] = max(ends)
        for place, there, end in zip(step.places, step.there, ends, strict=True):
            # On gloo, a batch is no more than its transfers.
            end = end if self.transport == "gloo" else max(ends)
            self.put(("end", *place), end)
            self.put(there, end)
        return max(ends)

    def transfer(self, place: Place, sends: bool, start: float) -> float:
        """When a transfer that starts is over."""
        if sends and place in self.room:
            start = max(start, self.times["end", *self.room[place]])
        self.put(("start", *place), start)
        partner = self.partner[place]
        other = self.times["start", *partner]
        sender, receiver = (place[0], partner[0]) if sends else (partner[0], place[0])
        way = self.links[sender][receiver] if self.links else self.p2p
        # A buffer takes a message at once; the receive ends when it has come.
        if self.capacity:
            return start if sends else max(start, other + way)
        if self.transport == "gloo":
            return start + way if sends else max(start, other + way)
        return max(start, other) + way
