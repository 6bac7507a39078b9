"""When a rank begins each receive, and when it waits for each send, from the plan alone.

A message shows how far its sender had come: that it had received all messages that it used before.
So the rank waits for a send where a later message shows that it was received. That wait takes no
time, and the sent tensor is not kept much longer than it is on its way. gloo offers no other test
of whether a send is complete.
"""

from bisect import bisect_right
from itertools import accumulate, zip_longest

from attrs import define, field

from schedlang.schedule.actions import Action, is_send, is_transfer
from schedlang.schedule.kinds import AWAITS
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
    return Receipts(schedule).of(rank)


def begins(schedule: Schedule, rank: int, early: bool) -> dict[int, int]:
    """For each receive of a rank, the action at which it begins, both by index: the receive itself,
    or an earlier op if `early`.
    """
    actions = schedule.ranks[rank]
    ops = list[int]()
    starts = dict[int, int]()
    for index, kind in enumerate(actions.kind):
        if not is_transfer(kind):
            ops.append(index)
        elif not is_send(kind):
            # If fewer ops precede it, it begins with the first of them, or at its own place.
            starts[index] = [*ops[-_EARLY:], index][0] if early else index
    return starts


def waits(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each send of a rank, the action at which the rank waits for it, both by index, or the
    end.

    That is the op of `receipts`; or if ranks may block, the last send of a window at the latest.
    """
    return Receipts(schedule).waits(rank)


@define(eq=False)
class Receipts:
    """The receipts of a schedule's ranks. The sends and uses of a rank are computed once for all of
    its peers.
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
        """The sends of a rank, in order, each with its receiver."""
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
    """The messages from a peer to a rank, which show what the peer has received from the rank."""

    def __init__(self, known: Receipts, rank: int, peer: int) -> None:
        schedule = known.schedule
        self.end = len(schedule.ranks[rank])
        #: The peer's op that waits for each message; messages that it sends later are answers.
        self.used_at = known.uses(peer)
        #: The peer's sends to the rank, in order.
        self.sends = [
            send for send, other in known.sends(peer).items() if other == rank
        ]
        uses = known.uses(rank)
        arrivals = [uses[schedule.other_end(peer, send)] for send in self.sends]
        #: For each of these sends, the first op of the rank that waits for it or for a later one.
        self.first = list(accumulate(reversed(arrivals), min))[::-1]

    def show_received(self, message: Action) -> int:
        """The first op of the rank that waits for an answer to a message, which shows that the peer
        has received it; the end if there is none.
        """
        answer = bisect_right(self.sends, self.used_at[message])
        return self.first[answer] if answer < len(self.first) else self.end
