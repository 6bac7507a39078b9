"""Why an execution stands still: transfers that are never met, or ranks that wait for each
other.
"""

from attrs import frozen

from schedlang.diagnostics.waits import Wait
from schedlang.proof.network import Network, Place, Progress
from schedlang.proof.waits import Edge, describe
from schedlang.schedule.actions import is_send, is_transfer, word
from schedlang.schedule.findings import Finding, ranks_text
from schedlang.schedule.kinds import Kind
from schedlang.schedule.needs import MAKES, needs
from schedlang.schedule.schedule import Schedule


@frozen
class Standstill:
    """Where an execution has come to rest: how far each transfer is, and the action that holds each
    rank.

    That is a transfer, or an optimizer step that waits for gradients of replicas.
    """

    schedule: Schedule
    network: Network
    held_at: list[int | None]

    def explain(self, waiting: list[Place], other_findings: bool) -> list[Finding]:
        """What keeps ranks from going on, given the transfers that wait for their other side.

        A transfer that is never met explains all that waits behind it, and so may other findings;
        only a standstill that nothing else explains is reported as a deadlock.
        """
        never = [place for place in waiting if self.release(place) is None]
        # One for each place of the program is shown.
        first = list({self.source(place): place for place in reversed(never)}.values())
        edges = [Edge(place, "never matched", alone=self.is_alone(place)) for place in first]
        waits = dict(zip(first, describe(self.schedule, edges), strict=True))
        findings = [self.never_met(place, waits.get(place)) for place in never]
        return findings if findings or other_findings else [self.deadlock(waiting)]

    def release(self, place: Place) -> Place | None:
        """The action that would meet a waiting transfer."""
        peer, *wanted = self.other_end(place)
        actions = self.schedule.ranks[peer]
        for later in range(len(actions)):
            meets = [actions.kind[later], actions.stage[later], actions.microbatch[later]] == wanted
            if meets and self.network.progress((peer, later)) < Progress.STARTED:
                return peer, later
        return None

    def other_end(self, place: Place) -> tuple[int, Kind, int, int]:
        """The other side of a transfer: its rank, kind, number and microbatch."""
        kind, number, microbatch, *_ = self.schedule.ranks[place[0]].row(place[1])
        peer = self.schedule.peer(kind, number)
        assert peer is not None
        return peer, *self.schedule.layout.counterpart(kind, number), microbatch

    def word(self, place: Place) -> str:
        """An action in a message."""
        return f"`{self.schedule.ranks[place[0]].word(place[1])}`"

    def source(self, place: Place) -> int:
        """The place of an action in the program."""
        return self.schedule.ranks[place[0]].source[place[1]]

    def never_met(self, place: Place, wait: Wait | None) -> Finding:
        """A transfer whose other side does not come."""
        peer, *wanted = self.other_end(place)
        sent = is_send(self.schedule.ranks[place[0]].kind[place[1]])
        done = "received" if sent else "sent"
        message = (
            f"{self.word(place)} on rank {place[0]} is never {done}: rank {peer} has no "
            f"`{word(*wanted)}` left"
        )
        help = None
        if self.stands_there(place):
            message = (
                f"{self.word(place)} on rank {place[0]} and `{word(*wanted)}` on rank "
                f"{peer} "
                "never meet"
            )
            help = (
                "one is issued in a batch and one alone, which take different ways: issue both "
                "alike"
            )
        return Finding(
            "unmatched-send" if sent else "unmatched-receive",
            message,
            place[0],
            self.source(place),
            help=help,
            waits=(wait,) if wait else (),
            numbers=(self.schedule.ranks[place[0]].stage[place[1]], wanted[1]),
        )

    def stands_there(self, place: Place) -> bool:
        """Whether the other side of a transfer waits as well, on another channel."""
        peer, *wanted = self.other_end(place)
        actions = self.schedule.ranks[peer]
        waiting = self.network.waiting()
        return any([*actions.row(index)[:3]] == wanted for rank, index in waiting if rank == peer)

    def deadlock(self, waiting: list[Place]) -> Finding:
        """The ranks that wait for each other: from any that waits, follow what it waits for until
        that comes again.
        """
        started = [place for place in waiting if self.network.progress(place) == Progress.STARTED]
        steps = [(rank, held) for rank, held in enumerate(self.held_at) if held is not None]
        order = [min(started or [place for place in steps if not self.is_transfer(place)])]
        while (following := self.waits_for(order[-1])) not in order:
            order.append(following)
        cycle = order[order.index(following) :]
        # Begin where a rank comes first that waits for another one.
        crossings = [
            (a, b) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True) if a[0] != b[0]
        ]
        waits = describe(self.schedule, [self.edge(waiter, until) for waiter, until in crossings])
        rank = crossings[0][0][0]
        place = self.source(crossings[0][0])
        spans = self.schedule.spans
        text = self.schedule.source.text
        if text.startswith(("send", "recv"), spans[place].start if spans else 0):
            help = (
                "issue transfers that cross as one batch, `exchange { … }`, or in one order on "
                "both ranks"
            )
        else:
            help = (
                "these ops cannot run in this order, whatever the communication: change the "
                "order of one rank"
            )
        message = (
            f"{ranks_text(sorted({waiter[0] for waiter, _ in crossings}))} wait for each other"
        )
        return Finding("deadlock", message, rank, place, help=help, waits=waits)

    def edge(self, waiter: Place, until: Place) -> Edge:
        """A wait for another rank, and why that has not come there: it stands elsewhere, or one of
        its streams does.
        """
        if not self.is_transfer(waiter):
            reason = "sum"
        elif self.network.progress(waiter) == Progress.MET:
            reason = "batch"
        else:
            reason = "stream" if self.network.progress(until) == Progress.POSTED else "partner"
        return Edge(waiter, reason, until, self.is_alone(waiter))

    def is_alone(self, place: Place) -> bool:
        """Whether a transfer does not hold its rank, only what comes behind it in its lane."""
        held = self.held_at[place[0]]
        if held is not None and not self.is_transfer((place[0], held)):
            return place[1] != held
        return held is None or place[1] not in self.network.batch((place[0], held))

    def waits_for(self, place: Place) -> Place:
        """What an action waits for: its other side, or one before it on its own rank, or one that
        goes with it.
        """
        rank = place[0]
        progress = self.network.progress(place)
        if progress == Progress.AHEAD:
            held = self.held_at[rank]
            assert held is not None
            if place[1] == held:
                return self.lacking(place)
            is_step = not self.is_transfer((rank, held))
            return (rank, held) if is_step else self.unmet(rank, self.network.batch((rank, held)))
        if progress == Progress.POSTED:
            return self.unmet(rank, self.network.head(place))
        if progress == Progress.STARTED:
            release = self.release(place)
            assert release is not None
            return release
        lagging = self.network.lagging(place)
        assert lagging is not None
        return self.unmet(*lagging)

    def is_transfer(self, place: Place) -> bool:
        """Whether an action is a transfer."""
        return is_transfer(self.schedule.ranks[place[0]].kind[place[1]])

    def lacking(self, step: Place) -> Place:
        """The op that will make a gradient for which an optimizer step waits, the first that its
        rank has to do.
        """
        wanted = {
            need[1:]
            for need in needs(self.schedule, *self.schedule.ranks[step[0]].row(step[1])[:3])
        }
        return next(
            (rank, index)
            for rank, actions in enumerate(self.schedule.ranks)
            for index in range(self.held_at[rank] or 0, len(actions))
            if rank != step[0] and self.held_at[rank] is not None
            if Kind.W in MAKES.get(actions.kind[index], ()) and actions.row(index)[1:3] in wanted
        )

    def unmet(self, rank: int, batch: range) -> Place:
        """A transfer of a batch that keeps it from completing: one that is not met, if there is
        one.
        """
        waiting = [index for index in batch if self.network.progress((rank, index)) < Progress.MET]
        return rank, (waiting or batch)[0]
