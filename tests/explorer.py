"""Every interleaving of a small plan on a transport: the verdict that `schedlang.machine` reaches by one execution.

Written from the rules in docs/transports.md, apart from the machine: it knows nothing of canonical executions. States
are explored to the end; a plan is right if no state is stuck and no step goes wrong. For one pipeline of forwards,
backwards and their halves, without slices.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from schedlang import Kind, Schedule

COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
SENDS = (Kind.SEND_F, Kind.SEND_B)
#: A state: how far each rank's host and its ops are, and which transfers are met.
State = tuple[tuple[int, ...], tuple[int, ...], frozenset[tuple[int, int]]]


class Wrong(Exception):
    """A step that no plan may take."""


class Explorer:
    """The transitions of a plan on a transport, named as `schedc check` has it; or on the parts of `portable`.

    These are `atomic`, ranks that block with atomic batches, and `nccl-warm`, whose communicators are there.
    """

    def __init__(self, schedule: Schedule, transport: str) -> None:
        self.schedule, self.transport = schedule, transport.removesuffix("-warm")
        self.warm = transport.endswith("-warm")
        self.rows = [[actions.row(index)[:3] for index in range(len(actions))] for actions in schedule.ranks]
        self.batches = [list(actions.batches()) for actions in schedule.ranks]
        self.stages = len(schedule.placement)
        self.capacity = float(transport.partition(":")[2] or "inf") if transport.startswith("buffered") else 0

    def is_right(self) -> bool:
        """Whether every execution reaches the end, with every op and message in its place."""
        try:
            self.check_ops()
            ranks = range(len(self.rows))
            start: State = (tuple(0 for _ in ranks), tuple(0 for _ in ranks), frozenset())
            seen, waiting = {start}, [start]
            while waiting:
                state = waiting.pop()
                following = list(self.steps(state))
                if not following and not self.is_over(state):
                    return False
                for each in following:
                    if each not in seen:
                        seen.add(each)
                        waiting.append(each)
        except Wrong:
            return False
        return True

    def check_ops(self) -> None:
        """Every stage has its ops once per microbatch, on its rank; a send goes out once."""
        found = Counter(row for rank in self.rows for row in rank)
        if any(count > 1 for row, count in found.items()):
            raise Wrong
        for rank, rows in enumerate(self.rows):
            for kind, stage, microbatch in rows:
                placed = stage < self.stages and self.schedule.placement[stage] == rank
                if not placed or microbatch >= self.schedule.microbatches:
                    raise Wrong
                if kind not in COMPUTE and self.peer(kind, stage) is None:
                    raise Wrong
        for stage in range(self.stages):
            for microbatch in range(self.schedule.microbatches):
                done = [kind for kind in COMPUTE if (kind, stage, microbatch) in found]
                if done not in ([Kind.F, Kind.B], [Kind.F, Kind.I, Kind.W]):
                    raise Wrong

    def peer(self, kind: int, stage: int) -> int | None:
        other = stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
        if not 0 <= other < self.stages or self.schedule.placement[other] == self.schedule.placement[stage]:
            return None
        return self.schedule.placement[other]

    def message(self, rank: int, index: int) -> tuple[str, int, int]:
        """What a transfer carries: an activation or a gradient, of the stage that makes it."""
        kind, stage, microbatch = self.rows[rank][index]
        passed = "F" if kind in (Kind.SEND_F, Kind.RECV_F) else "B"
        made_by = stage if kind in SENDS else stage - 1 if passed == "F" else stage + 1
        return passed, made_by, microbatch

    def is_transfer(self, rank: int, at: int) -> bool:
        return self.rows[rank][self.batches[rank][at].start][0] not in COMPUTE

    def is_over(self, state: State) -> bool:
        hosts, _, met = state
        transfers = sum(kind not in COMPUTE for rows in self.rows for kind, *_ in rows)
        ends = [len(batches) for batches in self.batches]
        return list(hosts) == ends and list(state[1]) == ends and len(met) == transfers

    @cached_property
    def communicators(self) -> list[list[tuple[int, tuple[int, ...]]]]:
        """For `nccl`: per rank, where it first uses each communicator, whose ranks are given."""
        found = []
        for rank, batches in enumerate(self.batches):
            first: dict[tuple[int, ...], int] = {}
            for at, batch in enumerate(batches):
                if self.is_transfer(rank, at):
                    first.setdefault(self.communicator(rank, batch), at)
            found.append([(at, key) for key, at in first.items()])
        return found

    def communicator(self, rank: int, batch: range) -> tuple[int, ...]:
        """The ranks of a batch's communicator on `nccl`; that of batches has a -1 besides."""
        if len(batch) > 1:
            return (-1, *range(len(self.rows)))
        peer = self.peer(*self.rows[rank][batch.start][:2])
        assert peer is not None
        return tuple(sorted((rank, peer)))

    def steps(self, state: State) -> Iterator[State]:
        """The states that can come next."""
        for rank in range(len(self.rows)):
            yield from self.host_steps(state, rank)
            yield from self.op_steps(state, rank)
        yield from self.meetings(state)
        if self.transport == "atomic":
            yield from self.completions(state)

    def blocks(self) -> bool:
        return self.transport in ("blocking", "atomic") or self.capacity > 0

    def host_steps(self, state: State, rank: int) -> Iterator[State]:
        """A host issues its next batch, or op: on NCCL it runs ahead of the ops, elsewhere it is where they are."""
        hosts, ops, met = state
        at = hosts[rank]
        if at == len(self.batches[rank]):
            return
        if self.transport in ("nccl", "nccl-eager"):
            for first, key in self.communicators[rank] if self.transport == "nccl" and not self.warm else []:
                # A first use begins when all of its ranks stand there.
                if first == at and not all(
                    any(there <= hosts[other] for there, each in self.communicators[other] if each == key)
                    for other in key
                    if other >= 0
                ):
                    return
            yield replaced(hosts, rank, at + 1), ops, met
        elif ops[rank] == at:
            yield replaced(hosts, rank, at + 1), ops, met

    def op_steps(self, state: State, rank: int) -> Iterator[State]:
        """An op that has been issued runs, or a transfer that has been issued is passed or waited for."""
        hosts, ops, met = state
        at = ops[rank]
        if at == len(self.batches[rank]) or hosts[rank] <= at:
            return
        batch = self.batches[rank][at]
        if not self.is_transfer(rank, at):
            if all(self.is_there(state, rank, need) for index in batch for need in self.needs(*self.rows[rank][index])):
                yield hosts, replaced(ops, rank, at + 1), met
            return
        if self.transport == "atomic":
            return
        if not self.blocks() or all((rank, index) in met for index in batch):
            yield hosts, replaced(ops, rank, at + 1), met

    def needs(self, kind: int, stage: int, microbatch: int) -> list[tuple[str, int, int]]:
        """What an op reads: activations F and gradients B, by the stage that makes them."""
        if kind == Kind.F:
            return [("F", stage - 1, microbatch)] if stage else []
        own = [("B" if kind == Kind.W else "F", stage, microbatch)]
        return own if kind == Kind.W or stage == self.stages - 1 else [*own, ("B", stage + 1, microbatch)]

    def is_there(self, state: State, rank: int, need: tuple[str, int, int]) -> bool:
        """Whether an op has what it needs; Wrong if that will never come."""
        _, ops, met = state
        done = self.batches[rank][: ops[rank]]
        if self.schedule.placement[need[1]] == rank:
            makes = {"F": (Kind.F,), "B": (Kind.B, Kind.I)}[need[0]]
            if not any(self.rows[rank][i] in [(kind, *need[1:]) for kind in makes] for batch in done for i in batch):
                raise Wrong
            return True
        receives = [
            index
            for batch in done
            for index in batch
            if self.rows[rank][index][0] in (Kind.RECV_F, Kind.RECV_B) and self.message(rank, index) == need
        ]
        if not receives:
            raise Wrong
        return (rank, receives[0]) in met

    def issued(self, state: State, rank: int) -> list[range]:
        """The batches of a rank that are on their way: issued, all ops before them done, not all met, in their turn."""
        hosts, ops, met = state
        found: list[range] = []
        taken = set()
        for at in range(hosts[rank]):
            batch = self.batches[rank][at]
            if not self.is_transfer(rank, at):
                if at >= ops[rank]:
                    break
                continue
            lane: object = 0
            if self.transport == "gloo":
                lane = at
            elif self.transport == "nccl":
                lane = self.communicator(rank, batch)
            over = all((rank, index) in met for index in batch)
            if self.transport == "atomic":
                over = at < ops[rank]
            if not over and lane not in taken:
                found.append(batch)
                taken.add(lane)
        return found

    def meetings(self, state: State) -> Iterator[State]:
        """A send and a receive meet, or a message goes to or comes from where it may wait."""
        hosts, ops, met = state
        there = [
            (rank, index, batch)
            for rank in range(len(self.rows))
            for batch in self.issued(state, rank)
            for index in batch
        ]
        sends = [each for each in there if self.rows[each[0]][each[1]][0] in SENDS and each[:2] not in met]
        receives = [each for each in there if self.rows[each[0]][each[1]][0] not in SENDS and each[:2] not in met]
        for rank, index, _ in sends:
            if not self.is_made(state, rank, index):
                raise Wrong
        if self.capacity:
            yield from self.buffered(state, sends, receives)
            return
        for sender, index, batch in sends:
            for receiver, at, other in receives:
                if (
                    self.peer(*self.rows[sender][index][:2]) != receiver
                    or self.peer(*self.rows[receiver][at][:2]) != sender
                ):
                    continue
                if self.transport == "nccl" and (len(batch) > 1) != (len(other) > 1):
                    continue
                if self.transport == "gloo":
                    if self.message(sender, index) != self.message(receiver, at):
                        continue
                elif self.earlier(sends, sender, index, receiver) or self.earlier(receives, receiver, at, sender):
                    continue
                if self.message(sender, index) != self.message(receiver, at):
                    raise Wrong
                yield hosts, ops, met | {(sender, index), (receiver, at)}

    def is_made(self, state: State, rank: int, index: int) -> bool:
        """Whether what is sent has been made."""
        passed, stage, microbatch = self.message(rank, index)
        kinds = (Kind.F,) if passed == "F" else (Kind.B, Kind.I)
        before = [
            each for each in range(index) if self.rows[rank][each] in [(kind, stage, microbatch) for kind in kinds]
        ]
        return bool(before)

    def earlier(self, there: list[tuple[int, int, range]], rank: int, index: int, peer: int) -> bool:
        """Whether a transfer on the same channel comes first."""
        batch = next(batch for other, each, batch in there if (other, each) == (rank, index))
        return any(
            other == rank and each < index and self.peer(*self.rows[rank][each][:2]) == peer
            and (self.transport != "nccl" or (len(batch) > 1) == (len(its) > 1))
            for other, each, its in there
        )  # fmt: skip

    def buffered(
        self, state: State, sends: list[tuple[int, int, range]], receives: list[tuple[int, int, range]]
    ) -> Iterator[State]:
        """Messages wait, at most so many of a channel, until they are taken in their order."""
        hosts, ops, met = state
        for sender, index, _ in sends:
            receiver = self.peer(*self.rows[sender][index][:2])
            assert receiver is not None
            if self.earlier(sends, sender, index, receiver):
                continue
            put, taken = self.passed(met, sender, receiver)
            if len(put) - len(taken) < self.capacity:
                yield hosts, ops, met | {(sender, index)}
        for receiver, at, _ in receives:
            sender = self.peer(*self.rows[receiver][at][:2])  # type: ignore[assignment]
            put, taken = self.passed(met, sender, receiver)
            if self.earlier(receives, receiver, at, sender) or len(put) == len(taken):
                continue
            if self.message(sender, put[len(taken)]) != self.message(receiver, at):
                raise Wrong
            yield hosts, ops, met | {(receiver, at)}

    def passed(self, met: frozenset[tuple[int, int]], sender: int, receiver: int) -> tuple[list[int], list[int]]:
        """The sends and the receives of a channel that are done, in order."""
        put = [
            i
            for rank, i in sorted(met)
            if rank == sender and self.rows[rank][i][0] in SENDS and self.peer(*self.rows[rank][i][:2]) == receiver
        ]
        taken = [
            i
            for rank, i in sorted(met)
            if rank == receiver and self.rows[rank][i][0] not in SENDS and self.peer(*self.rows[rank][i][:2]) == sender
        ]
        return put, taken

    def completions(self, state: State) -> Iterator[State]:
        """Batches that exchange messages complete together, when all of them are met."""
        hosts, ops, met = state
        standing = {
            rank: self.batches[rank][ops[rank]]
            for rank in range(len(self.rows))
            if ops[rank] < hosts[rank] and self.is_transfer(rank, ops[rank])
        }
        for first in standing:
            group = {first}
            while True:
                met_there = all((rank, index) in met for rank in group for index in standing[rank])
                if not met_there:
                    break
                more = {self.peer(*self.rows[rank][index][:2]) for rank in group for index in standing[rank]} - group
                if not more:
                    changed = list(ops)
                    for rank in group:
                        changed[rank] += 1
                    yield hosts, tuple(changed), met
                    break
                group |= more  # type: ignore[arg-type]


def replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
