"""When a rank knows that a message of its has been received, from the plan alone.

What a rank gets tells it that the sender has come so far: had waited for all messages that it used
before. So the wait for a send, where the plan shows it received, takes no time; and what was sent
is kept no longer than it is under way. gloo itself cannot be asked, only waited for.
"""

from bisect import bisect_right
from itertools import accumulate

from schedlang.schedule.actions import Actions, is_send
from schedlang.schedule.kinds import AWAITS
from schedlang.schedule.schedule import Schedule

_Message = tuple[int, int, int]


def receipts(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each send of a rank the op, both by index, whose message shows that it has been received;
    or else the end.
    """
    actions = schedule.ranks[rank]
    peers = {
        send: schedule.peer(actions.kind[send], actions.stage[send]) for send in _sends(actions)
    }
    shown = {peer: _Shown(schedule, rank, peer) for peer in set(peers.values()) if peer is not None}
    return {
        send: shown[peer].received(_received(schedule, rank, send))
        for send, peer in peers.items()
        if peer is not None
    }


class _Shown:
    """What the messages of a peer show of those to it."""

    def __init__(self, schedule: Schedule, rank: int, peer: int) -> None:
        actions = schedule.ranks[peer]
        own = _uses(schedule, rank)
        self.uses = _uses(schedule, peer)
        self.end = len(schedule.ranks[rank])
        answers = [
            (index, own[_received(schedule, peer, index)])
            for index in _sends(actions)
            if schedule.peer(actions.kind[index], actions.stage[index]) == rank
        ]
        self.sent = [index for index, _ in answers]
        #: The first of this rank's ops to use one of the answers from each on.
        self.first = list(accumulate((use for _, use in reversed(answers)), min))[::-1]

    def received(self, message: _Message) -> int:
        """The first op of this rank whose message was sent after the peer had used one; the end if
        there is none.
        """
        answer = bisect_right(self.sent, self.uses[message])
        return self.first[answer] if answer < len(self.first) else self.end


def _sends(actions: Actions) -> list[int]:
    return [index for index, kind in enumerate(actions.kind) if is_send(kind)]


def _received(schedule: Schedule, rank: int, send: int) -> _Message:
    """The receive of a rank's send."""
    kind, number, microbatch, *_ = schedule.ranks[rank].row(send)
    return *schedule.layout.counterpart(kind, number), microbatch


def _uses(schedule: Schedule, rank: int) -> dict[_Message, int]:
    """The op that waits for each message that a rank receives."""
    actions = schedule.ranks[rank]
    ops = enumerate(zip(actions.kind, actions.stage, actions.microbatch, strict=True))
    return {
        (AWAITS[kind], number, microbatch): index
        for index, (kind, stage, microbatch) in ops
        if kind in AWAITS
        for number in schedule.layout.numbers(AWAITS[kind], stage)
    }
