"""Transfers on their way: batches wait in their lanes, sends and receives meet on their channels.

What a transfer waits for stays there once it is there, and nothing that happens takes a possibility away from another
transfer; so the order in which ranks post does not matter (see `schedlang.machine`).
"""

from collections import deque
from enum import IntEnum

from schedlang.actions import counterpart, is_send, word
from schedlang.findings import Finding
from schedlang.schedule import Schedule
from schedlang.transports import Transport

#: An action: its rank and its index there.
Place = tuple[int, int]

_ALONE, _BATCHED = 0, 1


class Progress(IntEnum):
    """How far a transfer is: posted by its rank, first in its lane, met by the other side, over."""

    AHEAD = 0
    POSTED = 1
    STARTED = 2
    MET = 3
    COMPLETE = 4


class Network:
    """The transfers of a schedule on a transport."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self.schedule, self.transport = schedule, transport
        self.findings: list[Finding] = []
        #: Batches that have become complete since the machine last looked.
        self.completed: deque[tuple[int, range]] = deque()
        self._progress = [bytearray(len(actions)) for actions in schedule.ranks]
        self._lanes: dict[tuple[int, int], deque[range]] = {}
        #: Of each channel, the sends or the receives that wait for the other side.
        self._channels: dict[tuple[int, ...], deque[Place]] = {}
        #: Of batches on their way: their transfers that are not met, by the place of the first one.
        self._unmet: dict[Place, int] = {}
        self._batch: dict[Place, range] = {}
        self._partner: dict[Place, Place] = {}
        self._starting: deque[tuple[int, range]] = deque()

    def progress(self, place: Place) -> Progress:
        """How far a transfer is."""
        return Progress(self._progress[place[0]][place[1]])

    def batch(self, place: Place) -> range:
        """The batch that a posted transfer is in, as it was posted."""
        return self._batch[place]

    def head(self, place: Place) -> range:
        """The batch that goes first in the lane that a posted transfer is in."""
        return self._lanes[self._lane(place[0], self._batch[place])][0]

    def waiting(self) -> list[Place]:
        """The transfers whose other side has not come, also those that need not wait for it."""
        return sorted(place for channel in self._channels.values() for place in channel)

    def post(self, rank: int, batch: range) -> None:
        """Issue transfers of a rank as one; on lanes of their own, each for itself."""
        parts = [batch] if self.transport.lane != "none" else [range(index, index + 1) for index in batch]
        for part in parts:
            for index in part:
                self._progress[rank][index] = Progress.POSTED
                self._batch[rank, index] = part
            self._unmet[rank, part.start] = len(part)
            lane = self._lanes.setdefault(self._lane(rank, part), deque())
            lane.append(part)
            if len(lane) == 1:
                self._starting.append((rank, part))
        while self._starting:
            self._start(*self._starting.popleft())

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

    def _start(self, rank: int, batch: range) -> None:
        for index in batch:
            self._progress[rank][index] = Progress.STARTED
        for index in batch:
            self._offer((rank, index), self._peer(rank, index))

    def _offer(self, place: Place, peer: int | None) -> None:
        """Put a transfer on its channel, where it meets the other side or waits for it."""
        rank, index = place
        actions = self.schedule.ranks[rank]
        sends = is_send(actions.kind[index])
        if peer is None:
            message = f"`{actions.word(index)}` has no other rank to reach"
            self.findings.append(
                Finding("unmatched-send" if sends else "unmatched-receive", message, rank, actions.source[index])
            )
            self._met(place)
            return
        key: tuple[int, ...] = (rank, peer) if sends else (peer, rank)
        if self.transport.apart:
            key = (*key, _BATCHED if len(self._batch[place]) > 1 else _ALONE)
        if self.transport.tags:
            op = actions.kind[index], actions.stage[index]
            key = (*key, *(op if sends else counterpart(*op)), actions.microbatch[index])
        channel = self._channels.setdefault(key, deque())
        if channel and channel[0][0] != rank:
            self._meet(place, channel)
        else:
            channel.append(place)
            if sends and len(channel) <= self.transport.capacity:
                self._met(place)

    def _meet(self, place: Place, channel: deque[Place]) -> None:
        """A transfer meets the first one that waits on its channel, and there is room for one more message."""
        other = channel.popleft()
        sends = is_send(self.schedule.ranks[place[0]].kind[place[1]])
        self._compare(*((place, other) if sends else (other, place)))
        if self.transport.atomic:
            self._partner[place], self._partner[other] = other, place
        if not sends and self.transport.capacity and len(channel) >= self.transport.capacity:
            self._met(channel[int(self.transport.capacity) - 1])
        for each in (place, other):
            if self._progress[each[0]][each[1]] == Progress.STARTED:
                self._met(each)

    def _compare(self, sent: Place, received: Place) -> None:
        """Report a message that is not the one that its receive is for."""
        actions, index = self.schedule.ranks[sent[0]], sent[1]
        receiver, at = self.schedule.ranks[received[0]], received[1]
        if receiver.word(at) == word(
            *counterpart(actions.kind[index], actions.stage[index]), actions.microbatch[index]
        ):
            return
        message = (
            f"rank {received[0]} receives `{receiver.word(at)}` where rank {sent[0]} sends `{actions.word(index)}`"
        )
        related = ((actions.source[index], f"`{actions.word(index)}` is next on this channel"),)
        help = "messages between two ranks arrive in the order of their sends"
        self.findings.append(
            Finding("mismatched-transfer", message, received[0], receiver.source[at], related=related, help=help)
        )

    def _met(self, place: Place) -> None:
        """A transfer is met; so is its batch, with its last one."""
        self._progress[place[0]][place[1]] = Progress.MET
        batch = self._batch[place]
        self._unmet[place[0], batch.start] -= 1
        if self._unmet[place[0], batch.start]:
            return
        if not self.transport.atomic:
            self._complete(place[0], batch)
        elif not self.lagging(place):
            for rank, each in self._connected(place[0], batch):
                self._complete(rank, each)

    def lagging(self, place: Place) -> tuple[int, range] | None:
        """A batch that is not met among those that complete together with a transfer's."""
        connected = self._connected(place[0], self._batch[place])
        return next((each for each in connected if self._unmet[each[0], each[1].start]), None)

    def _connected(self, rank: int, batch: range) -> list[tuple[int, range]]:
        """The batches that a batch has exchanged messages with, directly or through others, and itself."""
        found = {(rank, batch.start): batch}
        following = [(rank, batch)]
        while following:
            rank, batch = following.pop()
            for partner in (self._partner[rank, index] for index in batch if (rank, index) in self._partner):
                other = self._batch[partner]
                if (partner[0], other.start) not in found:
                    found[partner[0], other.start] = other
                    following.append((partner[0], other))
        return [(rank, batch) for (rank, _), batch in found.items()]

    def _complete(self, rank: int, batch: range) -> None:
        """A batch is over: the next one in its lane starts."""
        for index in batch:
            self._progress[rank][index] = Progress.COMPLETE
        key = self._lane(rank, batch)
        lane = self._lanes[key]
        lane.popleft()
        for index in batch:
            del self._batch[rank, index]
            self._partner.pop((rank, index), None)
        del self._unmet[rank, batch.start]
        self.completed.append((rank, batch))
        if lane:
            self._starting.append((rank, lane[0]))
        else:
            del self._lanes[key]
