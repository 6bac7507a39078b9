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

from attrs import evolve, frozen

from schedlang.ranks.receipts import Receipts, begins
from schedlang.schedule.actions import Action, Actions, is_transfer
from schedlang.schedule.kinds import HANDS_ON, OPS, READS, op_of
from schedlang.schedule.layout import Layout
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
    return [*_activations(schedule, rank), *_messages(Receipts(schedule), rank)]


def peak(lifetimes: Iterable[Lifetime]) -> int:
    """The largest number of these tensors that are held at once."""
    changes = sorted(change for each in lifetimes for change in each.changes)
    return max(accumulate(change for *_, change in changes), default=0)


def peak_messages(schedule: Schedule) -> list[int]:
    """For each rank, the largest number of messages that it holds at once."""
    known = Receipts(schedule)
    return [
        peak(_together(actions, _messages(known, rank)))
        for rank, actions in enumerate(schedule.ranks)
    ]


def _together(actions: Actions, lifetimes: Iterable[Lifetime]) -> Iterator[Lifetime]:
    """The lifetimes if overlapped ops are one action: they allocate when the first of them begins,
    and free when the last of them ends.
    """
    heads = [*range(len(actions) + 1)]
    for batch in actions.batches():
        if not is_transfer(actions.kind[batch.start]):
            heads[batch.start : batch.stop] = [batch.start] * len(batch)
    for each in lifetimes:
        yield evolve(each, start=heads[each.start], stop=heads[each.stop])


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
        if holds < 0 or not schedule.keeps(kind, stage, microbatch):
            start = made.pop((stage, microbatch))
            name = names.of(actions, start)
            yield Lifetime(Holds.ACTIVATION, name, start, start, index)


def _messages(known: Receipts, rank: int) -> Iterator[Lifetime]:
    schedule = known.schedule
    actions = schedule.ranks[rank]
    names = schedule.names
    layout = schedule.layout
    places = {actions.at(index): index for index in range(len(actions))}
    used = _last_uses(layout, places)
    for receive, start in begins(
        schedule, rank, timed(schedule.transport).tags
    ).items():
        stop = used[actions.at(receive)]
        name = names.of(actions, receive)
        yield Lifetime(Holds.RECEIVED, name, receive, start, stop)
    waited = known.waits(rank)
    for (kind, stage, microbatch), start in places.items():
        if kind not in HANDS_ON:
            continue
        for number in layout.numbers(HANDS_ON[kind], stage):
            send = places.get((HANDS_ON[kind], number, microbatch))
            if send is not None:
                name = names.of(actions, send)
                yield Lifetime(Holds.SENT, name, send, start, waited[send])
                continue
            # Without a send, the next stage is on this rank, or there is none.
            following = used.get(
                (*layout.counterpart(HANDS_ON[kind], number), microbatch)
            )
            if following is not None:
                name = f"{names.of(actions, start)}>{names.of(actions, following)}"
                yield Lifetime(Holds.INSIDE, name, start, start, following)


def _last_uses(layout: Layout, places: dict[Action, int]) -> dict[Action, int]:
    """The last op that uses each message, by the message's receive. A message within the rank has
    the same key, though no such receive exists.
    """
    return {
        (READS[kind], number, microbatch): index
        for (kind, stage, microbatch), index in places.items()
        if kind in READS
        for number in layout.numbers(READS[kind], stage)
    }
