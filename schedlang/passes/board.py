"""The slots of a schedule's ops, and the moves that bring them forward."""

from itertools import chain

import numpy as np
from attrs import define, field

from schedlang.passes.graph import Graph, Orders
from schedlang.passes.slots import fill_slots
from schedlang.passes.track import Row, Track
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
    #: By node: the virtual weight gradients that it leaves owed.
    owes: dict[int, list[int]] = field(init=False)
    #: Per rank: which slots are taken, and the nodes by their slots.
    taken: list[bytearray] = field(factory=list)
    tracks: list[Track] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        ends = np.array(self.ends, np.int64)
        width = np.array(self.graph.time, np.int64)
        slots = ends - width
        self.width = width.tolist()
        self.start = slots.tolist()
        if self.steady:
            for order in self.orders:
                self.fixed |= self.steady_nodes([(self.start[node], node) for node in order])
        is_virtual = np.array([kind == Kind.W for kind in self.graph.kind], bool)
        is_virtual[list(self.fixed)] = False
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
            self.taken.append(_taken(slots[nodes], width[nodes], int(ends.max(initial=0))))
            rows = list(zip(slots[nodes].tolist(), nodes.tolist(), strict=True))
            track = Track(self.graph, self.limit, self.owes, self.width, sorted(rows))
            self.tracks.append(track)

    def steady_nodes(self, rows: list[Row]) -> set[int]:
        """The nodes of a rank's steady phase."""
        units = self.graph.schedule.layout.units
        ops = [(slot, *op) for slot, node in rows for op in self.graph.ops[node]]
        of_first = [slot for slot, kind, _, unit in ops if unit == 0 and kind != Kind.W]
        of_last = [slot for slot, _, stage, unit in ops if unit == units(stage) - 1]
        begin = max(of_first, default=0)
        end = min(of_last, default=0)
        return {node for slot, node in rows if begin <= slot <= end}

    def moved_forward(self) -> Orders:
        """The orders after every node has moved as far forward as it can go, in order of time."""
        end = self.end
        needs = self.graph.needs
        #: When the last op of a kind and stage ends, by their number.
        ends = [0] * (max(chain.from_iterable(self.graph.names), default=0) + 1)
        rows = [
            (slot, rank, node)
            for rank, track in enumerate(self.tracks)
            for slot, node in track.rows
        ]
        for slot, rank, node in sorted(rows):
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
        while (slot := taken.find(_FREE * width, slot, now + width - 1)) >= 0:
            if track.move(node, now, slot):
                now = slot
                break
            slot += 1
        self.start[node] = now
        self.end[node] = now + width
        taken[now : now + width] = _TAKEN * width

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
