"""What a rank holds beside its weights, and which action lets go of it: from the rank's own order
alone, without time.

There are activations, what a forward keeps for its backward; and messages, what passes from stage
to stage: from where it is made, or room is made for it, to its last use, or to where it is known to
have been received. The runtime begins receives and waits for sends as `schedlang.ranks.receipts`
says, so what is claimed here is what it holds.
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

# The moments of an action, and what is taken or let go then:
#
#     begins        room for a message that it receives is taken
#     has waited    a send is let go, which what has come shows to be received
#     works         what it makes is taken
#     ends          what it used for the last time is let go
_BEGINS, _HAS_WAITED, _WORKS, _ENDS = range(4)


class Holds(Enum):
    """What a rank holds: an activation, a message that it receives or sends, or one between two of
    its stages.
    """

    ACTIVATION, RECEIVED, SENT, INSIDE = range(4)


@frozen
class Lifetime:
    """Something that a rank holds, from action `start` to action `stop`, by their indices.

    An activation has the name of the op that made it, `0F3`, a message that of its transfer,
    `0SEND_F3`; one inside the rank those of the op that makes it and of the last one that uses it,
    `0F3>1F3`. A message that is received is there before the op `start` waits, all else from when
    it works. One that is sent is let go when the op `stop` has waited, all else after it has
    worked. `stop` may be the end, one past the last action. It is made or sent by the `action`.
    """

    what: Holds
    name: str
    action: int
    start: int
    stop: int

    @property
    def changes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """When it is taken and when let go: action, moment of it, and by how much the rank then
        holds more.
        """
        start = self.start, _BEGINS if self.what == Holds.RECEIVED else _WORKS, 1
        return start, (self.stop, _HAS_WAITED if self.what == Holds.SENT else _ENDS, -1)


def lifetimes(schedule: Schedule, rank: int) -> list[Lifetime]:
    """All that a rank of a schedule with communication holds in a step beside weights, what it is
    given and results.

    An activation is held from `F` (`R`, `reload`) to its last use: the whole backward, the weight
    half, or `offload`; one that `F` drops, while it runs. Copies count as over at once.
    """
    return [*_activations(schedule, rank), *_messages(Receipts(schedule), rank)]


def peak(lifetimes: Iterable[Lifetime]) -> int:
    """The most of them that are held at once."""
    changes = sorted(change for each in lifetimes for change in each.changes)
    return max(accumulate(change for *_, change in changes), default=0)


def peak_messages(schedule: Schedule) -> list[int]:
    """For each rank, the most messages that it holds at once."""
    known = Receipts(schedule)
    return [
        peak(_together(actions, _messages(known, rank)))
        for rank, actions in enumerate(schedule.ranks)
    ]


def _together(actions: Actions, lifetimes: Iterable[Lifetime]) -> Iterator[Lifetime]:
    """Lifetimes of a rank where ops that overlap are one: all begin with the first of them, and
    what they use is let go when the last ends.
    """
    heads = [*range(len(actions) + 1)]
    for batch in actions.batches():
        if not is_transfer(actions.kind[batch.start]):
            heads[batch.start : batch.stop] = [batch.start] * len(batch)
    for each in lifetimes:
        yield evolve(each, start=heads[each.start], stop=heads[each.stop])


def frees(schedule: Schedule, rank: int) -> str:
    """The rank's actions in order, with what each lets go of: `0B3 free(0F3, 0RECV_B3)`, which ends
    a line.
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
            # No `W` follows.
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
            # No send: the stage that takes it is on this rank, or there is none.
            following = used.get(
                (*layout.counterpart(HANDS_ON[kind], number), microbatch)
            )
            if following is not None:
                name = f"{names.of(actions, start)}>{names.of(actions, following)}"
                yield Lifetime(Holds.INSIDE, name, start, start, following)


def _last_uses(layout: Layout, places: dict[Action, int]) -> dict[Action, int]:
    """The last op that uses each message, by its receive, which a message from the same rank does
    not have.
    """
    return {
        (READS[kind], number, microbatch): index
        for (kind, stage, microbatch), index in places.items()
        if kind in READS
        for number in layout.numbers(READS[kind], stage)
    }
