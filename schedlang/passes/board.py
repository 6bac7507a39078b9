"""The slots of a schedule's ops, and the moves that bring them forward."""

from itertools import chain

import numpy as np
from attrs import define, field

from schedlang.passes.op_graph import Graph, Orders
from schedlang.passes.slots import fill_slots
from schedlang.passes.track import Track
from schedlang.schedule.columns import Ints
from schedlang.schedule.kinds import Kind

#: Of a slot: that something is in it, or nothing.
_TAKEN = b"\1"
_FREE = b"\0"


@define
class Board:
    """The nodes of a graph at unit costs, each at the slot where it can start in given orders, in
    which they have their `ends`.

    Weight gradients can wait, so they are virtual: every slot in which a rank does nothing else
    runs the oldest one that it owes. If `steady`, nothing moves while a rank is in its steady
    phase, not the weight gradients either: after it has had all of its first microbatch, and before
    it has begun the last.
    """

    graph: Graph
    orders: Orders
    ends: list[float]
    limit: float
    steady: bool
    #: By node: its width in slots, its first slot, and the one after its last, 0 if it is virtual.
    width: list[int] = field(init=False)
    start: list[int] = field(init=False)
    end: list[int] = field(init=False)
    fixed: set[int] = field(factory=set)
    #: The nodes that are not virtual.
    moving: Ints = field(init=False)
    #: By node: the virtual weight gradients that it leaves owed.
    owes: dict[int, list[int]] = field(init=False)
    #: Per rank: which slots are taken, and the nodes by their slots.
    taken: list[bytearray] = field(factory=list)
    tracks: list[Track] = field(factory=list)
    #: The nodes that memory kept from moving as far as there was room, with their ranks and the
    #: slots from which on they may be.
    held_back: list[tuple[int, int, int]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        ends = np.array(self.ends, np.int64)
        width = np.array(self.graph.time, np.int64)
        slots = ends - width
        self.width = width.tolist()
        self.start = slots.tolist()
        is_virtual = np.array(self.graph.kind) == int(Kind.W)
        if self.steady:
            is_fixed = self.graph.is_steady(slots)
            self.fixed = set(np.flatnonzero(is_fixed).tolist())
            is_virtual &= ~is_fixed
        self.moving = np.flatnonzero(~is_virtual)
        self.end = np.where(is_virtual, 0, ends).tolist()
        self.owes = self.graph.weights
        if self.fixed:
            self.owes = {
                node: [weight for weight in owed if weight not in self.fixed]
                for node, owed in self.owes.items()
            }
        for order in self.orders:
            nodes = np.array(order, np.int64)
            nodes = nodes[~is_virtual[nodes]]
            self.taken.append(
                _taken(slots[nodes], width[nodes], int(ends.max(initial=0)))
            )
            rows = list(zip(slots[nodes].tolist(), nodes.tolist(), strict=True))
            track = Track(self.graph, self.limit, self.owes, self.width, sorted(rows))
            self.tracks.append(track)

    def moved_forward(self) -> Orders:
        """The orders after every node has moved as far forward as it can go, in order of time."""
        end = self.end
        needs = self.graph.needs
        #: When the last op of a kind and stage ends, by their number.
        ends = [0] * (max(chain.from_iterable(self.graph.names), default=0) + 1)
        slots = np.array(self.start, np.int64)[self.moving]
        ranks = np.array(self.graph.rank, np.int64)[self.moving]
        order = np.lexsort((self.moving, ranks, slots))
        columns = (
            slots[order].tolist(),
            ranks[order].tolist(),
            self.moving[order].tolist(),
        )
        for slot, rank, node in zip(*columns, strict=True):
            names = self.graph.names[node]
            if node not in self.fixed:
                # Ops of one kind and stage do not overtake each other.
                earliest = 0
                for name in names:
                    if ends[name] > earliest:
                        earliest = ends[name]
                for need, _ in needs[node]:
                    if end[need] > earliest:
                        earliest = end[need]
                if earliest < slot:
                    self.move(rank, node, earliest)
            for name in names:
                ends[name] = end[node]
        return [self.order(rank) for rank in range(len(self.tracks))]

    def move(self, rank: int, node: int, earliest: int) -> None:
        """Move a node to the first slot from `earliest` on that the rank's memory allows."""
        now = self.start[node]
        width = self.width[node]
        taken = self.taken[rank]
        taken[now : now + width] = _FREE * width
        track = self.tracks[rank]
        slot = track.first_fitting(node, now, earliest)
        is_held_back = slot > earliest
        while (slot := taken.find(_FREE * width, slot, now + width - 1)) >= 0:
            if track.move(node, now, slot):
                now = slot
                break
            is_held_back = True
            slot += 1
        if is_held_back:
            self.held_back.append((rank, node, earliest))
        self.start[node] = now
        self.end[node] = now + width
        taken[now : now + width] = _TAKEN * width

    def is_settled(self, ends: list[float]) -> bool:
        """Whether no node moves on a board of the orders after every node has moved, in which they
        have some ends. This board is of no use behind it.
        """
        # Where nodes start at their slots, that is this board. What a node waits for has moved
        # before it, and what has moved after it has freed slots behind it only. So a node that
        # memory did not hold back has no room before it; and if none that it held back moves now,
        # all stays. A node that takes no time may share its slot with what it waits for, and then
        # move before that.
        moving = self.moving
        if not np.array(self.width)[moving].all():
            return False
        if (np.array(ends)[moving] != np.array(self.end)[moving]).any():
            return False
        held_back = self.held_back
        self.held_back = []
        for rank, node, earliest in held_back:
            slot = self.start[node]
            self.move(rank, node, earliest)
            if self.start[node] < slot:
                return False
        return True

    def order(self, rank: int) -> list[int]:
        """A rank's nodes at their slots, with its virtual weight gradients in the free ones."""
        rows = self.tracks[rank].rows
        slots = np.array([slot for slot, _ in rows], np.int64)
        nodes = [node for _, node in rows]
        widths = np.array([self.width[node] for node in nodes], np.int64)
        owed = [self.owes.get(node, ()) for node in nodes]
        weights = [weight for weights in owed for weight in weights]
        order, _ = fill_slots(slots, widths, np.array(list(map(len, owed)), np.int64))
        both = [*nodes, *weights]
        return [both[index] for index in order.tolist()]


def _taken(slots: Ints, widths: Ints, end: int) -> bytearray:
    """Which slots up to the end are taken, by what starts at some slots and has some widths."""
    change = np.zeros(end + 1, np.int8)
    np.add.at(change, slots, 1)
    np.add.at(change, slots + widths, -1)
    return bytearray(np.cumsum(change, dtype=np.int8).tobytes())
