"""The ops of a schedule at whole time slots, and the moves that bring them forward."""

from itertools import chain

import numpy as np
from attrs import define, field

from schedlang.passes.op_graph import Graph, Orders
from schedlang.passes.slots import fill_slots
from schedlang.passes.track import Track
from schedlang.schedule.arrays import Ints
from schedlang.schedule.kinds import Kind

#: The byte of a slot in which an op runs, and of an empty one.
_TAKEN = b"\1"
_FREE = b"\0"


@define
class Board:
    """The nodes of a graph at unit costs, each at the slot where it starts if ranks follow
    `orders`; `ends` are the slots at which nodes end.

    Weight gradients can wait, so they have no slots of their own and are *virtual*: in every empty
    slot the rank runs the oldest weight gradient that it owes. With `steady`, no node of a rank's
    steady phase moves, nor are its weight gradients virtual. The steady phase begins when the rank
    is done with its first microbatch, and ends when it begins its last.
    """

    graph: Graph
    orders: Orders
    ends: list[float]
    limit: float
    steady: bool
    #: By node: how many slots it takes, its first slot, and the slot after its last, 0 if virtual.
    width: list[int] = field(init=False)
    start: list[int] = field(init=False)
    end: list[int] = field(init=False)
    fixed: set[int] = field(factory=set)
    #: The nodes that are not virtual.
    moving: Ints = field(init=False)
    #: By input gradient: the virtual weight gradients that become ready to run after it.
    owes: dict[int, list[int]] = field(init=False)
    #: Per rank: which slots are taken, and the nodes by their slots.
    taken: list[bytearray] = field(factory=list)
    tracks: list[Track] = field(factory=list)
    #: Nodes that the memory limit kept out of an earlier empty slot: rank, node and the earliest
    #: slot that the node's inputs allow.
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
        """Move every node as far forward as it can go, earliest first; return the new orders."""
        end = self.end
        needs = self.graph.needs
        #: The end of the last op of each kind and stage, by the number that names the two.
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
                # Ops of the same kind and stage keep their order.
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
        """Whether another round of moves would change nothing; `ends` are those of an execution of
        the new orders. It moves nodes, so the board must not be used afterwards.
        """
        # If nodes really start at their slots, the next round's board would equal this one. The
        # inputs of a node moved before it, and nodes that moved after it freed only later slots. So
        # only nodes that the memory limit held back could still move; if none of them does, nothing
        # will. Nodes that take no time are an exception: such a node may share the slot of its
        # input and then move before it.
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
        """A rank's nodes in order of slots, with virtual weight gradients in the empty slots."""
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
    """The slots up to `end`, marked as taken where a node of some width starts at some slot."""
    change = np.zeros(end + 1, np.int8)
    np.add.at(change, slots, 1)
    np.add.at(change, slots + widths, -1)
    return bytearray(np.cumsum(change, dtype=np.int8).tobytes())
