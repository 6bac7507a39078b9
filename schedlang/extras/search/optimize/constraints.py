"""A problem as constraints, for CP-SAT: are there orders whose objective is between two values?

For each two nodes of a rank of which either may come first there is a literal that says which; all
else follows from these. Chains make a staircase of the literals of two of them: whoever stands
before a node stands before those behind it, too.

              b0  b1  b2  b3
        a0     1   1   1   1      a1 before b2
        a1     0   0   1   1      and so before b3, and a0 before both
        a2     0   0   0   1

What a rank holds when a node starts is the sum of what has changed before it, so memory is a sum of
literals, whatever the times are. That says all; but how long something is held, a round trip
through other ranks at least, shows only in time. So where some ranks are looked at alone, memory is
a resource over time as well, of which each microbatch has its part from its forward to its last
use.

The narrower the values are between which is looked, the fewer literals are open: where a node can
start is known from the begin, and where it must end, from the end. So a search asks again and again
for little, which is far quicker than to ask for the least.
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
    """What a look for orders gave: orders and their value, or none that were found, and a value
    that is proved: the objective of no order is below it. `effort` is what it took, in the
    deterministic seconds of CP-SAT.
    """

    orders: Orders | None
    value: int | None
    bound: int
    effort: float


@frozen
class Effort:
    """How much a look may take: in the deterministic seconds of CP-SAT, which are the same on every
    machine, and in real ones; with how many threads, and from which seed.
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
    """Look for orders whose objective is from `low` to `high`; if that is of some ranks alone, as
    though all others had a rank for each node, which shows what no order is below.

    A hint are orders of which what is looked for may be made by few changes.
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
    """The constraints, for CP-SAT; TimeoutError where they are not all there by the deadline."""

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
            # At all ranks together, orders are found later with it.
            if not self.is_whole:
                self._hold_over_time(rank)
        self.model.minimize(self.value)

    def _place(self) -> None:
        """Let nodes start after the begin, and end before the value."""
        # Where a node can be, between the begin of its rank and the value that is looked for:
        #
        #     begin      before[n]      start[n]   time[n]      behind[n]      value
        #       ├───────────────────┄┄┄┄┄█████████┄┄┄┄┄┄├─────────────────────┤
        #
        # The smaller the value, the fewer places are left; with none, it cannot be.
        instance = self.instance
        self.is_span = instance.problem.graph.schedule.objective == "span"
        # What no rank's first start is behind: of ranks that follow each other, each has a span.
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
        """Let nodes wait for what they need."""
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
        """The literals of two chains."""
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
        """Whether a node comes before another one of its rank."""
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
        """Whether a node can come before another one, and all end in time."""
        # Both have to be between the earliest start of the first and the latest end of the second:
        # where they do not fit in there one behind the other, the order is known.
        instance = self.instance
        if (second, first) in instance.known_orders(instance.rank[first]):
            return False
        before, behind = instance.windows
        both = instance.time[first] + instance.time[second]
        return before[first] + both + behind[second] <= self.high

    def _hold_over_time(self, rank: int) -> None:
        """Let what a rank holds at any time fit, as follows from the sums."""
        # Two microbatches where there is room for two. However soon B0 is, F2 is behind it:
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
        # Threads that take turns find the same, however fast each of them is.
        parameters.interleave_search = effort.workers > 1
        # To try every literal before it searches takes it longer than the search, and most of what
        # there is not is shown by very few conflicts. A linear relaxation knows next to nothing of
        # what comes before what.
        parameters.cp_model_probing_level = 0
        parameters.linearization_level = 0
        # To rewrite the model takes longer than the search at one rank; and where all ops take as
        # long, it makes of what comes one after the other a literal for each op and time, and loses
        # sight of it. Of all ranks together, orders are found sooner with it.
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
            # Nodes that take no time may start together: then the literals say which is first.
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
