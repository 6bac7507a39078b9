"""Transfers on their way: batches wait in their lanes, sends and receives meet on their channels.

What a transfer waits for stays there once it is there, and nothing that happens takes a possibility
away from another transfer; so the order in which ranks post does not matter (see
`schedlang.proof.machine`). Nor does it for times: each is the latest of the times of the fixed
things that it waits for, plus a duration.
"""

from collections import deque
from enum import IntEnum

from attrs import define, field

from schedlang.schedule.actions import is_send, word
from schedlang.schedule.costs import Transfers
from schedlang.schedule.findings import Finding
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport

#: An action: its rank and its index there.
Place = tuple[int, int]

_ALONE = 0
_BATCHED = 1


class Progress(IntEnum):
    """How far a transfer is: posted by its rank, first in its lane, met by the other side, over."""

    AHEAD = 0
    POSTED = 1
    STARTED = 2
    MET = 3
    COMPLETE = 4


@define(eq=False)
class Flight:
    """A batch on its way: when it started, or was posted; when the last of its transfers so far was
    over; and how many are not met.
    """

    rank: int
    batch: range
    lane: tuple[int, int]
    start: float
    unmet: int
    end: float = 0.0


@define
class _Channel:
    """The sends or the receives that wait for the other side, each with the time from which it is
    there.

    Where messages may wait for their receives, also how many were sent, and when each was received.
    """

    waiting: deque[tuple[Place, float]] = field(factory=deque)
    sent: int = 0
    received: list[float] = field(factory=list)


class Network:
    """The transfers of a schedule on a transport."""

    def __init__(self, schedule: Schedule, transport: Transport, transfers: Transfers) -> None:
        self.schedule = schedule
        self.transport = transport
        self.transfers = transfers
        self.findings: list[Finding] = []
        #: Batches that have become complete since the machine last looked.
        self.completed: deque[Flight] = deque()
        self._progress = [bytearray(len(actions)) for actions in schedule.ranks]
        self._flights: dict[Place, Flight] = {}
        self._lanes: dict[tuple[int, int], deque[Flight]] = {}
        #: When lanes that are empty now became so.
        self._free: dict[tuple[int, int], float] = {}
        self._channels: dict[tuple[int, ...], _Channel] = {}
        self._partner: dict[Place, Place] = {}
        self._starting: deque[Flight] = deque()

    def progress(self, place: Place) -> Progress:
        """How far a transfer is."""
        return Progress(self._progress[place[0]][place[1]])

    def batch(self, place: Place) -> range:
        """The batch that a posted transfer is in, as it was posted."""
        return self._flights[place].batch

    def head(self, place: Place) -> range:
        """The batch that goes first in the lane that a posted transfer is in."""
        return self._lanes[self._flights[place].lane][0].batch

    def waiting(self) -> list[Place]:
        """The transfers whose other side has not come, also those that need not wait for it."""
        return sorted(place for channel in self._channels.values() for place, _ in channel.waiting)

    def post(self, rank: int, batch: range, now: float) -> None:
        """Issue transfers of a rank as one; on lanes of their own, each for itself."""
        parts = (
            [batch]
            if self.transport.lane != "none"
            else [range(index, index + 1) for index in batch]
        )
        for part in parts:
            key = self._lane(rank, part)
            flight = Flight(rank, part, key, now, len(part))
            for index in part:
                self._progress[rank][index] = Progress.POSTED
                self._flights[rank, index] = flight
            lane = self._lanes.setdefault(key, deque())
            lane.append(flight)
            if len(lane) == 1:
                flight.start = max(now, self._free.get(key, 0.0))
                self._starting.append(flight)
        while self._starting:
            self._start(self._starting.popleft())

    def _lane(self, rank: int, batch: range) -> tuple[int, int]:
        """The lane of a batch: numbers of other ranks, or below 0."""
        if self.transport.lane == "none":
            return rank, -2 - batch.start
        if self.transport.lane == "rank" or len(batch) > 1:
            return rank, -1
        peer = self._peer(rank, batch.start)
        return rank, -1 if peer is None else peer

    def _peer(self, rank: int, index: int) -> int | None:
        actions = self.schedule.ranks[rank]
        return self.schedule.peer(actions.kind[index], actions.stage[index])

    def _start(self, flight: Flight) -> None:
        for index in flight.batch:
            self._progress[flight.rank][index] = Progress.STARTED
        for index in flight.batch:
            self._offer((flight.rank, index), flight, self._peer(flight.rank, index))

    def _offer(self, place: Place, flight: Flight, peer: int | None) -> None:
        """Put a transfer on its channel, where it meets the other side or waits for it."""
        rank, index = place
        actions = self.schedule.ranks[rank]
        sends = is_send(actions.kind[index])
        if peer is None:
            message = f"`{actions.word(index)}` has no other rank to reach"
            self.findings.append(
                Finding(
                    "unmatched-send" if sends else "unmatched-receive",
                    message,
                    rank,
                    actions.source[index],
                    numbers=(actions.stage[index],),
                )
            )
            self._met(place, flight.start)
            return
        key: tuple[int, ...] = (rank, peer) if sends else (peer, rank)
        if self.transport.apart:
            key = (*key, _BATCHED if len(flight.batch) > 1 else _ALONE)
        if self.transport.tags:
            op = actions.kind[index], actions.stage[index]
            key = (
                *key,
                *(op if sends else self.schedule.layout.counterpart(*op)),
                actions.microbatch[index],
            )
        channel = self._channels.setdefault(key, _Channel())
        since = flight.start
        if sends and self.transport.capacity:
            since = self._room(channel, since)
        if channel.waiting and channel.waiting[0][0][0] != rank:
            other, there = channel.waiting.popleft()
            self._meet(
                channel,
                *(((place, since), (other, there)) if sends else ((other, there), (place, since))),
            )
        else:
            channel.waiting.append((place, since))
            if sends and len(channel.waiting) <= self.transport.capacity:
                self._met(place, since)

    def _room(self, channel: _Channel, since: float) -> float:
        """When the next message may wait for its receive: once the one that takes up its place is
        received.
        """
        before = channel.sent - self.transport.capacity
        channel.sent += 1
        return (
            max(since, channel.received[int(before)])
            if 0 <= before < len(channel.received)
            else since
        )

    def _meet(
        self, channel: _Channel, sent: tuple[Place, float], received: tuple[Place, float]
    ) -> None:
        """A send and a receive meet; and there is room for one more message."""
        (sender, since) = sent
        (receiver, there) = received
        self._compare(sender, receiver)
        if self.transport.atomic:
            self._partner[sender] = receiver
            self._partner[receiver] = sender
        kind, number, *_ = self.schedule.ranks[sender[0]].row(sender[1])
        latency = self.transfers.time(
            kind, min(self.schedule.layout.ends(kind, number)), sender[0], receiver[0]
        )
        over = (
            max(since + latency, there)
            if self.transport.travels_ahead
            else max(since, there) + latency
        )
        if self.transport.capacity:
            channel.received.append(over)
            self._admit(channel, sender[0], over)
        self._met(receiver, over)
        if self._progress[sender[0]][sender[1]] == Progress.STARTED:
            self._met(sender, since if self.transport.capacity else over)

    def _admit(self, channel: _Channel, sender: int, now: float) -> None:
        """Of the sends that wait, if it is not receives, the first one that had no room has it
        now.
        """
        last = self.transport.capacity - 1
        if len(channel.waiting) > last and channel.waiting[0][0][0] == sender:
            place, since = channel.waiting[int(last)]
            since = max(since, now)
            channel.waiting[int(last)] = place, since
            self._met(place, since)

    def _compare(self, sent: Place, received: Place) -> None:
        """Report a message that is not the one that its receive is for."""
        actions = self.schedule.ranks[sent[0]]
        index = sent[1]
        receiver = self.schedule.ranks[received[0]]
        at = received[1]
        wanted = self.schedule.layout.counterpart(actions.kind[index], actions.stage[index])
        if receiver.word(at) == word(*wanted, actions.microbatch[index]):
            return
        message = (
            f"rank {received[0]} receives `{receiver.word(at)}` where rank {sent[0]} sends "
            f"`{actions.word(index)}`"
        )
        related = ((actions.source[index], f"`{actions.word(index)}` is next on this channel"),)
        help = "messages between two ranks arrive in the order of their sends"
        self.findings.append(
            Finding(
                "mismatched-transfer",
                message,
                received[0],
                receiver.source[at],
                related=related,
                help=help,
                numbers=(receiver.stage[at], actions.stage[index]),
            )
        )

    def _met(self, place: Place, now: float) -> None:
        """A transfer is met, and over at a time; so is its batch, with its last one."""
        self._progress[place[0]][place[1]] = Progress.MET
        flight = self._flights[place]
        flight.unmet -= 1
        flight.end = max(flight.end, now)
        if flight.unmet:
            return
        if not self.transport.atomic:
            self._complete(flight)
        elif not self.lagging(place):
            connected = self._connected(flight)
            end = max(each.end for each in connected)
            for each in connected:
                each.end = end
                self._complete(each)

    def lagging(self, place: Place) -> tuple[int, range] | None:
        """A batch that is not met among those that complete together with a transfer's."""
        connected = self._connected(self._flights[place])
        return next(((each.rank, each.batch) for each in connected if each.unmet), None)

    def _connected(self, flight: Flight) -> list[Flight]:
        """The batches that a batch has exchanged messages with, directly or through others, and
        itself.
        """
        found = {(flight.rank, flight.batch.start): flight}
        following = [flight]
        while following:
            each = following.pop()
            for index in each.batch:
                if (each.rank, index) in self._partner:
                    other = self._flights[self._partner[each.rank, index]]
                    if (other.rank, other.batch.start) not in found:
                        found[other.rank, other.batch.start] = other
                        following.append(other)
        return list(found.values())

    def _complete(self, flight: Flight) -> None:
        """A batch is over: the next one in its lane starts."""
        lane = self._lanes[flight.lane]
        lane.popleft()
        for index in flight.batch:
            place = flight.rank, index
            self._progress[flight.rank][index] = Progress.COMPLETE
            del self._flights[place]
            self._partner.pop(place, None)
        self.completed.append(flight)
        if lane:
            lane[0].start = max(lane[0].start, flight.end)
            self._starting.append(lane[0])
        else:
            del self._lanes[flight.lane]
            if self.transport.lane != "none":
                self._free[flight.lane] = flight.end
