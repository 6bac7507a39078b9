"""Every interleaving of a small plan on a transport: the verdict that `schedlang.proof.prove`
reaches by one execution.

Written from the rules in docs/transports.md, apart from the verifier, and without its idea that one
execution will do: messages meet as they stand in each state, all states are explored, and a plan is
right if none of them is stuck and no receive gets another message than its own.

A state is a set of bits: the transfers that are met, and the places passed where ranks wait. What a
rank does between two such places nothing can delay, and other ranks see only the transfers that it
leaves; so it is no step of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from functools import cache, reduce
from itertools import chain
from operator import or_

from attrs import define, evolve, field, frozen

from schedlang import Kind, Schedule
from tests.support.graph import far_edges, is_near, pieces
from tests.support.own_collectives import (
    EVENTS,
    EXCHANGES,
    are_in_place,
    awaited,
    sides,
)
from tests.support.own_needs import HOPS
from tests.support.own_order import is_in_order

SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
#: A portable plan is right where ranks block and batches are atomic, and on the communicators of
#: NCCL, once made.
PORTABLE = ("atomic", "nccl-warm")
_NONE: frozenset[int] = frozenset()


class Mixed(Exception):
    """A receive gets another message than its own."""


def is_right(schedule: Schedule, transport: str) -> bool:
    """Whether every execution of a plan reaches its end, with every op and message in its place."""
    return right_on(schedule, [transport])[transport]


def right_on(schedule: Schedule, transports: Iterable[str]) -> dict[str, bool]:
    """Whether a plan is right, for each of some transports."""
    if not (are_in_place(schedule) and is_in_order(schedule)):
        return dict.fromkeys(transports, False)
    ends = cache(lambda transport: all_end(schedule, transport))
    found = {}
    for transport in transports:
        if transport == "portable":
            found[transport] = all(map(ends, PORTABLE))
        elif transport == "nccl":
            found[transport] = all_meet_at_first_uses(schedule) and ends("nccl-warm")
        else:
            found[transport] = ends(transport)
    return found


def all_end(schedule: Schedule, transport: str) -> bool:
    """Whether every execution of a list of actions for each rank reaches its end, whatever these
    come to.
    """
    return _Explorer(schedule, transport).all_end()


@frozen
class _Transfer:
    """A send or a receive: what it carries, as the kind, stage and microbatch of its send; when it
    may start.
    """

    bit: int
    message: tuple[int, int, int]
    after: int


@frozen
class _Wait:
    """A place where a rank waits: for what, as bits; the ranks that it exchanges messages with
    there.
    """

    bit: int
    after: int
    rank: int
    peers: frozenset[int] = _NONE


@define
class _Event:
    """A gather, a sum or a hop of several ranks: how many, and when each has begun its side."""

    bit: int
    count: int
    sides: list[int] = field(factory=list)


@define
class _Channel:
    """The sends and the receives between two ranks, in the order of each."""

    sends: list[_Transfer] = field(factory=list)
    receives: list[_Transfer] = field(factory=list)


class _Explorer:
    """The steps of a plan on a transport."""

    def __init__(self, schedule: Schedule, transport: str) -> None:
        self.schedule = schedule
        layout = schedule.layout
        self.skips = far_edges(layout)
        name, _, capacity = transport.partition(":")
        # A `-warm` transport is one whose communicators are there already, so that only messages
        # count.
        self.name = name.removesuffix("-warm")
        self.capacity = float(capacity or "inf") if name == "buffered" else 0.0
        self.channels: dict[Hashable, _Channel] = defaultdict(_Channel)
        self.waits: list[_Wait] = []
        #: For each stage and microbatch, its rank and the place passed when its gradient is made;
        #: for each update that waits for gradients of other ranks, its wait and what it waits for.
        self.made: dict[tuple[int, int], tuple[int, int]] = {}
        self.sums: list[tuple[int, set[tuple[int, int]]]] = []
        #: Gathers, sums and hops that are written, by the kind and stage of their first side, and
        #: their number: those of several ranks. Of each stage when those are over that are under
        #: way, and of each rank its last.
        self.events: dict[tuple[int, int, int], _Event] = {}
        self.numbers: Counter[tuple[int, int]] = Counter()
        self.over: dict[tuple[int, ...], int] = defaultdict(int)
        self.last = [0] * len(schedule.ranks)
        self.bits = 0
        for rank in range(len(schedule.ranks)):
            if self.name in ("blocking", "atomic", "buffered"):
                self.read_blocking(rank)
            else:
                self.read_posting(rank)
        # By now the gradients of all ranks have a place where they are made: an update waits until
        # the ranks that it waits for have passed these.
        for index, wanted in self.sums:
            wait = self.waits[index]
            made = [self.made[op] for op in wanted if self.made[op][0] != wait.rank]
            self.waits[index] = evolve(
                wait, after=reduce(or_, (passed for _, passed in made), wait.after)
            )
        # One that a replica never comes to waits for what never happens.
        for event in self.events.values():
            if len(event.sides) < event.count:
                event.sides.append(self.new_bit())
        self.end = (1 << self.bits) - 1

    def new_bit(self) -> int:
        self.bits += 1
        return 1 << (self.bits - 1)

    def read_blocking(self, rank: int) -> None:
        """A rank that waits at each batch of transfers until it is complete."""
        passed = 0
        for batch in self.schedule.ranks[rank].batches():
            if not is_of_transfers(self.schedule, rank, batch):
                passed = self.compute(rank, batch, passed)
                continue
            met = sum(self.add(rank, index, len(batch), passed) for index in batch)
            peers = frozenset(self.peer(rank, index) for index in batch)
            self.waits.append(_Wait(self.new_bit(), passed | met, rank, peers))
            passed = self.waits[-1].bit

    def read_posting(self, rank: int) -> None:
        """A rank that goes on, up to an op that needs what a receive brings: it waits for the
        receive's whole batch.
        """
        actions = self.schedule.ranks[rank]
        passed = 0
        brought: dict[tuple[int, int, int], int] = {}
        lanes: dict[Hashable, int] = defaultdict(int)
        for batch in actions.batches():
            if not is_of_transfers(self.schedule, rank, batch):
                # Bits of receives, each batch once: a sum of different bits is their union.
                needs = sum(
                    {
                        brought.get(need, 0)
                        for index in batch
                        for need in self.needs(*actions.row(index)[:3])
                    }
                )
                if needs & ~passed:
                    self.waits.append(_Wait(self.new_bit(), passed | needs, rank))
                    passed |= self.waits[-1].bit
                passed = self.compute(rank, batch, passed)
                continue
            # On these a batch is no more than its transfers, each by itself.
            is_one = self.name not in ("gloo", "nccl-edge")
            for part in (
                [batch] if is_one else [range(index, index + 1) for index in batch]
            ):
                lane = self.lane(rank, part)
                met = sum(
                    self.add(rank, index, len(part), passed | lanes[lane])
                    for index in part
                )
                lanes[lane] |= met
                brought |= {
                    self.message(*actions.row(i)[:3]): met
                    for i in part
                    if actions.kind[i] in RECEIVES
                }

    def compute(self, rank: int, batch: range, passed: int) -> int:
        """The place passed after ops: an op waits for its weights, an update for its sums, and for
        the gradients of all replicas, a hop for what it passes on.
        """
        layout = self.schedule.layout
        for kind, stage, unit in (
            self.schedule.ranks[rank].row(index)[:3] for index in batch
        ):
            needs = reduce(
                or_,
                (self.over[self.key(each, stage, unit)] for each in awaited(kind)),
                0,
            )
            if needs & ~passed:
                self.waits.append(_Wait(self.new_bit(), passed | needs, rank))
                passed |= self.waits[-1].bit
            if kind in (*EVENTS, *HOPS):
                self.begin(rank, kind, stage, unit, passed)
            if kind in (Kind.B, Kind.W):
                self.made[stage, unit] = rank, passed
            if kind == Kind.U and len(layout.pipelines) > 1:
                sizes = {
                    each: layout.units(each) // layout.updates
                    for each in pieces(layout, stage)
                }
                first = max(unit, 0)
                wanted = {
                    (each, first * size + number)
                    for each, size in sizes.items()
                    for number in range(size)
                }
                self.sums.append((len(self.waits), wanted))
                self.waits.append(_Wait(self.new_bit(), passed, rank))
                passed |= self.waits[-1].bit
        return passed

    def key(self, kind: int, stage: int, unit: int) -> tuple[int, ...]:
        """What an action waits for: of exchanges that of its microbatch."""
        return (kind, stage, unit) if kind in EXCHANGES else (kind, stage)

    def begin(self, rank: int, kind: int, stage: int, unit: int, passed: int) -> None:
        """A rank comes to a gather, a sum, a hop or an exchange, and begins it once its last one is
        begun by all.
        """
        begun = passed | self.last[rank]
        both = sides(self.schedule, kind, stage)
        if len(both) > 1:
            number = unit if kind in EXCHANGES else self.numbers[kind, stage]
            key = *both[0], number
            if key not in self.events:
                self.events[key] = _Event(self.new_bit(), len(both))
            self.events[key].sides.append(begun)
            begun = self.events[key].bit
        # By itself a rank is done with it as soon as it has begun it.
        self.last[rank] = begun
        self.numbers[kind, stage] += 1
        own = self.key(kind, stage, unit)
        earlier = 0 if kind == Kind.UNSHARD else self.over[own]
        self.over[own] = earlier | begun

    def lane(self, rank: int, batch: range) -> Hashable:
        """Batches of one lane go one after the other."""
        if self.name == "gloo":
            return batch.start
        if self.name == "nccl-edge":
            return self.schedule.ranks[rank].kind[batch.start] in SENDS, self.peer(
                rank, batch.start
            )
        return (
            ("alone", self.peer(rank, batch.start))
            if self.name == "nccl" and len(batch) == 1
            else "all"
        )

    def peer(self, rank: int, index: int) -> int:
        actions = self.schedule.ranks[rank]
        placement = self.schedule.placement
        forwards = actions.kind[index] in (Kind.SEND_F, Kind.RECV_B)
        number = actions.stage[index]
        if number >= len(placement):
            return placement[self.skips[number - len(placement)][1 if forwards else 0]]
        return placement[number + (1 if forwards else -1)]

    def needs(
        self, kind: int, stage: int, microbatch: int
    ) -> list[tuple[int, int, int]]:
        """The messages that an op may need: those that it needs are brought by receives before it."""
        if kind not in (Kind.F, Kind.B, Kind.I):
            return []
        forwards = kind == Kind.F
        stages = len(self.schedule.placement)
        neighbour = stage - 1 if forwards else stage + 1
        numbers = (
            [neighbour] if is_near(self.schedule.layout, min(stage, neighbour)) else []
        )
        numbers += [
            stages + i for i, skip in enumerate(self.skips) if skip[forwards] == stage
        ]
        return [
            (Kind.SEND_F if forwards else Kind.SEND_B, each, microbatch)
            for each in numbers
        ]

    def message(self, kind: int, stage: int, microbatch: int) -> tuple[int, int, int]:
        """What a transfer carries, as its send has it."""
        if kind in SENDS:
            return kind, stage, microbatch
        step = (
            0
            if stage >= len(self.schedule.placement)
            else -1
            if kind == Kind.RECV_F
            else 1
        )
        return (
            Kind.SEND_F if kind == Kind.RECV_F else Kind.SEND_B,
            stage + step,
            microbatch,
        )

    def add(self, rank: int, index: int, size: int, after: int) -> int:
        """Put a transfer on its channel; its bit."""
        kind, stage, microbatch, *_ = self.schedule.ranks[rank].row(index)
        message = self.message(kind, stage, microbatch)
        peer = self.peer(rank, index)
        key: list[Hashable] = [(rank, peer) if kind in SENDS else (peer, rank)]
        # Batches and single transfers have communicators of their own.
        if self.name == "nccl":
            key.append(size > 1)
        # Tags: each message is a channel of its own.
        if self.name == "gloo":
            key.append(message)
        transfer = _Transfer(self.new_bit(), message, after)
        channel = self.channels[tuple(key)]
        (channel.sends if kind in SENDS else channel.receives).append(transfer)
        return transfer.bit

    def all_end(self) -> bool:
        """Whether all states reach the end."""
        # Depth first over all states, each visited once. A state from which nothing follows must be
        # the end.
        seen = {0}
        open_states = [0]
        try:
            while open_states:
                state = open_states.pop()
                following = set(self.steps(state))
                if not following and state != self.end:
                    return False
                open_states += following - seen
                seen |= following
        except Mixed:
            return False
        return True

    def steps(self, state: int) -> Iterator[int]:
        """The states that can come next."""
        if self.name == "atomic":
            yield from self.joint_completions(state)
        else:
            for wait in self.waits:
                if not state & wait.bit and wait.after & state == wait.after:
                    yield state | wait.bit
        for event in self.events.values():
            if not state & event.bit and all(
                side & state == side for side in event.sides
            ):
                yield state | event.bit
        for channel in self.channels.values():
            send = first_open(channel.sends, state)
            receive = first_open(channel.receives, state)
            if self.capacity:
                yield from self.buffered(state, channel, send, receive)
            elif send and receive:
                if send.message != receive.message:
                    raise Mixed
                yield state | send.bit | receive.bit

    def buffered(
        self,
        state: int,
        channel: _Channel,
        send: _Transfer | None,
        receive: _Transfer | None,
    ) -> Iterator[int]:
        """A message goes to where it waits, if there is room, or is taken from there, in the order
        of sends.
        """
        # What was sent and not yet taken waits in the buffer, in the order of the sends:
        #
        #    sends      a b c d      a, b, c are sent
        #    receives   a            one is taken: b and c wait
        taken = sum(bool(state & each.bit) for each in channel.receives)
        waiting = [each for each in channel.sends if state & each.bit][taken:]
        if send and len(waiting) < self.capacity:
            yield state | send.bit
        if receive and waiting:
            if waiting[0].message != receive.message:
                raise Mixed
            yield state | receive.bit

    def joint_completions(self, state: int) -> Iterator[int]:
        """Batches that exchange messages, directly or through others, complete together, when all
        of them are met.
        """
        # For each rank the first wait that it has not passed: there it stands.
        standing: dict[int, _Wait] = {}
        for wait in self.waits:
            if not state & wait.bit:
                standing.setdefault(wait.rank, wait)
        for first in standing:
            group = {first}
            more = {first}
            while more:
                more = (
                    set(
                        chain.from_iterable(
                            standing[rank].peers for rank in more if rank in standing
                        )
                    )
                    - group
                )
                group |= more
            if all(
                rank in standing and standing[rank].after & ~state == 0
                for rank in group
            ):
                yield state | sum(standing[rank].bit for rank in group)


def transfers(schedule: Schedule, rank: int) -> Iterator[range]:
    """The batches of transfers of a rank."""
    return (
        batch
        for batch in schedule.ranks[rank].batches()
        if is_of_transfers(schedule, rank, batch)
    )


def is_of_transfers(schedule: Schedule, rank: int, batch: range) -> bool:
    return schedule.ranks[rank].kind[batch.start] in (*SENDS, *RECEIVES)


def first_open(order: list[_Transfer], state: int) -> _Transfer | None:
    """The first transfer of a channel that has started and is not met."""
    return next(
        (
            each
            for each in order
            if not state & each.bit and each.after & state == each.after
        ),
        None,
    )


def all_meet_at_first_uses(schedule: Schedule) -> bool:
    """Whether the hosts of `nccl`, which run ahead of the ops, all come to their ends when
    communicators are made.
    """
    explorer = _Explorer(schedule, "nccl")
    uses: list[list[frozenset[int]]] = []
    for rank in range(len(schedule.ranks)):
        # The communicator of batches has all ranks. With -1, which is no rank, it differs from that
        # of a pair where there are only two.
        everyone = frozenset(range(-1, len(schedule.ranks)))
        # The communicators that a rank uses, in the order of their first uses: only those are made.
        keys = [
            everyone
            if len(each) > 1
            else frozenset((rank, explorer.peer(rank, each.start)))
            for each in transfers(schedule, rank)
        ]
        uses.append(list(dict.fromkeys(keys)))
    start = tuple(0 for _ in uses)
    end = tuple(map(len, uses))
    seen = {start}
    open_states = [start]
    while open_states:
        state = open_states.pop()
        standing = [
            order[at] if at < len(order) else None
            for order, at in zip(uses, state, strict=True)
        ]
        following = set()
        for key in {each for each in standing if each}:
            members = [rank for rank in key if rank >= 0]
            if all(standing[rank] == key for rank in members):
                following.add(
                    tuple(at + (rank in members) for rank, at in enumerate(state))
                )
        if not following and state != end:
            return False
        open_states += following - seen
        seen |= following
    return True
