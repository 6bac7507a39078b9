"""Why an execution stops: transfers that are never matched, or ranks that wait for each other."""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import numpy as np
from attrs import define

from schedlang.diagnostics.waiting_ranks import Wait
from schedlang.proof.collectives import sides_of
from schedlang.proof.events import Events
from schedlang.proof.graph import NOTHING
from schedlang.proof.waits import Edge, describe
from schedlang.schedule.arrays import Ints
from schedlang.schedule.findings import Finding, ranks_text
from schedlang.schedule.kinds import MEETS, WAITS, Kind, op_of
from schedlang.schedule.needs import all_needs_of
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport


class Progress(IntEnum):
    """The state of a transfer: its rank has not reached it; issued; first in its lane; the other
    side has started too; complete.
    """

    # What brings it from one to the next, and so what it may wait for:
    #
    #          its rank       the transfers        the other        all of its
    #          comes to it    before it on its     side has         batch, or of
    #                         lane are over        STARTED, too     several, is MET
    #     AHEAD ───────▶ POSTED ─────────▶ STARTED ───────▶ MET ─────────▶ COMPLETE
    AHEAD = 0
    POSTED = 1
    STARTED = 2
    MET = 3
    COMPLETE = 4


@define(eq=False)
class Standstill:
    """The state in which an execution on a transport has stopped. Actions are rows of the
    schedule's columns.
    """

    schedule: Schedule
    events: Events
    transport: Transport

    def explain(self, other_findings: bool) -> list[Finding]:
        """The findings that say why ranks do not go on.

        A transfer that is never matched explains everything that waits behind it, and other
        findings may do so as well. A deadlock is reported only if nothing else explains why the
        ranks wait.
        """
        never = [row for row in self.waiting if self.release(row) is None]
        # One for each place of the program is shown.
        first = list({self.source(row): row for row in reversed(never)}.values())
        edges = [
            Edge(self.place(row), "never matched", alone=self.is_alone(row))
            for row in first
        ]
        waits = dict(zip(first, describe(self.schedule, edges), strict=True))
        findings = [self.never_met(row, waits.get(row)) for row in never]
        return findings if findings or other_findings else [self.deadlock()]

    def reached(self, wrong: Iterable[tuple[int, Finding]]) -> list[Finding]:
        """The findings about transfers that ranks reach, and about ops that run."""
        return [finding for row, finding in wrong if self.is_reached(row)]

    def is_reached(self, row: int) -> bool:
        """Whether a rank reaches a transfer, a copy or a collective; or whether an op runs."""
        columns = self.schedule.columns
        if columns.is_transfer[row] or columns.is_beside[row]:
            return self.has_come(row)
        return self.is_over(row)

    def met(self, wrong: Iterable[tuple[int, Finding]]) -> list[Finding]:
        """The findings about messages that meet their receives; each is given with the send."""
        return [
            finding
            for row, finding in wrong
            if self.has_started(row) and self.is_met(row)
        ]

    @cached_property
    def waiting(self) -> list[int]:
        """The transfers that have started while their other side has not, including sends that need
        not wait for it.
        """
        channels = self.events.channels
        assert channels is not None
        rows = np.flatnonzero(channels.has_peer)
        return [
            row
            for row in rows.tolist()
            if self.has_started(row)
            and not (
                channels.partner[row] >= 0
                and self.has_started(int(channels.partner[row]))
            )
        ]

    @cached_property
    def _come(self) -> Ints:
        """For each transfer the event at which its rank reaches it."""
        return self.events.come(np.arange(len(self.schedule.columns)))

    def has_come(self, row: int) -> bool:
        """Whether the rank has reached a transfer and issued it."""
        return self.events.graph.happened(int(self._come[row]))

    def has_started(self, row: int) -> bool:
        """Whether a transfer is issued and is the first in its lane."""
        item = int(self.events.item[row])
        if item == NOTHING:
            return self.has_come(row)
        return self.events.graph.happened(int(self.events.graph.begin[item]))

    def is_over(self, row: int) -> bool:
        """Whether an action is complete; a transfer is complete with its batch."""
        item = int(self.events.item[row])
        if item == NOTHING:
            return self.has_come(row) and self.is_met(row)
        return self.events.graph.happened(int(self.events.graph.over[item]))

    def progress(self, row: int) -> Progress:
        """The state of a transfer."""
        if self.is_over(row):
            return Progress.COMPLETE
        if not self.has_come(row):
            return Progress.AHEAD
        if not self.has_started(row):
            return Progress.POSTED
        return Progress.MET if self.is_met(row) else Progress.STARTED

    def is_met(self, row: int) -> bool:
        """Whether a transfer that has started waits for nothing but the rest of its batch."""
        channels = self.events.channels
        assert channels is not None
        partner = int(channels.partner[row])
        return not channels.has_peer[row] or (
            partner >= 0 and self.has_started(partner)
        )

    @cached_property
    def stands_at(self) -> list[int | None]:
        """For each rank the action at which it stopped: the first one of a batch, an op, or a wait
        for hops. None for a rank that came to its end.
        """
        on_ranks = self.events.on_ranks
        stuck = on_ranks.heads[np.isinf(self.events.graph.ends[on_ranks.items])]
        first = np.searchsorted(stuck, self.schedule.columns.first).tolist()
        return [
            int(stuck[begin]) if begin < end else None for begin, end in pairwise(first)
        ]

    @cached_property
    def held_at(self) -> list[int | None]:
        """For each rank the action that it waits for: a transfer, a wait for one, a collective, an
        optimizer step, or a gradient that the step needs.
        """
        return [None if row is None else self._held_at(row) for row in self.stands_at]

    def _held_at(self, head: int) -> int:
        graph = self.events.graph
        if self.is_transfer(head):
            return head
        # The first event of its item that never happens: an edge to what it lacks.
        item = int(self.events.on_ranks.at(np.array([head]))[0])
        events = range(self._thread(item), int(graph.over[item]) + 1)
        event = next(event for event in events if not graph.happened(event))
        return int(self.events.about[graph.edge[event]])

    def _thread(self, item: int) -> int:
        """The first event of the thread of an item."""
        graph = self.events.graph
        thread = np.searchsorted(graph.first, graph.over[item], "right") - 1
        return int(graph.first[thread])

    def release(self, row: int) -> int | None:
        """The action that would match a waiting transfer."""
        columns = self.schedule.columns
        peer, kind, number, microbatch = self.other_end(row)
        rows = np.arange(columns.first[peer], columns.first[peer + 1])
        meets = (
            (columns.kind[rows] == kind)
            & (columns.stage[rows] == number)
            & (columns.microbatch[rows] == microbatch)
        )
        return next(
            (other for other in rows[meets].tolist() if not self.has_started(other)),
            None,
        )

    def other_end(self, row: int) -> tuple[int, Kind, int, int]:
        """The other side of a transfer: its rank, kind, number and microbatch."""
        columns = self.schedule.columns
        kind = int(columns.kind[row])
        number = int(columns.stage[row])
        peer = self.schedule.peer(kind, number)
        assert peer is not None
        return (
            peer,
            *self.schedule.layout.counterpart(kind, number),
            int(columns.microbatch[row]),
        )

    def place(self, row: int) -> tuple[int, int]:
        """The rank of an action, and its index there."""
        return self.schedule.columns.place(row)

    def rank(self, row: int) -> int:
        """The rank of an action."""
        return int(self.schedule.columns.rank[row])

    def source(self, row: int) -> int:
        """The place of an action in the program."""
        return int(self.schedule.columns.source[row])

    def batch(self, row: int) -> list[int]:
        """The actions that are issued together with an action; a transfer alone, where transfers of
        a batch complete by themselves.
        """
        if self.transport.splits_batches and self.is_transfer(row):
            return [row]
        columns = self.schedule.columns
        head = int(columns.batch[row])
        return list(range(head, head + int(columns.sizes[head])))

    def never_met(self, row: int, wait: Wait | None) -> Finding:
        """The finding for a transfer that is never matched."""
        rank, index = self.place(row)
        peer, *wanted = self.other_end(row)
        text = self.schedule.name_of(rank, index)
        other = self.schedule.names.action(*wanted)
        is_send = bool(self.schedule.columns.is_send[row])
        done = "received" if is_send else "sent"
        message = f"`{text}` on rank {rank} is never {done}: rank {peer} has no `{other}` left"
        help = None
        if self.stands_there(row):
            message = f"`{text}` on rank {rank} and `{other}` on rank {peer} never meet"
            help = (
                "one is issued in a batch and one alone, which take different ways: "
                "issue both alike"
            )
        return Finding(
            "unmatched-send" if is_send else "unmatched-receive",
            message,
            rank,
            self.source(row),
            help=help,
            waits=(wait,) if wait else (),
            numbers=(int(self.schedule.columns.stage[row]),),
        )

    def stands_there(self, row: int) -> bool:
        """Whether the other side of a transfer waits as well, on another channel."""
        peer, *wanted = self.other_end(row)
        columns = self.schedule.columns
        return any(
            [columns.kind[other], columns.stage[other], columns.microbatch[other]]
            == wanted
            for other in self.waiting
            if columns.rank[other] == peer
        )

    def deadlock(self) -> Finding:
        """The finding for ranks that wait for each other: start at a rank that waits, and follow
        the waits until one repeats.
        """
        # Two ranks that both send first, where sends wait:
        #
        #     rank 0   SEND_F1 ──waits for──▶ RECV_F1   rank 1
        #                 ▲                      │
        #               behind                 behind
        #                 │                      ▼
        #     rank 0   RECV_B0 ◀──waits for── SEND_B0   rank 1
        #
        # Only the waits for another rank are told; who reads them sees the rest in the program.
        started = [
            row for row in self.waiting if self.progress(row) == Progress.STARTED
        ]
        steps = [
            row for row in self.held_at if row is not None and not self.is_transfer(row)
        ]
        order = [min(started or steps)]
        while (following := self.waits_for(order[-1])) not in order:
            order.append(following)
        cycle = order[order.index(following) :]
        # Begin where a rank comes first that waits for another one.
        crossings = [
            (a, b)
            for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
            if self.rank(a) != self.rank(b)
        ]
        waits = describe(
            self.schedule, [self.edge(waiter, until) for waiter, until in crossings]
        )
        first = crossings[0][0]
        is_of_hops = any(self.meets_replicas(waiter) for waiter, _ in crossings)
        if self.is_written(first) and is_of_hops:
            help = "change the order of one rank: let it first do what the other one waits for"
        elif self.is_written(first):
            help = (
                "issue transfers that cross as one batch, `overlap { … }`, "
                "or in one order on both ranks"
            )
        else:
            help = (
                "these ops cannot run in this order, whatever the communication: "
                "change the order of one rank"
            )
        ranks = ranks_text(sorted({self.rank(waiter) for waiter, _ in crossings}))
        message = f"{ranks} wait for each other"
        return Finding(
            "deadlock",
            message,
            self.rank(first),
            help=help,
            waits=waits,
        )

    def is_written(self, row: int) -> bool:
        """Whether an action is a transfer that the program writes. A transfer that the compiler
        placed has the place of its op.
        """
        spans = self.schedule.spans
        if not spans or not self.is_transfer(row):
            return False
        start = spans[self.source(row)].start
        return self.schedule.source.text.startswith(("send", "recv"), start)

    def edge(self, waiter: int, until: int) -> Edge:
        """A wait for another rank, with the reason why that rank has not come: it waits elsewhere,
        or one of its streams does.
        """
        columns = self.schedule.columns
        at = waiter
        if columns.is_update[waiter]:
            reason = "sum"
        elif self.meets_replicas(waiter):
            reason = "collective"
            # Told is the place where the rank waits, if it does so at a hop.
            stand = self.stands_at[self.rank(waiter)]
            if stand is not None and columns.is_collective[stand]:
                at = stand
        elif self.is_transfer(waiter) and self.progress(waiter) == Progress.MET:
            reason = "batch"
        else:
            is_posted = self.progress(until) == Progress.POSTED
            reason = "stream" if is_posted else "partner"
        return Edge(self.place(at), reason, self.place(until), self.is_alone(waiter))

    def is_alone(self, row: int) -> bool:
        """Whether the rank of a transfer goes on while the transfer waits, and only transfers
        behind it in its lane are held.
        """
        if self.meets_replicas(row):
            return False
        held = self.held_at[self.rank(row)]
        if held is not None and not self.is_transfer(held):
            return row != held
        return held is None or row not in self.batch(held)

    def waits_for(self, row: int) -> int:
        """The action that an action waits for: its other side, an earlier one on its own rank, or
        another one of its batch.
        """
        if self.meets_replicas(row):
            return self.beside(row)
        progress = Progress.AHEAD if not self.is_transfer(row) else self.progress(row)
        if progress == Progress.AHEAD:
            held = self.held_at[self.rank(row)]
            assert held is not None
            if row == held:
                send = self.awaited(row)
                return self.lacking(row) if send is None else self.waits_for(send)
            return held
        if progress == Progress.POSTED:
            return self.unmet(self.batch(self.head(row)))
        if progress == Progress.STARTED:
            release = self.release(row)
            assert release is not None
            return release
        return self.unmet(self.lagging(row))

    def beside(self, row: int) -> int:
        """The action that a collective waits for: an action of its rank before it, its other side,
        or an earlier collective.
        """
        if not self.has_come(row):
            held = self.held_at[self.rank(row)]
            assert held is not None
            return held
        of_plan = sides_of(self.schedule)
        event = of_plan.event[of_plan.row == row]
        sides = of_plan.row[of_plan.event == event].tolist()
        for side in sides:
            if not self.has_come(side):
                return int(side)
        # All have come, so on one of the ranks another event goes first.
        ranks = [self.rank(side) for side in sides]
        return next(
            int(before)
            for before in of_plan.row.tolist()
            if self.rank(before) in ranks
            and before < sides[ranks.index(self.rank(before))]
            and not self.is_over(before)
        )

    def head(self, row: int) -> int:
        """The first transfer of the batch that comes first in the lane of an issued one."""
        graph = self.events.graph
        columns = self.schedule.columns
        thread = self._thread(int(self.events.item[row]))
        own = np.arange(
            columns.first[self.rank(row)], columns.first[self.rank(row) + 1]
        )
        transfers: Ints = own[columns.is_transfer[own]]
        return next(
            int(first)
            for first in transfers
            if self._thread(int(self.events.item[first])) == thread
            and not graph.happened(int(graph.over[self.events.item[first]]))
        )

    def lagging(self, row: int) -> list[int]:
        """The first batch that is not matched, of those that complete together with the batch of a
        transfer.
        """
        batches = self.connected(row)
        return next(
            batch
            for batch in batches
            if not all(self.is_met(transfer) for transfer in batch)
        )

    def connected(self, row: int) -> Iterator[list[int]]:
        """The batches that a batch exchanges messages with, directly or through others, itself
        first.
        """
        channels = self.events.channels
        assert channels is not None
        columns = self.schedule.columns
        heads = [int(columns.batch[row])]
        for head in heads:
            batch = self.batch(head)
            yield batch
            others = columns.batch[channels.partner[batch]].tolist()
            heads += [each for each in dict.fromkeys(others) if each not in heads]

    def meets_replicas(self, row: int) -> bool:
        """Whether an action is a collective, or an exchange."""
        kind = int(self.schedule.columns.kind[row])
        return kind in MEETS or op_of(kind).is_collective

    def is_transfer(self, row: int) -> bool:
        """Whether an action is a transfer."""
        return bool(self.schedule.columns.is_transfer[row])

    def awaited(self, row: int) -> int | None:
        """The send that an action waits for, if the action is a wait for a send."""
        columns = self.schedule.columns
        for send, wait in WAITS.items():
            if columns.kind[row] == wait:
                sends = columns.where(send)
                is_same = (columns.stage[sends] == columns.stage[row]) & (
                    columns.microbatch[sends] == columns.microbatch[row]
                )
                return int(sends[is_same][0])
        return None

    def lacking(self, step: int) -> int:
        """The op that makes the first gradient, in the order of its rank, that an optimizer step
        still lacks.
        """
        needs = all_needs_of(self.schedule)
        makers = np.sort(needs.maker[(needs.user == step) & needs.is_sum])
        return next(int(row) for row in makers if not self.is_over(int(row)))

    def unmet(self, batch: list[int]) -> int:
        """A transfer of a batch that is not matched."""
        return next(row for row in batch if self.progress(row) < Progress.MET)
