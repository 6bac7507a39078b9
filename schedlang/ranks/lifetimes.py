"""The tensors that a rank holds besides its weights, and the action that frees each of them. They
follow from the rank's own order, without times.

An activation is kept from a forward to its backward. A message goes from stage to stage: it is held
from the op that makes it, or from the allocation of the receive's buffer, to its last use, or until
the rank knows that it was received. The runtime begins receives and waits for sends as
`schedlang.ranks.receipts` says, so it holds exactly these tensors.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import accumulate

import numpy as np
from attrs import evolve, frozen

from schedlang.ranks.receipts import Receipts, begun, fields_of
from schedlang.schedule.arrays import Flags, Floats, Ints
from schedlang.schedule.kept import keeps
from schedlang.schedule.kinds import HANDS_ON, OPS, READS, op_of
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import timed

# The moments of an action, and which memory is allocated or freed then:
#
#     begins        allocate the buffer of a message that the rank receives
#     has waited    free a sent message, if the message that arrived shows that it was received
#     works         allocate the results
#     ends          free the tensors that the action used for the last time
_BEGINS, _HAS_WAITED, _WORKS, _ENDS = range(4)


class Holds(Enum):
    """Kinds of tensors that a rank holds: an activation, a received message, a sent one, or a
    message between two stages of the rank.
    """

    ACTIVATION, RECEIVED, SENT, INSIDE = range(4)


@frozen
class Lifetime:
    """A tensor that a rank holds from action `start` to action `stop`, both by index.

    An activation has the name of the op that made it, `0F3`, and a message that of its transfer,
    `0SEND_F3`. A message inside the rank is named after the op that makes it and the last op that
    uses it, `0F3>1F3`. A received message is allocated before the action `start` waits, everything
    else when it works. A sent message is freed when the action `stop` has waited, everything else
    after it has worked. `stop` may be the end, one past the last action. `action` is the op that
    makes the tensor, or the transfer that sends or receives it.
    """

    what: Holds
    name: str
    action: int
    start: int
    stop: int

    @property
    def changes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The allocation and the free of the tensor: action, moment, and change in the number of
        tensors that the rank holds.
        """
        start = self.start, _BEGINS if self.what == Holds.RECEIVED else _WORKS, 1
        return start, (self.stop, _HAS_WAITED if self.what == Holds.SENT else _ENDS, -1)


def lifetimes(schedule: Schedule, rank: int) -> list[Lifetime]:
    """All activations and messages that a rank holds in a step, of a schedule with communication.

    An activation is held from `F`, `R` or `reload` to its last use: the whole backward, the weight
    half, or `offload`. If `F` drops it, it is held only while `F` runs. Copies count as instant.
    """
    return [*_activations(schedule, rank), *_messages(schedule, rank)]


def peak(lifetimes: Iterable[Lifetime]) -> int:
    """The largest number of these tensors that are held at once."""
    changes = sorted(change for each in lifetimes for change in each.changes)
    return max(accumulate(change for *_, change in changes), default=0)


def peak_messages(schedule: Schedule) -> list[int]:
    """For each rank, the largest number of messages that it holds at once."""
    times = MessageTimes(schedule)
    return [times.of_issued(rank).peak for rank in range(len(schedule.ranks))]


def frees(schedule: Schedule, rank: int) -> str:
    """The rank's actions in order, each with the tensors that it frees: `0B3 free(0F3, 0RECV_B3)`.
    A line ends after each `free`.
    """
    actions = schedule.ranks[rank]
    freed = dict[int, list[str]]()
    for each in lifetimes(schedule, rank):
        freed.setdefault(each.stop, []).append(each.name)
    text = ""
    for batch in actions.batches():
        names = [name for index in batch for name in freed.get(index, ())]
        text += schedule.names.batch(actions, batch)
        text += f" free({', '.join(names)})\n" if names else " "
    last = freed.get(len(actions))
    return text + f"end free({', '.join(last)})" if last else text.rstrip()


def _activations(schedule: Schedule, rank: int) -> Iterator[Lifetime]:
    actions = schedule.ranks[rank]
    names = schedule.names
    made = dict[tuple[int, int], int]()
    for index in range(len(actions)):
        kind, stage, microbatch = actions.at(index)
        op = op_of(kind)
        holds = op.holds
        if op.owes is not None and not schedule.layout.trains(stage):
            # The stage is frozen, so no `W` follows that would free the rest.
            holds = OPS[op.owes].holds
        if holds > 0:
            made[stage, microbatch] = index
        if holds < 0 or not keeps(schedule, kind, stage, microbatch):
            start = made.pop((stage, microbatch))
            name = names.of(actions, start)
            yield Lifetime(Holds.ACTIVATION, name, start, start, index)


def _messages(schedule: Schedule, rank: int) -> Iterator[Lifetime]:
    names = schedule.names
    actions = schedule.ranks[rank]
    found = MessageTimes(schedule).of(rank)
    columns = (found.what, found.action, found.start, found.stop)
    for what, action, start, stop in zip(*map(np.ndarray.tolist, columns), strict=True):
        name = names.of(actions, action)
        if what == Holds.INSIDE.value:
            name += f">{names.of(actions, stop)}"
        yield Lifetime(Holds(what), name, action, start, stop)


@frozen(eq=False)
class HeldMessages:
    """The messages that a rank holds, as columns with the fields of `Lifetime`; and of each the
    kind and the number of the transfer that would bring it or take it, were all stages on ranks of
    their own.
    """

    what: Ints
    action: Ints
    start: Ints
    stop: Ints
    kind: Ints
    number: Ints

    @property
    def is_received(self) -> Flags:
        """Which messages come from another rank."""
        return np.equal(self.what, Holds.RECEIVED.value)

    @property
    def is_sent(self) -> Flags:
        """Which messages go to another rank."""
        return np.equal(self.what, Holds.SENT.value)

    @property
    def peak(self) -> int:
        """The largest number of messages that are held at once."""
        moments = self.moments.ravel()
        change = np.repeat([1, -1], len(self.start))
        held = np.cumsum(change[np.lexsort((change, moments))])
        return int(held.max(initial=0))

    @property
    def moments(self) -> Floats:
        """When each message is allocated, and when it is freed: by the index of the action, and
        by the moment of the action as a part of 1.
        """
        starts = self.start + np.where(self.is_received, _BEGINS, _WORKS) / 4
        stops = self.stop + np.where(self.is_sent, _HAS_WAITED, _ENDS) / 4
        return np.array([starts, stops])


class MessageTimes:
    """The messages that the ranks of a schedule hold, and when."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._known = Receipts(schedule)

    def of(self, rank: int) -> HeldMessages:
        """The messages of a rank."""
        parts = [self._received(rank), *self._made(rank)]
        return HeldMessages(*map(np.concatenate, zip(*parts, strict=True)))

    def of_issued(self, rank: int) -> HeldMessages:
        """The messages of a rank, if ops that overlap are one action: they allocate when the first
        of them begins, and free when the last of them ends.
        """
        columns = self._schedule.columns
        own = slice(*columns.first[rank : rank + 2].tolist())
        heads = np.where(
            columns.is_transfer[own], np.arange(own.start, own.stop), columns.batch[own]
        )
        heads = np.append(heads - own.start, len(heads))
        found = self.of(rank)
        return evolve(found, start=heads[found.start], stop=heads[found.stop])

    def _received(self, rank: int) -> tuple[Ints, ...]:
        actions = self._schedule.ranks[rank]
        receive, start = begun(actions, timed(self._schedule.transport).tags)
        kind, number, microbatch = fields_of(actions)[:, receive]
        key = self._known.keys.of(kind, number, microbatch)
        stop = self._last_uses(rank)[key]
        what = np.full(len(receive), Holds.RECEIVED.value)
        return what, receive, start, stop, kind, number

    def _made(self, rank: int) -> Iterator[tuple[Ints, ...]]:
        """The messages that ops of the rank make, by kind of op."""
        keys = self._known.keys
        sends = self._known.sends(rank)
        sent_as = np.full(keys.count, -1)
        sent_as[sends.key] = np.arange(len(sends.key))
        # The entry behind all sends is for what is not sent.
        index = np.append(sends.index, -1)
        waited = np.append(self._known.waits(rank), -1)
        last_uses = self._last_uses(rank)
        for kind, op, number, key in keys.of_ops(self._schedule.ranks[rank], HANDS_ON):
            send = sent_as[key]
            is_sent = send >= 0
            what = np.where(is_sent, Holds.SENT.value, Holds.INSIDE.value)
            action = np.where(is_sent, index[send], op)
            # Without a send, the next stage is on this rank, or there is none.
            stop = np.where(is_sent, waited[send], last_uses[key])
            columns = what, action, op, stop, np.full(len(op), int(kind)), number
            yield tuple(column[stop >= 0] for column in columns)

    def _last_uses(self, rank: int) -> Ints:
        """By key, the last op of the rank that uses the message; -1 where none does."""
        last = np.full(self._known.keys.count, -1)
        for _, op, _, key in self._known.keys.of_ops(self._schedule.ranks[rank], READS):
            np.maximum.at(last, key, op)
        return last
