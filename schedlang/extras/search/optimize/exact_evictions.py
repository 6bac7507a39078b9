"""Which activations are evicted, when weights are gathered, and in which order ops run: exactly, by
CP-SAT.

The model has the ops of the problem and, for each activation and way, the ops that evict it, each
of which is there or not. A literal for each two ops of a rank says which one comes first in
the rank's order. A copy begins once the op before it has ended and the link is free:

    compute    F0 F1 ─── F2 B0        F2 needs the room of F0's activation, so it must stand where
    link          O0  L0              it begins after the copy out has ended

Before each op that uses gathered weights, there may be a gather of them, on a stream of its own. An
op has its weights from the last of these before it, which holds them until the last op that has
them from there.

Nothing of an execution waits for memory. So each op starts exactly when the last of what it waits
for has ended: for each of these, a literal says that it is the last one. Memory is a resource over
time.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf
from time import monotonic

import numpy as np
from attrs import evolve, frozen
from ortools.sat.python import cp_model

from schedlang.extras.search.optimize.evictions import (
    Unit,
    gathers_of,
    schedule_of,
    times_of,
    uses_of,
)
from schedlang.extras.search.optimize.problem import Answer, Problem, Way
from schedlang.extras.search.optimize.solver import solve
from schedlang.passes.op_graph import Op
from schedlang.proof.prove import ideal_execution
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.kinds import GATHER, OPS, STEPS, SUM, Kind
from schedlang.schedule.ops import COMPUTE, COPIES_IN, COPIES_OUT
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Timeline

#: The most ops of a rank, with those that may be added: the model has a literal for each two.
_MOST_OPS = 64


class Unsuitable(Exception):
    """The model does not say what happens in executions of this problem, or takes too long."""


@frozen(eq=False)
class Item:
    """An op of the model: a `node` of the problem's graph, or an op beside it. `there` says whether
    it is there.
    """

    op: Op
    rank: int
    time: int
    start: cp_model.IntVar
    there: cp_model.IntVar
    node: int | None

    @property
    def key(self) -> int | Op:
        """Its node, or its op, if it is beside the graph."""
        return self.op if self.node is None else self.node

    @property
    def stream(self) -> str:
        """Where it runs on its rank; copies in both directions share a link."""
        stream = OPS[self.op[0]].stream
        return COPIES_OUT if stream == COPIES_IN else stream

    def holds_up(self, other: "Item") -> bool:
        """Whether another op of the rank, if it stands behind this one, waits for it."""
        return self.stream in (COMPUTE, other.stream)

    @property
    def end(self) -> cp_model.LinearExpr:
        """When it ends."""
        return self.start + self.time


def evicting_exactly(
    problem: Problem, known: Answer, seconds: float, workers: int = 1, seed: int = 0
) -> Iterator[Answer]:
    """See `Solver`. It yields nothing for large problems, and where executions have what the model
    has not: ops that overlap, links or memory that ranks share, costs with too many digits.
    """
    deadline = monotonic() + seconds
    try:
        model = _Model(problem, known, deadline)
    except Unsuitable:
        return
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.interleave_search = workers > 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = max(deadline - monotonic(), 0.01)
    status = solve(solver, model.model)
    assert status != cp_model.MODEL_INVALID
    if status == cp_model.INFEASIBLE:
        # Nothing is better than what is known; without anything, nothing fits.
        yield evolve(known, bound=known.value)
    elif status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        schedule = model.schedule(solver)
        value = problem.value_of(schedule)
        bound = model.number(round(solver.best_objective_bound) // model.weight)
        if value < known.value:
            known = Answer(known.orders, value, known.bound, "exact search", schedule)
        yield evolve(known, bound=min(max(known.bound, bound), known.value))


class _Model:
    """The constraints, of schedules whose objective is below that of the known answer."""

    def __init__(self, problem: Problem, known: Answer, deadline: float) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.uses = uses_of(problem)
        self.gathers = gathers_of(problem, self.uses)
        self._check()
        self.model = cp_model.CpModel()
        self.always = self.model.new_constant(1)
        self.fixed = self.graph.fixed
        self.times = times_of(problem, self.uses)
        # All ops and latencies, one after the other.
        self.horizon = sum(map(self.units, self.graph.time))
        self.horizon += sum(
            self.units(delay) for needs in self.graph.needs for _, delay in needs
        )
        self.horizon += sum(map(self.units, self.times.values()))
        self.horizon += sum(map(self.units, self.gathers.sums))
        gather_times = self.gathers.times
        self.horizon += sum(
            self.units(gather_times[stage]) for _, stage in self.gathers.needs
        )
        self._make()
        #: By two ops of a rank: whether the first one comes before the second.
        self.before: dict[tuple[Item, Item], cp_model.LiteralT] = {}
        for items in self.of_rank:
            if monotonic() > deadline:
                raise Unsuitable
            self._order(items)
        self._gather()
        self._wait()
        for rank in range(len(self.of_rank)):
            self._hold(rank)
        self._minimise(known)
        self._hint(known)

    def _check(self) -> None:
        """Raise Unsuitable for a problem that has what the model has not."""
        graph = self.graph
        layout = graph.schedule.layout
        shares = layout.keepers or len(set(layout.links)) < len(layout.links)
        is_exact = None not in (graph.fixed.denominator, graph.fixed_memory.denominator)
        overlaps = any(len(ops) > 1 for ops in graph.ops)
        if shares or not is_exact or overlaps:
            raise Unsuitable

    def units(self, time: float) -> int:
        """A time as a whole number."""
        return round(float(self.fixed.counts(time)))

    def number(self, units: int) -> float:
        """The time of a whole number."""
        return float(self.fixed.numbers(np.array(units)))

    def _make(self) -> None:
        """Make the ops that are there, and those that may be."""
        graph = self.graph
        self.items: list[Item] = []
        for node, ((op,), time) in enumerate(zip(graph.ops, graph.time, strict=True)):
            self._add(op, graph.rank[node], self.units(time), self.always, node)
        #: Whether an activation stays in memory, and the ops of each way that may evict it.
        self.stays: dict[Unit, cp_model.IntVar] = {}
        self.added: dict[tuple[Unit, Way], list[Item]] = {}
        for unit, use in self.uses.items():
            self.stays[unit] = self.model.new_bool_var("")
            literals = [self.model.new_bool_var("") for _ in self.problem.ways]
            self.model.add_exactly_one([self.stays[unit], *literals])
            for way, there in zip(self.problem.ways, literals, strict=True):
                self.added[unit, way] = [
                    self._add(
                        op, graph.rank[use.forward], self.units(self.times[op]), there
                    )
                    for op in ((int(kind), *unit) for kind in way.kinds)
                ]
        #: By stage: the ops that use its gathered weights, each with the gather that may stand
        #: before it; and the sum of its gradients.
        self.gathered: dict[int, dict[Item, Item]] = {}
        self.sums: dict[int, Item] = {}
        users = list(self.items)
        placement = graph.schedule.placement
        times = self.gathers.times
        for stage in self.problem.gathered:
            op = int(GATHER), stage, NO_MICROBATCH
            self.gathered[stage] = {
                user: self._add(
                    op, user.rank, self.units(times[stage]), self.model.new_bool_var("")
                )
                for user in users
                if stage in self.gathers.uses(user.key)
            }
        times = self.gathers.sums
        for stage in self.problem.summed:
            op = int(SUM), stage, NO_MICROBATCH
            self.sums[stage] = self._add(
                op, placement[stage], self.units(times[stage]), self.always
            )
        ranks = range(len(graph.order))
        self.of_rank = [
            [item for item in self.items if item.rank == rank] for rank in ranks
        ]
        if max(map(len, self.of_rank)) > _MOST_OPS:
            raise Unsuitable

    def _add(
        self,
        op: Op,
        rank: int,
        time: int,
        there: cp_model.IntVar,
        node: int | None = None,
    ) -> Item:
        start = self.model.new_int_var(0, self.horizon, "")
        item = Item(op, rank, time, start, there, node)
        self.items.append(item)
        return item

    def _order(self, items: list[Item]) -> None:
        """Put the ops of a rank into an order, those that are not there as well."""
        model = self.model
        before: dict[tuple[Item, Item], cp_model.LiteralT] = {}
        for one, other in combinations(items, 2):
            literal = model.new_bool_var("")
            before[one, other] = literal
            before[other, one] = ~literal
        for one, second, third in combinations(items, 3):
            for a, b, c in ((one, second, third), (third, second, one)):
                model.add_bool_or(~before[a, b], ~before[b, c], ~before[c, a])
        for (one, other), is_first in before.items():
            if one.holds_up(other):
                model.add(other.start >= one.end).only_enforce_if(
                    is_first, one.there, other.there
                )
        for stream in {item.stream for item in items}:
            model.add_no_overlap(
                model.new_optional_fixed_size_interval_var(
                    item.start, item.time, item.there, ""
                )
                for item in items
                if item.stream == stream
            )
        self.before |= before

    def _gather(self) -> None:
        """Let each op have its weights from the last gather before it."""
        model = self.model
        #: By op: the gathers from which it may have weights, each with whether it has.
        self.givers: dict[Item, list[tuple[Item, cp_model.LiteralT]]] = {}
        #: By gather: when its weights are let go of.
        self.until: dict[Item, cp_model.IntVar] = {}
        for gathers in self.gathered.values():
            for gather in gathers.values():
                self.until[gather] = model.new_int_var(0, self.horizon, "")
            for user, own in gathers.items():
                model.add_implication(own.there, user.there)
                model.add_bool_and([self.before[own, user]])
                givers = [
                    (own, own.there)
                    if giver is user
                    else (gather, self._gives(gather, giver, user))
                    for giver, gather in gathers.items()
                ]
                model.add(sum(has for _, has in givers) == user.there)
                for gather, has in givers:
                    model.add(self.until[gather] >= user.end).only_enforce_if(has)
                self.givers.setdefault(user, []).extend(givers)
                for giver, (_, has) in zip(gathers, givers, strict=True):
                    # A later gather stands behind all that have weights from this one.
                    for other, later in gathers.items():
                        if other is not giver:
                            model.add_bool_or(
                                ~has,
                                ~later.there,
                                ~self.before[giver, other],
                                self.before[user, later],
                            )

    def _gives(self, gather: Item, giver: Item, user: Item) -> cp_model.IntVar:
        """A literal that an op has its weights from the gather of an earlier one."""
        literal = self.model.new_bool_var("")
        self.model.add_implication(literal, gather.there)
        self.model.add_implication(literal, self.before[giver, user])
        return literal

    def _wait(self) -> None:
        """Let each op start when the last of what it waits for has ended."""
        #: By op: what it may have waited for last, each with the time until it starts, and whether
        #: it has.
        needs: dict[Item, list[tuple[Item, int]]] = {item: [] for item in self.items}
        for node, wanted in enumerate(self.graph.needs):
            needs[self.items[node]] += [
                (self.items[other], self.units(delay)) for other, delay in wanted
            ]
        for (unit, _), added in self.added.items():
            use = self.uses[unit]
            line = [self.items[use.forward], *added, self.items[use.backward]]
            for one, other in pairwise(line):
                needs[other].append((one, 0))
        for stage, reduction in self.sums.items():
            for item in self.items:
                if item.node is not None and stage in self.gathers.added[item.node]:
                    needs[reduction].append((item, 0))
                if item.op[0] in STEPS and item.op[1] == stage:
                    needs[item].append((reduction, 0))
        for item, needed in needs.items():
            last = []
            for other, latency in needed:
                both = item.there, other.there
                end = other.end + latency
                self.model.add(item.start >= end).only_enforce_if(both)
                if item.rank == other.rank:
                    self.model.add_bool_and([self.before[other, item]])
                last.append(self._last(item, end, other.there))
            for gather, has in self.givers.get(item, ()):
                self.model.add(item.start >= gather.end).only_enforce_if(has)
                last.append(self._last(item, gather.end, has))
            for other in self.of_rank[item.rank]:
                if other is not item and other.holds_up(item):
                    is_before = self.before[other, item]
                    last.append(self._last(item, other.end, other.there, is_before))
            last.append(self._last(item, 0))
            self.model.add_bool_or(last).only_enforce_if(item.there)

    def _last(
        self, item: Item, end: cp_model.LinearExprT, *when: cp_model.LiteralT
    ) -> cp_model.IntVar:
        """A literal that an op starts no later than an end, of what is there and before it."""
        literal = self.model.new_bool_var("")
        self.model.add(item.start <= end).only_enforce_if(literal)
        for condition in when:
            self.model.add_implication(literal, condition)
        return literal

    def _hold(self, rank: int) -> None:
        """Limit what a rank holds over time."""
        fixed = self.graph.fixed_memory
        limit = self.problem.limits[rank]
        if limit == inf:
            return
        counts = [
            list(map(round, fixed.counts(values).tolist()))
            for values in (self.graph.rise, self.graph.change)
        ]
        rise, change = counts
        nodes: dict[Unit, list[int]] = {}
        for node in self.graph.order[rank]:
            ((_, stage, microbatch),) = self.graph.ops[node]
            nodes.setdefault((stage, microbatch), []).append(node)
        #: Intervals, and how much is held in each.
        self.intervals: list[tuple[cp_model.IntervalVar, int]] = []
        for unit, mine in nodes.items():
            for node in mine:
                # A forward that drops what it makes holds it when it starts.
                if rise[node] > max(change[node], 0):
                    self._pass(self.items[node], rise[node], self.always)
            takers = [node for node in mine if change[node] > 0]
            users = [node for node in mine if change[node] < 0]
            if not takers and not users:
                continue
            if len(takers) != 1 or sum(change[node] for node in mine):
                raise Unsuitable
            taker = self.items[takers[0]]
            if unit not in self.uses:
                for user in users:
                    self._interval(taker, self.items[user], -change[user], self.always)
                continue
            for user in users:
                amount = -change[user]
                self._interval(taker, self.items[user], amount, self.stays[unit])
                for way in self.problem.ways:
                    back = self.added[unit, way][-1]
                    self._interval(back, self.items[user], amount, back.there)
            for way in self.problem.ways:
                first = self.added[unit, way][0]
                if way.away is None:
                    self._pass(taker, change[takers[0]], first.there)
                else:
                    self._interval(taker, first, change[takers[0]], first.there)
        memory = fixed.counts(self.gathers.memory)
        for stage, gathers in self.gathered.items():
            amount = round(float(memory[stage]))
            for gather in gathers.values():
                if gather.rank == rank and amount:
                    until = self.until[gather]
                    self._hold_until(gather, until, amount, gather.there)
        room = int(np.floor(float(fixed.counts(limit)) + 1e-6))
        self.model.add_cumulative(
            [interval for interval, _ in self.intervals],
            [amount for _, amount in self.intervals],
            room,
        )

    def _interval(
        self, taker: Item, user: Item, amount: int, there: cp_model.LiteralT
    ) -> None:
        """Hold an amount from the start of an op to the end of another one."""
        self._hold_until(taker, user.end, amount, there)

    def _hold_until(
        self,
        taker: Item,
        until: cp_model.LinearExprT,
        amount: int,
        there: cp_model.LiteralT,
    ) -> None:
        """Hold an amount from the start of an op until some time."""
        long = self.model.new_int_var(0, self.horizon, "")
        interval = self.model.new_optional_interval_var(
            taker.start, long, until, there, ""
        )
        self.intervals.append((interval, amount))

    def _pass(self, taker: Item, amount: int, there: cp_model.LiteralT) -> None:
        """Hold an amount for a moment when an op starts."""
        moment = self.model.new_optional_fixed_size_interval_var(
            taker.start, min(taker.time, 1), there, ""
        )
        self.intervals.append((moment, amount))

    def _minimise(self, known: Answer) -> None:
        """Minimise the objective, below that of the known answer; then the number of evictions and
        gathers.
        """
        high = self.horizon if known.value == inf else self.units(known.value) - 1
        low = min(int(known.bound * self.fixed.scale + 1e-6), high)
        self.value = self.model.new_int_var(max(low, 0), max(high, 0), "value")
        for items in self.of_rank:
            own = [item for item in items if item.node is not None]
            begin = self.model.new_constant(0)
            if self.graph.schedule.objective == "span":
                begin = self.model.new_int_var(0, self.horizon, "")
                self.model.add_min_equality(begin, [item.start for item in own])
            for item in own:
                self.model.add(item.end - begin <= self.value)
        if self.graph.schedule.objective == "makespan":
            for reduction in self.sums.values():
                self.model.add(reduction.end <= self.value)
        self._break_symmetry()
        # The weight of the objective exceeds all evictions and gathers together.
        gathers = list(self.until)
        self.weight = len(self.uses) + len(gathers) + 1
        evicted = len(self.uses) - sum(self.stays.values())
        gathered = sum(gather.there for gather in gathers)
        self.model.minimize(self.weight * self.value + evicted + gathered)

    def _break_symmetry(self) -> None:
        """Let microbatches that are alike enter their pipeline in order."""
        schedule = self.graph.schedule
        layout = schedule.layout
        ops: dict[tuple[int, int], set[tuple[int, int]]] = {}
        first: dict[tuple[int, int], Item] = {}
        for item in self.items[: len(self.graph)]:
            kind, stage, microbatch = item.op
            pipeline = layout.pipeline_of[stage].start
            ops.setdefault((pipeline, microbatch), set()).add((kind, stage))
            if kind == Kind.F and stage == pipeline:
                first[pipeline, microbatch] = item
        if schedule.costs.differ_by_microbatch or layout.slices > 1:
            return
        for one, other in pairwise(sorted(first)):
            if one[0] == other[0] and ops[one] == ops[other]:
                self.model.add_bool_and([self.before[first[one], first[other]]])

    def _hint(self, known: Answer) -> None:
        """Let the solver begin from the known answer."""
        schedule = known.schedule or (
            self.graph.reordered(known.orders) if known.orders else None
        )
        execution = schedule and ideal_execution(schedule)
        if not schedule or not execution:
            return
        place, start = self._known(schedule, execution.timeline)
        for first, *_ in self.added.values():
            self.model.add_hint(first.there, first in place)
        for gather in self.until:
            self.model.add_hint(gather.there, gather in place)
        for item, time in start.items():
            self.model.add_hint(item.start, time)
        for one, other in self.before:
            literal = self.before[one, other]
            known_places = one in place and other in place
            if known_places and isinstance(literal, cp_model.IntVar):
                self.model.add_hint(literal, place[one] < place[other])

    def _known(
        self, schedule: Schedule, timeline: Timeline
    ) -> tuple[dict[Item, int], dict[Item, int]]:
        """The place in its rank's order, and the start, of each op that a schedule has."""
        item_of = {item.op: item for item in self.items if item not in self.until}
        place: dict[Item, int] = {}
        start: dict[Item, int] = {}
        for rank, actions in enumerate(schedule.ranks):
            starts: dict[Op, list[int]] = {}
            for bar in (*timeline.ranks[rank], *(timeline.copies or [()])[rank]):
                op = bar.kind, bar.stage, bar.microbatch
                starts.setdefault(op, []).append(self.units(bar.start))
            # The last gather of each stage: its place and its start.
            gathers: dict[int, tuple[int, int]] = {}
            for index, op in enumerate(actions.each()):
                begin = starts[op].pop(0)
                if op[0] == GATHER:
                    gathers[op[1]] = index, begin
                elif op in item_of:
                    item = item_of[op]
                    place[item], start[item] = index, begin
                    for stage in self.gathers.uses(item.key):
                        if stage in gathers:
                            gather = self.gathered[stage][item]
                            place[gather], start[gather] = gathers.pop(stage)
        return place, start

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """The schedule that was found."""
        ranks: list[list[int | Op]] = []
        for items in self.of_rank:
            there = [item for item in items if solver.boolean_value(item.there)]
            turn = {
                item: sum(
                    solver.boolean_value(self.before[other, item])
                    for other in there
                    if other is not item
                )
                for item in there
            }
            there.sort(key=turn.__getitem__)
            ranks.append(self.gathers.released([item.key for item in there]))
        return schedule_of(self.problem, ranks)
