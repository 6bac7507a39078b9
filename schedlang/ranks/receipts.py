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
    # Rank 0's SEND_F0 is known to be received at its B0, which waits for RECV_B0: rank 1 sent that
    # after its F0 had waited for RECV_F0.
    #
    #     rank 0   F0 ── SEND_F0 ─╮ ── F1 ──────────────── RECV_B0 ── B0
    #                             ╰───────╮             ╭─────╯
    #     rank 1                       RECV_F0 ── F0 ── … SEND_B0
    peers = {send: schedule.peer_of(rank, send) for send in _sends(schedule.ranks[rank])}
    answers = {
        peer: _Answers(schedule, rank, peer) for peer in set(peers.values()) if peer is not None
    }
    return {
        send: answers[peer].show_received(schedule.other_end(rank, send))
        for send, peer in peers.items()
        if peer is not None
    }


class _Answers:
    """What the messages of a peer to a rank show of those that the rank sent."""

    def __init__(self, schedule: Schedule, rank: int, peer: int) -> None:
        self.end = len(schedule.ranks[rank])
        #: The peer's op that waits for each message; what it sends later is an answer.
        self.used_at = _uses(schedule, peer)
        #: The peer's sends to the rank, in order.
        self.sends = [
            send for send in _sends(schedule.ranks[peer]) if schedule.peer_of(peer, send) == rank
        ]
        uses = _uses(schedule, rank)
        arrivals = [uses[schedule.other_end(peer, send)] for send in self.sends]
        #: For each of these, the first op of the rank that waits for it or for a later one.
        self.first = list(accumulate(reversed(arrivals), min))[::-1]

    def show_received(self, message: _Message) -> int:
        """The first op of the rank that waits for an answer, and so knows that a message has been
        received; the end if there is none.
        """
        answer = bisect_right(self.sends, self.used_at[message])
        return self.first[answer] if answer < len(self.first) else self.end


def _sends(actions: Actions) -> list[int]:
    return [index for index, kind in enumerate(actions.kind) if is_send(kind)]


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
