"""Which send meets which receive on a transport.

A *channel* is an ordered pair of ranks. Programs of ranks have no wildcards, so the n-th send on a
channel meets the n-th receive, whatever happens on others; with tags, the n-th for the same
message.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from attrs import frozen

from schedlang.proof.transfer_batches import exchanging
from schedlang.schedule.arrays import Flags, Floats, Ints, is_any, repeated, repeats
from schedlang.schedule.columns import Columns
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import RECEIVES, ROWS, SENDS, TRANSFERS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport

NO_PARTNER = -1


@frozen(eq=False)
class Channels:
    """The transfers of a schedule on a transport, as columns: row i is about action i.

    `partner` is the row of the other side of a transfer, or NO_PARTNER. `peer` is its rank, or -1
    where there is no rank to reach. For a transfer with a peer, `nth[row]` is the number of sends,
    or of receives, before it on its channel `channel[row]`.
    """

    schedule: Schedule
    partner: Ints
    peer: Ints
    channel: Ints
    nth: Ints

    @property
    def columns(self) -> Columns:
        """The actions of the schedule."""
        return self.schedule.columns

    @property
    def is_send(self) -> Flags:
        """Which actions are sends."""
        return self.columns.is_send

    @property
    def has_peer(self) -> Flags:
        """Which actions have another rank to reach."""
        return self.peer >= 0

    @cached_property
    def receives(self) -> Ints:
        """For each transfer the receive of its message, or NO_PARTNER."""
        return np.where(self.is_send, self.partner, np.arange(len(self.partner)))

    @cached_property
    def alone(self) -> Ints:
        """The transfers that have a rank to reach, and no transfer at the other end."""
        return np.flatnonzero(self.has_peer & (self.partner == NO_PARTNER))

    def latency(self, table: Floats) -> Floats:
        """The latency of each transfer, from a `table` by the product that is sent and the number
        of the receive.
        """
        # The table goes by receives, see `schedlang.schedule.costs`: a send looks up the number
        # that its message has at the other end.
        times = np.zeros(len(self.columns))
        for made, send in SENDS.items():
            sends = self.columns.where(send)
            of_receives = np.array(self.schedule.layout.other_numbers(send))
            numbers = of_receives[self.columns.stage[sends]]
            times[sends] = table[made, np.minimum(numbers, table.shape[1] - 1)]
        # A receive takes the time of the send that it meets, even if it is meant for another one.
        received = np.flatnonzero(~self.is_send & (self.partner >= 0))
        times[received] = times[self.partner[received]]
        return times

    def components(self) -> Ints:
        """For each transfer, a number that all batches share which exchange messages, directly or
        through others; -1 for a single transfer that meets a single one, or none.
        """
        columns = self.columns
        rows = np.flatnonzero(self.partner >= 0)
        label = exchanging(columns, rows, self.partner[rows])[columns.batch]
        largest = np.zeros(len(columns), np.int64)
        np.maximum.at(largest, label, columns.sizes)
        return np.where(largest[label] > 1, label, -1)

    def taking_room(self, capacity: float) -> tuple[Ints, Ints]:
        """The sends that wait for room: a channel has room for `capacity` messages, so a send waits
        until an earlier message is received. With each send the receive of that message, or
        NO_PARTNER.
        """
        sends = np.flatnonzero(self.is_send & self.has_peer & (self.nth >= capacity))
        if not len(sends):
            return sends, sends
        # With room for 2 messages, send 5 of a channel waits until message 3 is received, the one
        # that is `capacity` before it.
        receives = np.flatnonzero(~self.is_send & self.has_peer)
        earlier = _lookup(
            self._key(receives, 0), receives, self._key(sends, int(capacity))
        )
        return sends, earlier

    def _key(self, rows: Ints, earlier: int) -> Ints:
        """A number for the channel of each transfer and its place there, so many places earlier."""
        return (
            self.channel[rows] * np.int64(len(self.columns) + 1)
            + self.nth[rows]
            - earlier
        )

    def nowhere(self) -> list[Finding]:
        """The findings for transfers that have no rank to reach."""
        rows = np.flatnonzero(self.columns.is_transfer & ~self.has_peer)
        findings = []
        for row in rows.tolist():
            rank, index = self.columns.place(row)
            message = (
                f"`{self.schedule.name_of(rank, index)}` has no other rank to reach"
            )
            findings.append(
                Finding(
                    "unmatched-send" if self.is_send[row] else "unmatched-receive",
                    message,
                    rank,
                    int(self.columns.source[row]),
                    numbers=(int(self.columns.stage[row]),),
                )
            )
        return findings

    def repeated(self) -> Iterator[tuple[int, Finding]]:
        """The sends of messages that were sent before, each with its finding."""
        columns = self.columns
        # One number for each stage, direction (activations or gradients) and microbatch.
        rows = np.flatnonzero(self.is_send)
        microbatches = int(columns.microbatch.max(initial=0)) + 1
        number = columns.stage[rows] * 2 + is_any(columns.kind[rows], SENDS[Kind.B])
        later, _ = repeats(number * np.int64(microbatches) + columns.microbatch[rows])
        for row in rows[later].tolist():
            rank, index = columns.place(row)
            message = f"`{self.schedule.name_of(rank, index)}` is sent twice"
            place = int(columns.source[row])
            numbers = (int(columns.stage[row]),)
            yield row, Finding("repeated-send", message, rank, place, numbers=numbers)

    def mismatched(self) -> Iterator[tuple[int, Finding]]:
        """The sends whose message meets the receive of another one, each with its finding."""
        columns = self.columns
        sends = np.flatnonzero(self.is_send & (self.partner >= 0))
        receives = self.partner[sends]
        tags = _tags(self.schedule.layout, columns, sends)
        is_wrong = (tags != _tags(self.schedule.layout, columns, receives)) | (
            columns.microbatch[receives] != columns.microbatch[sends]
        )
        wrong = zip(sends[is_wrong].tolist(), receives[is_wrong].tolist(), strict=True)
        for send, receive in wrong:
            sender, sent = columns.place(send)
            receiver, received = columns.place(receive)
            text = self.schedule.name_of(sender, sent)
            wanted = self.schedule.name_of(receiver, received)
            message = f"rank {receiver} receives `{wanted}` where rank {sender} sends `{text}`"
            related = (
                (int(columns.source[send]), f"`{text}` is next on this channel"),
            )
            help = "messages between two ranks arrive in the order of their sends"
            finding = Finding(
                "mismatched-transfer",
                message,
                receiver,
                int(columns.source[receive]),
                related=related,
                help=help,
                numbers=(int(columns.stage[receive]), int(columns.stage[send])),
            )
            yield send, finding


def channels_of(schedule: Schedule, transport: Transport) -> Channels:
    """The transfers of a schedule, and which of them meet on a transport."""
    columns = schedule.columns
    layout = schedule.layout
    partner = np.full(len(columns), NO_PARTNER, np.int64)
    channel = np.zeros(len(columns), np.int64)
    nth = np.zeros(len(columns), np.int64)
    peer = peers(schedule, np.arange(len(columns)))
    rows = np.flatnonzero(peer >= 0)
    # What follows has one entry for each transfer that can reach a rank, in the order of `rows`.
    is_send = columns.is_send[rows]
    own = columns.rank[rows].astype(np.int64)
    sender = np.where(is_send, own, peer[rows])
    receiver = np.where(is_send, peer[rows], own)
    # A channel goes from a rank to another one; of batches apart, or of messages with one tag.
    key = sender * len(schedule.ranks) + receiver
    if transport.apart:
        key = key * 2 + (columns.sizes[rows] > 1)
    if transport.tags:
        # The numbers of stages, of skips, and of what is past the first and the last stage.
        key = key * 2 * (len(layout.all_numbers) + 2) + _tags(layout, columns, rows)
        key = (
            key * (int(columns.microbatch[rows].max(initial=0)) + 1)
            + columns.microbatch[rows]
        )
    channel[rows] = key
    # The n-th send of a channel meets the n-th receive.
    for side in (is_send, ~is_send):
        nth[rows[side]] = _counted(key[side])
    # Channel and turn as one number: where a send and a receive have the same, they meet.
    turn = channel * np.int64(len(columns) + 1) + nth
    sends = rows[is_send]
    receives = rows[~is_send]
    partner[sends] = _lookup(turn[receives], receives, turn[sends])
    met = sends[partner[sends] >= 0]
    partner[partner[met]] = met
    return Channels(schedule, partner, peer, channel, nth)


def _counted(keys: Ints) -> Ints:
    """For each key, how many equal keys stand before it."""
    # In sorted order equal keys are neighbours: count from the first of each run.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    lengths = np.diff(np.append(begins, len(ordered)))
    counts = np.empty(len(keys), np.int64)
    counts[order] = np.arange(len(keys)) - repeated(begins, lengths)
    return counts


def _lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The value of each wanted key, or NO_PARTNER."""
    if not len(keys):
        return np.full(len(wanted), NO_PARTNER, np.int64)
    # The keys are nearly in order. A stable sort is faster on such keys.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    # `searchsorted` says where a key would stand, not that it is there; past the end, the last one
    # is looked at, which is then another one.
    at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    return np.where(ordered[at] == wanted, values[order[at]], NO_PARTNER)


def _tags(layout: Layout, columns: Columns, rows: Ints) -> Ints:
    """What each transfer carries: the kind and number of its receive."""
    number = columns.stage[rows].astype(np.int64)
    kind = columns.kind[rows]
    for send in SENDS.values():
        sends = kind == send
        number[sends] = np.array(layout.other_numbers(send))[number[sends]]
    return number * 2 + is_any(kind, SENDS[Kind.B], RECEIVES[Kind.B])


def peers(schedule: Schedule, rows: Ints) -> Ints:
    """The rank at the other end of each transfer; -1 where there is none, and for ops."""
    numbers = schedule.layout.all_numbers
    table = np.full((ROWS, len(numbers)), -1, np.int64)
    for kind in TRANSFERS:
        for number in numbers:
            peer = schedule.peer(kind, number)
            if peer is not None:
                table[kind, number] = peer
    return table[schedule.columns.kind[rows], schedule.columns.stage[rows]]
