"""A problem as constraints, for CP-SAT: are there orders whose objective is between two values?

For each two nodes of a rank that may come in either order, a literal says which one is first;
everything else follows from these. The nodes of a chain keep their order, so the literals of two
chains form a staircase: a node that comes before another one comes before its successors, too.

              b0  b1  b2  b3
        a0     1   1   1   1      a1 before b2
        a1     0   0   1   1      and so before b3, and a0 before both
        a2     0   0   0   1

A rank's memory when a node starts is the sum of the changes by the nodes before it, which is a sum
of literals that does not depend on times. These sums are complete, but they do not show that an
activation is held for a round trip through other ranks at least. So a model of single ranks has
memory also as a resource over time, of which each microbatch takes a part from its forward to its
last use.

If the two values are close, few literals are open, since each node has an earliest start and a
latest end. So the search asks many narrow questions, which is far quicker than to minimise.
"""

from itertools import combinations
from time import monotonic

from attrs import frozen
from ortools.sat.python import cp_model

from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.solver import (
    Before,
    Impossible,
    hold_within,
    solve,
    which_is_first,
)
from schedlang.passes.op_graph import Orders


@frozen
class Outcome:
    """The result of a search: orders and their value, if any were found, and a proved lower bound
    of the objective. `effort` is the time it took, in the deterministic seconds of CP-SAT.
    """

    orders: Orders | None
    value: int | None
    bound: int
    effort: float


@frozen
class Effort:
    """The limits of a search: deterministic seconds of CP-SAT, which are the same on every machine,
    and real seconds; the number of threads, and the seed.
    """

    deterministic: float
    seconds: float
    workers: int = 1
    seed: int = 0


def look(
    instance: Instance,
    low: int,
    high: int,
    effort: Effort,
    ranks: list[int] | None = None,
    hint: Orders | None = None,
) -> Outcome:
    """Search for orders whose objective is from `low` to `high`.

    With `ranks`, only those ranks run one node at a time, and others run all that is ready: then
    the result is a lower bound. The search begins near the orders of `hint`.
    """
    deadline = monotonic() + effort.seconds
    try:
        model = _Model(instance, low, high, ranks, deadline)
    except Impossible:
        return Outcome(None, None, high + 1, 0.0)
    except TimeoutError:
        return Outcome(None, None, low, 0.0)
    if hint is not None:
        model.hint(hint)
    return model.solved(effort, deadline)


class _Model:
    """The constraints, for CP-SAT; TimeoutError if they cannot be built by the deadline."""

    def __init__(
        self,
        instance: Instance,
        low: int,
        high: int,
        ranks: list[int] | None,
        deadline: float,
    ) -> None:
        self.instance = instance
        self.low = low
        self.high = high
        self.is_whole = ranks is None
        self.ranks = list(range(len(instance.limits))) if ranks is None else ranks
        self.nodes = [
            node for rank in self.ranks for node in instance.nodes_of_rank[rank]
        ]
        self.model = cp_model.CpModel()
        self.value = self.model.new_int_var(low, high, "value")
        self.before: dict[tuple[int, int], Before] = {}
        self._place()
        self._wait()
        for rank in self.ranks:
            if monotonic() > deadline:
                raise TimeoutError
            self._order(rank)
            hold_within(
                self.model,
                instance,
                instance.nodes_of_rank[rank],
                self.before,
                instance.limits[rank],
            )
            # It slows the search for orders of all ranks down.
            if not self.is_whole:
                self._hold_over_time(rank)
        self.model.minimize(self.value)

    def _place(self) -> None:
        """Bound each node's start by the begin of its rank and by the value."""
        # Where a node can start, between the begin of its rank and the objective's value:
        #
        #     begin      before[n]      start[n]   time[n]      behind[n]      value
        #       ├───────────────────┄┄┄┄┄█████████┄┄┄┄┄┄├─────────────────────┤
        #
        # A smaller value leaves fewer starts; without any, no order has this value.
        instance = self.instance
        self.is_span = instance.problem.graph.schedule.objective == "span"
        # An upper bound of every rank's first start: at worst, ranks run one after the other.
        latest = (
            (self.high + instance.longest_delay) * len(instance.limits)
            if self.is_span
            else 0
        )
        self.start = {}
        before, behind = instance.windows
        for rank in self.ranks:
            begin = self.model.new_int_var(0, latest, f"begin_{rank}")
            for node in instance.nodes_of_rank[rank]:
                time = instance.time[node]
                last = self.high - behind[node] - time
                if last < before[node]:
                    raise Impossible
                start = self.model.new_int_var(
                    before[node], last + latest, f"start_{node}"
                )
                self.start[node] = start
                self.model.add(start - begin >= before[node])
                self.model.add(start + time + behind[node] - begin <= self.value)

    def _wait(self) -> None:
        """Let nodes wait for the nodes that they need."""
        instance = self.instance
        lags = instance.lags if self.is_whole else instance.direct_lags(self.nodes)
        for first, second, lag in lags:
            self.model.add(self.start[second] - self.start[first] >= lag)

    def _order(self, rank: int) -> None:
        """Let the nodes of a rank come one after the other."""
        instance = self.instance
        nodes = instance.nodes_of_rank[rank]
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(
                self.start[node], instance.time[node], ""
            )
            for node in nodes
        )
        own = set(nodes)
        for chain in instance.chains:
            if chain[0] in own:
                for index, node in enumerate(chain):
                    self.before.update(((other, node), True) for other in chain[:index])
        for rows, columns in combinations(
            [c for c in instance.chains if c[0] in own], 2
        ):
            self._staircase(rows, columns)

    def _staircase(self, rows: list[int], columns: list[int]) -> None:
        """Make the literals of two chains."""
        grid = [[self._literal(row, column) for column in columns] for row in rows]
        for row, column in (
            (r, c) for r in range(len(rows)) for c in range(len(columns))
        ):
            literal = grid[row][column]
            if isinstance(literal, bool):
                continue
            # A 1 has 1s above it and to its right: these two implications, from cell to cell, give
            # the staircase.
            for other in (
                grid[row - 1][column] if row else True,
                grid[row][column + 1] if column + 1 < len(columns) else True,
            ):
                if not isinstance(other, bool):
                    self.model.add_implication(literal, other)

    def _literal(self, first: int, second: int) -> Before:
        """The literal that says whether a node comes before another one of its rank."""
        instance = self.instance
        may = self._may_precede(first, second)
        may_not = self._may_precede(second, first)
        if not may and not may_not:
            raise Impossible
        literal: Before = may
        if may and may_not:
            starts = self.start[first], self.start[second]
            times = instance.time[first], instance.time[second]
            literal = which_is_first(self.model, *starts, *times)
        self.before[first, second] = literal
        self.before[second, first] = (
            not literal if isinstance(literal, bool) else ~literal
        )
        return literal

    def _may_precede(self, first: int, second: int) -> bool:
        """Whether a node can come before another one with an objective of at most `high`."""
        # Both run between the earliest start of the first and the latest end of the second. If that
        # is too short for the two, the order is known.
        instance = self.instance
        if (second, first) in instance.known_orders(instance.rank[first]):
            return False
        before, behind = instance.windows
        both = instance.time[first] + instance.time[second]
        return before[first] + both + behind[second] <= self.high

    def _hold_over_time(self, rank: int) -> None:
        """Add memory as a resource over time. It follows from the sums, and helps the solver."""
        # With room for two microbatches, F2 starts only after B0 has ended:
        #
        #     held 0    F0 ──────────────── B0
        #     held 1       F1 ──────────────── B1
        #     held 2                          F2 ──── ...
        instance = self.instance
        holdings, beside = instance.holdings(rank)
        amounts = [holding.amount for holding in holdings]
        room = instance.limits[rank] + beside
        if sum(amounts) <= room:
            return
        intervals = []
        for holding in holdings:
            start = self.start[holding.taker]
            end = self.start[holding.user] + instance.time[holding.user]
            long = self.model.new_int_var(
                holding.long, max(self.high, holding.long), ""
            )
            intervals.append(self.model.new_interval_var(start, long, end, ""))
        self.model.add_cumulative(intervals, amounts, room)

    def hint(self, orders: Orders) -> None:
        """Give the solver orders to begin from."""
        place = {node: index for order in orders for index, node in enumerate(order)}
        for (first, second), literal in self.before.items():
            if isinstance(literal, cp_model.IntVar):
                self.model.add_hint(literal, place[first] < place[second])

    def solved(self, effort: Effort, deadline: float) -> Outcome:
        """Solve the model."""
        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.max_deterministic_time = effort.deterministic
        parameters.max_time_in_seconds = max(deadline - monotonic(), 0.01)
        parameters.num_workers = effort.workers
        parameters.random_seed = effort.seed
        # Threads that take turns give the same result on every machine.
        parameters.interleave_search = effort.workers > 1
        # Probing takes longer than the search, which mostly needs very few conflicts to refute a
        # value. A linear relaxation says next to nothing about orders.
        parameters.cp_model_probing_level = 0
        parameters.linearization_level = 0
        # For one rank, presolve takes longer than the search; and for ops of equal length it
        # replaces the no-overlap constraint by literals for each op and time, which is worse. For
        # all ranks together, it finds orders sooner.
        parameters.cp_model_presolve = self.is_whole
        status = solve(solver, self.model)
        spent = solver.deterministic_time
        if status == cp_model.INFEASIBLE:
            return Outcome(None, None, self.high + 1, spent)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Outcome(None, None, self.low, spent)
        orders = [self._order_of(solver, rank) for rank in self.ranks]
        bound = max(self.low, round(solver.best_objective_bound))
        return Outcome(orders, round(solver.objective_value), bound, spent)

    def _order_of(self, solver: cp_model.CpSolver, rank: int) -> list[int]:
        """The nodes of a rank in the order that was found."""

        def turn(node: int) -> tuple[int, int, int]:
            # Nodes without duration may start together; then the literals order them.
            others = (self.before.get((other, node), False) for other in nodes)
            precede = (
                o if isinstance(o, bool) else solver.boolean_value(o) for o in others
            )
            return (
                solver.value(self.start[node]),
                sum(precede),
                self.instance.position[node],
            )

        nodes = self.instance.nodes_of_rank[rank]
        return sorted(nodes, key=turn)
