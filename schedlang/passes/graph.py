"""The ops of a schedule as a graph, for passes that look for a better order of each rank's ops."""

from functools import cached_property
from itertools import accumulate

import numpy as np
from attrs import define, evolve, field

from schedlang.proof.edges import latencies
from schedlang.proof.graph import Items
from schedlang.schedule.actions import Actions, is_copy, is_transfer
from schedlang.schedule.columns import Floats, Ints
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

#: Sums of durations and amounts may differ by this much and be equal.
ROUNDING = 1e-9

#: For each rank, nodes in order.
Orders = list[list[int]]
Row = tuple[int, int, int, int, int]


@define(slots=False)
class Graph:
    """A node is an op, or ops that overlap, of a schedule that can run; nodes are numbers, which
    index these lists.

    `order` is the schedule's own. A weight gradient is always a node of its own; `weights[n]` are
    those that node n leaves owed. ValueError for a schedule with communication or copies.
    """

    schedule: Schedule
    ops: list[list[Row]] = field(factory=list)
    rank: list[int] = field(factory=list)
    #: The kind of all ops of a node; None where they are of several.
    kind: list[int | None] = field(factory=list)
    time: list[float] = field(factory=list)
    #: What a node adds to the memory of its rank: at most while it runs, and once it has.
    rise: list[float] = field(factory=list)
    change: list[float] = field(factory=list)
    #: What a node waits for, each with the time its result takes to arrive; and the nodes on other
    #: ranks that wait.
    needs: list[list[tuple[int, float]]] = field(factory=list)
    users: list[list[int]] = field(factory=list)
    #: The node of each action, by its row in the schedule's columns.
    node_of: list[int] = field(factory=list)
    order: Orders = field(factory=list)
    weights: dict[int, list[int]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        kinds = {kind for actions in self.schedule.ranks for kind in actions.kind}
        if any(map(is_transfer, kinds)):
            raise ValueError("the communication is written out: only its own order fits it")
        if any(map(is_copy, kinds)):
            raise ValueError("copies to the host are written out: only their own order fits them")
        for rank, actions in enumerate(self.schedule.ranks):
            self.order.append([])
            for batch in actions.batches():
                rows = list(map(actions.row, batch))
                others = [row for row in rows if row[0] != Kind.W]
                weights = [[row] for row in rows if row[0] == Kind.W]
                first_weight = len(self.ops) + bool(others)
                numbers = iter(range(first_weight, first_weight + len(weights)))
                self.node_of += [
                    next(numbers) if row[0] == Kind.W else len(self.ops) for row in rows
                ]
                for ops in ([others] if others else []) + weights:
                    self.order[-1].append(len(self.ops))
                    self.ops.append(ops)
                    self.rank.append(rank)
                    kinds = {op[0] for op in ops}
                    self.kind.append(kinds.pop() if len(kinds) == 1 else None)
        self.price()
        self.connect()

    def price(self) -> None:
        """Find what each node takes and holds."""
        stages = len(self.schedule.placement)
        durations = self.schedule.costs.durations(stages)
        memory = self.schedule.costs.memory(stages)
        for ops in self.ops:
            self.time.append(durations.ends(ops)[-1])
            amounts = [memory[kind][stage] for kind, stage, *_ in ops]
            kept = [
                amount * self.schedule.keeps(*op[:3])
                for amount, op in zip(amounts, ops, strict=True)
            ]
            self.rise.append(
                max(map(sum, zip(accumulate(kept, initial=0.0), amounts, strict=False)))
            )
            self.change.append(sum(kept))

    def connect(self) -> None:
        """Find what each node waits for."""
        needs = self.schedule.needs
        transfers = self.schedule.costs.transfers(len(self.schedule.placement))
        delay = np.zeros(len(needs.user))
        messages = needs.is_message
        table = latencies(self.schedule.layout, transfers)
        delay[messages] = table[needs.made[messages], needs.number[messages]]
        nodes = np.array(self.node_of)
        wanted: list[dict[int, float]] = [{} for _ in self.ops]
        columns = nodes[needs.user], nodes[needs.maker], delay
        for node, maker, latency in zip(*(column.tolist() for column in columns), strict=True):
            if maker != node:
                wanted[node][maker] = max(wanted[node].get(maker, 0.0), latency)
        self.users = [[] for _ in self.ops]
        for node, makers in enumerate(wanted):
            self.needs.append(sorted(makers.items()))
            for maker in makers:
                if self.rank[maker] != self.rank[node]:
                    self.users[maker].append(node)
                if self.ops[node][0][0] == Kind.W:
                    self.weights.setdefault(maker, []).append(node)

    def runs_like(self, other: "Graph") -> bool:
        """Whether the same ops take the same time in both, and their results as long to arrive."""
        return self.time == other.time and self.needs == other.needs

    def without_weights(self) -> Orders:
        """The schedule's order without its weight gradients."""
        return [[node for node in order if self.kind[node] != Kind.W] for order in self.order]

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, Floats]:
        """What waits for what, and how long after: nodes, those that they need, and latencies."""
        edges = [(user, maker) for user, needs in enumerate(self.needs) for maker, _ in needs]
        users, makers = np.array(edges, np.int64).reshape(-1, 2).T
        latency = np.array([latency for needs in self.needs for _, latency in needs])
        return users, makers, latency

    def ends(self, orders: Orders) -> list[float]:
        """When each node ends if ranks follow some orders; nothing where these cannot run."""
        if sum(map(len, orders)) < len(self.ops):
            return []
        thread = np.empty(len(self.ops), np.int64)
        place = np.empty(len(self.ops), np.int64)
        for rank, order in enumerate(orders):
            thread[order] = rank
            place[order] = np.arange(len(order))
        users, makers, latency = self._edges
        is_far = thread[users] != thread[makers]
        if not (is_far | (place[makers] < place[users])).all():
            return []
        items = Items()
        items.add(thread, place, np.array(self.time))
        # What comes before on the same rank is waited for only where it takes its time to arrive.
        waited = is_far | (latency > 0)
        items.wait(users[waited], makers[waited], latency[waited])
        graph = items.graph()
        return graph.ends.tolist() if graph.is_whole else []

    def objective(self, orders: Orders, ends: list[float]) -> float:
        """What the schedule's passes minimise, of an execution; see `Timeline`."""
        spans = [
            (ends[order[0]] - self.time[order[0]], ends[order[-1]]) for order in orders if order
        ]
        if self.schedule.objective == "span":
            return max(end - start for start, end in spans)
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def peak(self, order: list[int]) -> float:
        """The most that a rank holds."""
        held = accumulate((self.change[node] for node in order), initial=0.0)
        return max(
            (before + self.rise[node] for before, node in zip(held, order, strict=False)),
            default=0.0,
        )

    def reordered(self, orders: Orders) -> Schedule:
        """The schedule with other orders, without slots."""
        ranks = []
        for order in orders:
            actions = Actions()
            for node in order:
                for row in self.ops[node]:
                    actions.add(*row)
            ranks.append(actions)
        return evolve(self.schedule, ranks=tuple(ranks), slots=None)
