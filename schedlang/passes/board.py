"""The slots of a schedule's ops, and the moves that bring them forward."""

from attrs import define, field

from schedlang.passes.graph import Graph, Orders
from schedlang.passes.slots import fill_slots
from schedlang.passes.track import Track
from schedlang.schedule.kinds import Kind


@define
class Board:
    """The nodes of a graph at unit costs, each at the slot where it can start in given orders.

    Weight gradients can wait, so they are virtual: every slot in which a rank does nothing else
    runs the oldest one that it owes. If `steady`, nothing moves while a rank is in its steady
    phase, not the weight gradients either: after it has had all of its first microbatch, and before
    it has begun the last.
    """

    graph: Graph
    orders: Orders
    limit: float
    steady: bool
    #: By node: its first slot, and the one after its last.
    start: dict[int, int] = field(factory=dict)
    end: dict[int, int] = field(factory=dict)
    fixed: set[int] = field(factory=set)
    #: By node: the virtual weight gradients that it leaves owed.
    owes: dict[int, list[int]] = field(init=False)
    #: Per rank: the slots that are taken, and the nodes by their slots.
    taken: list[set[int]] = field(factory=list)
    tracks: list[Track] = field(init=False)

    def __attrs_post_init__(self) -> None:
        ends = self.graph.ends(self.orders)
        rows = list[list[tuple[int, int]]]()
        for order in self.orders:
            self.taken.append(set())
            slots = [(int(ends[node] - self.graph.time[node]), node) for node in order]
            if self.steady:
                self.fixed |= self.steady_nodes(slots)
            # What is left out here is virtual.
            rows.append([])
            for slot, node in slots:
                if node in self.fixed or self.graph.kind[node] != Kind.W:
                    rows[-1].append((slot, node))
                    self.put(node, slot)
        self.owes = {
            node: [weight for weight in owed if weight not in self.fixed]
            for node, owed in self.graph.weights.items()
        }
        self.tracks = [Track(self.graph, self.limit, self.owes, sorted(row)) for row in rows]

    def steady_nodes(self, slots: list[tuple[int, int]]) -> set[int]:
        """The nodes of a rank's steady phase."""
        units = self.graph.schedule.layout.units
        ops = [(slot, *op) for slot, node in slots for op in self.graph.ops[node]]
        of_first = [slot for slot, kind, _, unit in ops if unit == 0 and kind != Kind.W]
        of_last = [slot for slot, _, stage, unit in ops if unit == units(stage) - 1]
        begin = max(of_first, default=0)
        end = min(of_last, default=0)
        return {node for slot, node in slots if begin <= slot <= end}

    def moved_forward(self) -> Orders:
        """The orders after every node has moved as far forward as it can go, in order of time."""
        ends: dict[tuple[int, int], int] = {}
        in_time = sorted(
            (slot, rank, node)
            for rank, track in enumerate(self.tracks)
            for slot, node in track.rows
        )
        for _, rank, node in in_time:
            # Ops of one kind and stage do not overtake each other.
            kinds = {op[:2] for op in self.graph.ops[node]}
            if node not in self.fixed:
                self.move(rank, node, max(ends.get(kind, 0) for kind in kinds))
            ends.update(dict.fromkeys(kinds, self.end[node]))
        return [self.order(rank) for rank in range(len(self.tracks))]

    def move(self, rank: int, node: int, earliest: int) -> None:
        """Move a node to the first slot from `earliest` on that its inputs and the rank's memory
        allow.
        """
        now = self.start[node]
        width = int(self.graph.time[node])
        for need, _ in self.graph.needs[node]:
            earliest = max(earliest, self.end.get(need, 0))
        taken = self.taken[rank]
        taken.difference_update(range(now, now + width))
        track = self.tracks[rank]
        free = (
            slot for slot in range(earliest, now) if taken.isdisjoint(range(slot, slot + width))
        )
        self.put(node, next((slot for slot in free if track.move(node, now, slot)), now))

    def put(self, node: int, slot: int) -> None:
        """Let a node start at a slot."""
        rank = self.graph.rank[node]
        end = slot + int(self.graph.time[node])
        self.start[node] = slot
        self.end[node] = end
        self.taken[rank].update(range(slot, end))

    def order(self, rank: int) -> list[int]:
        """A rank's nodes at their slots, with its virtual weight gradients in the free ones."""
        placed = (
            (slot, self.end[node] - slot, node, self.owes.get(node, ()))
            for slot, node in self.tracks[rank].rows
        )
        return [node for _, node in fill_slots(placed)]
