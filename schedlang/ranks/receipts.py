"""When a rank begins each receive, and when it waits for each send, from the plan alone.

What a rank gets tells it that the sender has come so far: had waited for all messages that it used
before. So the wait for a send, where the plan shows it received, takes no time; and what was sent
is kept no longer than it is under way. gloo itself cannot be asked, only waited for.
"""

from bisect import bisect_right
from itertools import accumulate, zip_longest

from attrs import define, field

from schedlang.schedule.actions import Action, is_send, is_transfer
from schedlang.schedule.kinds import AWAITS
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import BLOCKING, PORTABLE

#: Where messages have tags, a receive begins this many ops early, for as many more buffers.
_EARLY = 2

#: Where ranks may block, a send is waited for when this many others have followed, whatever is
#: known of it.
_WINDOW = 8


def receipts(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each send of a rank the op, both by index, whose message shows that it has been received;
    or else the end.
    """
    return Receipts(schedule).of(rank)


def begins(schedule: Schedule, rank: int, early: bool) -> dict[int, int]:
    """For each receive of a rank the action at which it begins, both by index: itself, or `early`
    an op before it.
    """
    actions = schedule.ranks[rank]
    ops = list[int]()
    starts = dict[int, int]()
    for index, kind in enumerate(actions.kind):
        if not is_transfer(kind):
            ops.append(index)
        elif not is_send(kind):
            # Where fewer ops than that precede it, it begins with the first of them, or in place.
            starts[index] = [*ops[-_EARLY:], index][0] if early else index
    return starts


def waits(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each send of a rank the action, both by index, at which it is waited for, or else the
    end.

    That is the op whose message shows it received; or the last send of a window, where ranks may
    block.
    """
    return Receipts(schedule).waits(rank)


@define(eq=False)
class Receipts:
    """The receipts of a schedule's ranks; what is known of a rank is worked out once for all those
    that it sends to.
    """

    schedule: Schedule
    _sends: dict[int, dict[int, int]] = field(factory=dict, init=False)
    _uses: dict[int, dict[Action, int]] = field(factory=dict, init=False)

    def of(self, rank: int) -> dict[int, int]:
        """See `receipts`."""
        # Rank 0's SEND_F0 is known to be received at its B0, which waits for RECV_B0: rank 1 sent
        # that after its F0 had waited for RECV_F0.
        #
        #     rank 0   F0 ── SEND_F0 ─╮ ── F1 ──────────────── RECV_B0 ── B0
        #                             ╰───────╮             ╭─────╯
        #     rank 1                       RECV_F0 ── F0 ── … SEND_B0
        peers = self.sends(rank)
        answers = {peer: _Answers(self, rank, peer) for peer in set(peers.values())}
        return {
            send: answers[peer].show_received(self.schedule.other_end(rank, send))
            for send, peer in peers.items()
        }

    def waits(self, rank: int) -> dict[int, int]:
        """See `waits`."""
        received = self.of(rank)
        if self.schedule.transport not in (PORTABLE, BLOCKING.name):
            return received
        sends = sorted(received)
        end = len(self.schedule.ranks[rank])
        closes = zip_longest(sends, sends[_WINDOW:], fillvalue=end)
        return {send: min(received[send], last) for send, last in closes}

    def sends(self, rank: int) -> dict[int, int]:
        """The sends of a rank, in order, each with the rank that it reaches."""
        if rank not in self._sends:
            kinds = self.schedule.ranks[rank].kind
            peers = {
                send: self.schedule.peer_of(rank, send)
                for send, kind in enumerate(kinds)
                if is_send(kind)
            }
            self._sends[rank] = {
                send: peer for send, peer in peers.items() if peer is not None
            }
        return self._sends[rank]

    def uses(self, rank: int) -> dict[Action, int]:
        """The op that waits for each message that a rank receives."""
        if rank not in self._uses:
            actions = self.schedule.ranks[rank]
            ops = enumerate(actions.each())
            self._uses[rank] = {
                (AWAITS[kind], number, microbatch): index
                for index, (kind, stage, microbatch) in ops
                if kind in AWAITS
                for number in self.schedule.layout.numbers(AWAITS[kind], stage)
            }
        return self._uses[rank]


class _Answers:
    """What the messages of a peer to a rank show of those that the rank sent."""

    def __init__(self, known: Receipts, rank: int, peer: int) -> None:
        schedule = known.schedule
        self.end = len(schedule.ranks[rank])
        #: The peer's op that waits for each message; what it sends later is an answer.
        self.used_at = known.uses(peer)
        #: The peer's sends to the rank, in order.
        self.sends = [
            send for send, other in known.sends(peer).items() if other == rank
        ]
        uses = known.uses(rank)
        arrivals = [uses[schedule.other_end(peer, send)] for send in self.sends]
        #: For each of these, the first op of the rank that waits for it or for a later one.
        self.first = list(accumulate(reversed(arrivals), min))[::-1]

    def show_received(self, message: Action) -> int:
        """The first op of the rank that waits for an answer, and so knows that a message has been
        received; the end if there is none.
        """
        answer = bisect_right(self.sends, self.used_at[message])
        return self.first[answer] if answer < len(self.first) else self.end
