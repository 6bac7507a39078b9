"""When a rank begins each receive, and when it waits for each send, from the plan alone.

A message shows how far its sender had come: that it had received all messages that it used before.
So the rank waits for a send where a later message shows that it was received. That wait takes no
time, and the sent tensor is not kept much longer than it is on its way. gloo offers no other test
of whether a send is complete.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain

import numpy as np
from attrs import define, field, frozen

from schedlang.schedule.actions import Actions
from schedlang.schedule.arrays import Ints, is_any, members
from schedlang.schedule.kinds import AWAITS, RECEIVES, ROWS, SENDS, TRANSFERS
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import BLOCKING, PORTABLE

#: If messages have tags, a receive begins this many ops early, which takes as many more buffers.
_EARLY = 2

#: If ranks may block, a rank waits for a send after this many further sends at the latest.
_WINDOW = 8


def receipts(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each send of a rank, the op that waits for a message which shows that the send was
    received, both by index; or the end.
    """
    known = Receipts(schedule)
    return _by_index(known.sends(rank).index, known.of(rank))


def begins(schedule: Schedule, rank: int, early: bool) -> dict[int, int]:
    """For each receive of a rank, the action at which it begins, both by index: the receive itself,
    or an earlier op if `early`.
    """
    return _by_index(*begun(schedule.ranks[rank], early))


def waits(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each send of a rank, the action at which the rank waits for it, both by index, or the
    end.

    That is the op of `receipts`; or if ranks may block, the last send of a window at the latest.
    """
    known = Receipts(schedule)
    return _by_index(known.sends(rank).index, known.waits(rank))


def _by_index(index: Ints, values: Ints) -> dict[int, int]:
    return dict(zip(index.tolist(), values.tolist(), strict=True))


def begun(actions: Actions, early: bool) -> tuple[Ints, Ints]:
    """The receives of a rank in order, and the action at which each begins: see `begins`."""
    kind = np.array(actions.kind)
    receives = np.flatnonzero(is_any(kind, *RECEIVES.values()))
    ops = np.flatnonzero(~is_any(kind, *TRANSFERS))
    if not early or not len(ops):
        return receives, receives
    # If fewer ops precede it, it begins with the first of them, or at its own place.
    before = np.searchsorted(ops, receives)
    return receives, np.where(before, ops[np.maximum(before - _EARLY, 0)], receives)


def fields_of(actions: Actions) -> Ints:
    """The kind, number and microbatch of each action of a rank: a row for each field."""
    return np.array([actions.kind, actions.stage, actions.microbatch], np.int32)


class MessageKeys:
    """A number for each message of a schedule, its key: by the kind of its receive, the number of
    the receive, and the microbatch.
    """

    def __init__(self, layout: Layout) -> None:
        stages = range(len(layout.placement))
        numbers = len(layout.all_numbers)
        self._stride = max(map(layout.units, stages))
        self.count = len(SENDS) * numbers * self._stride
        # By kind of transfer, and number: the first key of the messages that it moves.
        self._first = np.zeros((ROWS, numbers), np.int64)
        for place, send in enumerate(SENDS.values()):
            begin = place * numbers
            received_as = begin + np.array(layout.other_numbers(send))
            self._first[send] = received_as * self._stride
            own_numbers = begin + np.arange(numbers)
            self._first[TRANSFERS[send].other_end] = own_numbers * self._stride
        #: For each kind of transfer, how many numbers each stage has, and the numbers.
        self._of_stages = {}
        for kind in TRANSFERS:
            of_stages = [layout.numbers(kind, stage) for stage in stages]
            counts = np.array(list(map(len, of_stages)), np.int64)
            numbers_of = np.array([*chain.from_iterable(of_stages)], np.int64)
            self._of_stages[kind] = counts, numbers_of

    def of(self, kind: int | Ints, number: Ints, microbatch: Ints) -> Ints:
        """The keys of transfers."""
        keys: Ints = self._first[kind, number] + microbatch
        return keys

    def of_ops(
        self, actions: Actions, kinds: Mapping[int, int]
    ) -> Iterator[tuple[int, Ints, Ints, Ints]]:
        """The messages of a rank's ops, if every stage were on another rank: for each kind of op
        the kind of transfer, and for each message the index of the op, and its number and key.
        """
        kind_of, stage, microbatch = fields_of(actions)
        for kind, transfer in kinds.items():
            counts, numbers = self._of_stages[transfer]
            ops = np.flatnonzero(kind_of == int(kind))
            op, place = members(counts, stage[ops])
            index = ops[op]
            number = numbers[place]
            key = self.of(transfer, number, microbatch[index])
            yield transfer, index, number, key


@frozen(eq=False)
class Sends:
    """The sends of a rank to other ranks, in order: the index, the receiver and the key of
    each.
    """

    index: Ints
    peer: Ints
    key: Ints

    def to(self, rank: int) -> "Sends":
        """Those to one rank."""
        own = self.peer == rank
        return Sends(self.index[own], self.peer[own], self.key[own])


@define(eq=False)
class Receipts:
    """The receipts of a schedule's ranks. The sends and uses of a rank are computed once for all of
    its peers.
    """

    schedule: Schedule
    keys: MessageKeys = field(init=False)
    #: By kind of transfer, and number: the receiver of a send; -1 where there is none.
    _peers: Ints = field(init=False)
    _sends: dict[int, Sends] = field(factory=dict, init=False)
    #: By key, the op that waits for the message on the rank that receives it. Only the entries of
    #: ranks in `_read` are there: a process has read no other ranks from its plan.
    _used_at: Ints = field(init=False)
    _read: set[int] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        layout = self.schedule.layout
        self.keys = MessageKeys(layout)
        self._used_at = np.zeros(self.keys.count, np.int32)
        self._peers = np.full((ROWS, len(layout.all_numbers)), -1)
        for kind in SENDS.values():
            peers = map(partial(layout.peer, kind), layout.all_numbers)
            self._peers[kind] = [-1 if peer is None else peer for peer in peers]

    def of(self, rank: int) -> Ints:
        """For each of a rank's `sends`, what `receipts` says."""
        # Rank 0's SEND_F0 is known to be received at its B0, which waits for RECV_B0: rank 1 sent
        # that after its F0 had waited for RECV_F0.
        #
        #     rank 0   F0 ── SEND_F0 ─╮ ── F1 ──────────────── RECV_B0 ── B0
        #                             ╰───────╮             ╭─────╯
        #     rank 1                       RECV_F0 ── F0 ── … SEND_B0
        sends = self.sends(rank)
        end = len(self.schedule.ranks[rank])
        received = np.full(len(sends.index), end)
        for peer in set(sends.peer.tolist()):
            answers = self.sends(peer).to(rank)
            # For each answer, the first op of the rank that waits for it or for a later one.
            arrivals = self._uses(rank, answers.key)
            first = np.minimum.accumulate(arrivals[::-1])[::-1]
            # A message is known to be received at the first answer that the peer has sent after its
            # op that waits for the message.
            used = self._uses(peer, sends.to(peer).key)
            answer = np.searchsorted(answers.index, used, side="right")
            received[sends.peer == peer] = np.append(first, end)[answer]
        return received

    def waits(self, rank: int) -> Ints:
        """For each of a rank's `sends`, what `waits` says."""
        received = self.of(rank)
        if self.schedule.transport not in (PORTABLE, BLOCKING.name):
            return received
        end = len(self.schedule.ranks[rank])
        closes = np.append(self.sends(rank).index, [end] * _WINDOW)[_WINDOW:]
        waited: Ints = np.minimum(received, closes)
        return waited

    def sends(self, rank: int) -> Sends:
        """The sends of a rank."""
        if rank not in self._sends:
            actions = self.schedule.ranks[rank]
            kind, number, microbatch = fields_of(actions)
            # Ops of a stage are looked up, too: they have no receiver.
            peer = self._peers[kind, number]
            index = np.flatnonzero(peer >= 0)
            key = self.keys.of(kind[index], number[index], microbatch[index])
            self._sends[rank] = Sends(index, peer[index], key)
        return self._sends[rank]

    def _uses(self, rank: int, keys: Ints) -> Ints:
        """The ops of a rank that wait for messages to it."""
        if rank not in self._read:
            actions = self.schedule.ranks[rank]
            for _, index, _, key in self.keys.of_ops(actions, AWAITS):
                self._used_at[key] = index
            self._read.add(rank)
        return self._used_at[keys]
