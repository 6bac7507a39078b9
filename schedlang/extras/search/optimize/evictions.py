"""Which activations are evicted from their rank's memory between forward and backward, by a copy to
the host or to be recomputed, and when the weights of sharded stages are gathered: a search that
executes every candidate.

It begins with orders of ops that need more memory than there is. Where a rank exceeds its limit,
the weights, or else the activation, that are used last are evicted (Belady 1966, A study of
replacement algorithms for a virtual-storage computer). Then it tries small changes, and keeps those
that gain.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import inf
from random import Random
from time import monotonic

import numpy as np
from attrs import define, evolve, field, frozen

from schedlang.extras.search.optimize.gathers import LEAD, Gathers, Item, Need
from schedlang.extras.search.optimize.problem import Answer, Problem, Way
from schedlang.passes.op_graph import ROUNDING, Op, Orders
from schedlang.proof.execution import Execution
from schedlang.proof.memory import Level, levels
from schedlang.proof.prove import ideal_execution
from schedlang.schedule.actions import Actions
from schedlang.schedule.costs.cost_tables import Amounts
from schedlang.schedule.kinds import GATHER, MAKERS, Kind
from schedlang.schedule.schedule import Schedule

#: The most executions until an order fits into memory, for each activation and each use of weights.
_ROUNDS = 3
#: The share of the time after which evictions that are not needed are dropped.
_UNTIL_DROPPED = 0.9
#: The shares of the changes that swap two ops, evict another activation, keep one in memory, and
#: move the op that takes one away. The others move the op that brings one back.
_SWAPS, _EVICTIONS, _RETURNS, _MOVES = 0.3, 0.2, 0.1, 0.15
#: The share of the changes that are of gathers, where there are any; and of these, the shares that
#: move an op and gather anew, and that drop or add a gather. The others move a gather.
_GATHERS, _TAKEN_ALONG, _GATHERED_ANEW = 0.6, 0.4, 0.3
#: The most places by which an op moves, if its rank then gathers anew.
_FARTHEST = 6
#: The most candidates that are changed by turns.
_MOST_KEPT = 8
#: The highest lead of a gather that is added.
_MOST_LEAD = 3

#: The stage and the microbatch of an activation.
Unit = tuple[int, int]


@frozen
class Use:
    """The node that makes an activation, and the first node that uses it for the backward."""

    forward: int
    backward: int


@frozen
class Eviction:
    """How an activation is evicted: the way, and the places in its rank's order before which the
    op that takes it away (`out`), if there is one, and the op that brings it `back` stand.
    """

    way: Way
    out: int
    back: int


@frozen(eq=False)
class Candidate:
    """Orders of the nodes, the evictions, and the leads of gathers (see `Gathers`)."""

    orders: Orders
    evictions: dict[Unit, Eviction]
    leads: Mapping[Need, int] = field(factory=dict)


@frozen(eq=False)
class Outcome:
    """A candidate as a schedule, and its execution; `over` is by how much ranks exceed their limits
    together, and `value` the objective.
    """

    candidate: Candidate
    schedule: Schedule
    execution: Execution | None
    held: list[Level]
    over: float
    value: float

    @property
    def key(self) -> tuple[float, float, int]:
        """What is minimised: first memory, then time, then the number of evictions and gathers."""
        gathers = len(self.schedule.columns.where(GATHER))
        return self.over, self.value, len(self.candidate.evictions) + gathers


def uses_of(problem: Problem) -> dict[Unit, Use]:
    """The activations that may be evicted, in the order of the graph: those that a backward needs,
    and that the graph does not recompute.
    """
    graph = problem.graph
    node_of = {op: node for node, ops in enumerate(graph.ops) for op in ops}
    keepers = graph.schedule.layout.keepers
    uses = {}
    for (kind, *unit), node in node_of.items():
        stage, microbatch = unit
        is_kept = keepers and keepers[graph.rank[node]] == graph.rank[node]
        is_dropped = (stage, microbatch) in graph.schedule.recomputed
        if kind != Kind.F or is_kept or is_dropped:
            continue
        for backward in MAKERS[Kind.B]:
            use = node_of.get((int(backward), stage, microbatch))
            if use is not None:
                uses[stage, microbatch] = Use(node, use)
    return uses


def times_of(problem: Problem, uses: Iterable[Unit]) -> dict[Op, float]:
    """How long each op takes by which one of these activations may be evicted."""
    schedule = problem.graph.schedule
    durations = schedule.costs.durations(schedule.layout)
    units = list(uses)
    stage, microbatch = np.array(units, np.int64).reshape(-1, 2).T
    times: dict[Op, float] = {}
    for way in problem.ways:
        for kind in way.kinds:
            taken = durations.of(np.full(len(units), int(kind)), stage, microbatch)
            for unit, time in zip(units, taken.tolist(), strict=True):
                times[int(kind), *unit] = time
    return times


def schedule_of(problem: Problem, ranks: Iterable[Iterable[Item]]) -> Schedule:
    """The schedule whose ranks run these nodes of the problem's graph, and ops beside them."""
    graph = problem.graph
    items = [list(order) for order in ranks]
    given = graph.reordered(
        [[item for item in order if isinstance(item, int)] for order in items]
    )
    changed = []
    for order, actions in zip(items, given.ranks, strict=True):
        row = 0
        merged = Actions()
        for item in order:
            if not isinstance(item, int):
                # Its place in the program is that of the schedule's name.
                merged.add(*item, 0)
                continue
            for _ in graph.ops[item]:
                merged.add(*actions.row(row))
                row += 1
        changed.append(merged)
    return evolve(given, ranks=tuple(changed))


def gathers_of(problem: Problem, uses: Mapping[Unit, Use]) -> Gathers:
    """The gathers and sums of a problem in which these activations may be evicted."""
    return Gathers(problem, {unit: use.backward for unit, use in uses.items()})


def places_of(orders: Orders) -> dict[int, int]:
    """The place of each node in the order of its rank."""
    return {node: place for order in orders for place, node in enumerate(order)}


@define
class Search:
    """The search, until a deadline. `uses` are the activations that may be evicted, `units` those
    of each rank, and `times` the times of the ops that evict them.
    """

    problem: Problem
    random: Random
    deadline: float = inf
    uses: dict[Unit, Use] = field(init=False)
    units: list[list[Unit]] = field(init=False)
    times: dict[Op, float] = field(init=False)
    amounts: Amounts = field(init=False)
    gathers: Gathers = field(init=False)

    def __attrs_post_init__(self) -> None:
        graph = self.problem.graph
        self.uses = uses_of(self.problem)
        self.units = [[] for _ in graph.order]
        for unit, use in self.uses.items():
            self.units[graph.rank[use.forward]].append(unit)
        self.times = times_of(self.problem, self.uses)
        self.amounts = graph.schedule.costs.memory(graph.schedule.layout)
        self.gathers = gathers_of(self.problem, self.uses)

    def execute(self, candidate: Candidate) -> Outcome:
        """Execute a candidate."""
        schedule = schedule_of(self.problem, self._items(candidate))
        execution = ideal_execution(schedule)
        if execution is None:
            return Outcome(candidate, schedule, None, [], inf, inf)
        held = levels(schedule, execution.timeline, self.amounts)
        over = sum(
            max(level.peak - limit - ROUNDING, 0.0)
            for level, limit in zip(held, self.problem.limits, strict=True)
        )
        value = float(getattr(execution.timeline, schedule.objective))
        return Outcome(candidate, schedule, execution, held, over, value)

    def _items(self, candidate: Candidate) -> Iterator[list[Item]]:
        """The order of each rank, with the ops of the evictions at their places."""
        place = places_of(candidate.orders)
        for units, order in zip(self.units, candidate.orders, strict=True):
            # The ops before each place: first those that free memory, in the order of forwards,
            # then those that allocate it, in the order of backwards.
            at: dict[int, list[tuple[bool, int, Op]]] = {}
            for unit in units:
                eviction = candidate.evictions.get(unit)
                if eviction is None:
                    continue
                use = self.uses[unit]
                if eviction.way.away is not None:
                    op = (int(eviction.way.away), *unit)
                    turn = (False, place[use.forward], op)
                    at.setdefault(eviction.out, []).append(turn)
                op = (int(eviction.way.back), *unit)
                turn = (True, place[use.backward], op)
                at.setdefault(eviction.back, []).append(turn)
            items: list[Item] = []
            for index, node in enumerate(order):
                items += [op for _, _, op in sorted(at.get(index, ()))]
                items.append(node)
            yield self.gathers.placed(items, candidate.leads)

    def candidate_of(self, schedule: Schedule) -> Candidate:
        """The orders, the evictions and the leads of a schedule."""
        graph = self.problem.graph
        node_of = {op: node for node, ops in enumerate(graph.ops) for op in ops}
        orders = []
        evictions = {}
        leads: dict[Need, int] = {}
        for actions in schedule.ranks:
            # The nodes so far, in order.
            ran: dict[int, None] = {}
            out: dict[Unit, int] = {}
            items: list[Item] = []
            for kind, stage, microbatch in actions.each():
                unit = stage, microbatch
                node = node_of.get((kind, stage, microbatch))
                if node is None:
                    items.append((kind, stage, microbatch))
                elif node not in ran:
                    items.append(node)
                    ran[node] = None
                for way in self.problem.ways:
                    if kind == way.away:
                        out[unit] = len(ran)
                    if kind == way.back and unit in self.uses:
                        place = out.get(unit, len(ran))
                        evictions[unit] = Eviction(way, place, len(ran))
            orders.append(list(ran))
            leads |= self.gathers.leads_of(items)
        return Candidate(orders, evictions, leads)

    def fitted(self, orders: Orders, ways: Sequence[Way]) -> Outcome:
        """Evict weights and activations until the orders fit into memory, or no eviction helps. The
        first way that is in time is taken.
        """
        outcome = self.execute(Candidate(orders, {}))
        for _ in range(_ROUNDS * (len(self.uses) + len(self.gathers.needs))):
            is_late = monotonic() >= self.deadline
            if not outcome.over or outcome.execution is None or is_late:
                break
            starts, ends = self._starts_and_ends(outcome)
            evictions = dict(outcome.candidate.evictions)
            leads = dict(outcome.candidate.leads)
            for rank, level in enumerate(outcome.held):
                exceeds = level.amounts > self.problem.limits[rank] + ROUNDING
                if exceeds.any():
                    time = float(level.times[exceeds.argmax()])
                    if self._frees(orders[rank], time, leads, starts, ends):
                        continue
                    stays = [unit for unit in self.units[rank] if unit not in evictions]
                    stays.sort(key=lambda unit: starts[self.uses[unit].backward])
                    found = self._eviction(stays[::-1], time, ways, starts, ends)
                    if found is not None:
                        unit, way = found
                        evictions[unit] = self._early(orders, unit, way)
            if (
                len(evictions) == len(outcome.candidate.evictions)
                and leads == outcome.candidate.leads
            ):
                break
            timely = self._timely(orders, evictions, starts, ends)
            outcome = self.execute(Candidate(orders, timely, leads))
        return outcome

    def _frees(
        self,
        order: Sequence[int],
        time: float,
        leads: dict[Need, int],
        starts: dict[int, float],
        ends: dict[int, float],
    ) -> bool:
        """Let go of the gathered weights that a rank holds at a time and uses last, and gather them
        again in time; or else let a gather begin an op later. Return whether either was possible.
        """
        gaps: list[tuple[float, Need]] = []
        early: list[tuple[float, Need]] = []
        last: dict[int, int] = {}
        for place, node in enumerate(order):
            for stage in self.gathers.used[node]:
                need = node, stage
                lead = leads.get(need, LEAD)
                # The op at whose end the gather begins, unless it is the first one.
                front = order[place - lead - 1] if place > lead else None
                if starts[node] > time:
                    is_new = stage not in last or need in leads
                    if not is_new and ends[last[stage]] <= time + ROUNDING:
                        gaps.append((starts[node], need))
                    elif is_new and lead and (front is None or ends[front] <= time):
                        early.append((starts[node], need))
                last[stage] = node
        if gaps:
            _, (node, stage) = max(gaps)
            begin = starts[node] - self.gathers.times[stage]
            between = [each for each in order if begin < ends[each] <= starts[node]]
            leads[node, stage] = len(between)
        elif early:
            _, need = min(early)
            leads[need] = leads.get(need, LEAD) - 1
        return bool(gaps or early)

    def _eviction(
        self,
        units: Iterable[Unit],
        time: float,
        ways: Sequence[Way],
        starts: dict[int, float],
        ends: dict[int, float],
    ) -> tuple[Unit, Way] | None:
        """The first of these activations that can be evicted at a time, and the first way that has
        ended by then.
        """
        for way in ways:
            for unit in units:
                use = self.uses[unit]
                away = ends[use.forward]
                if way.away is not None:
                    away += self.times[int(way.away), *unit]
                if away <= time + ROUNDING and time < starts[use.backward]:
                    return unit, way
        return None

    def _early(self, orders: Orders, unit: Unit, way: Way) -> Eviction:
        """An eviction right after the forward, whose end is right before the backward."""
        place = places_of(orders)
        use = self.uses[unit]
        return Eviction(way, place[use.forward] + 1, place[use.backward])

    def _starts_and_ends(
        self, outcome: Outcome
    ) -> tuple[dict[int, float], dict[int, float]]:
        """When each node of the graph starts and ends."""
        assert outcome.execution is not None
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        timeline = outcome.execution.timeline
        for bars, order in zip(timeline.ranks, outcome.candidate.orders, strict=True):
            bar_of = {(bar.kind, bar.stage, bar.microbatch): bar for bar in bars}
            for node in order:
                own = [bar_of[op] for op in self.problem.graph.ops[node]]
                starts[node] = min(bar.start for bar in own)
                ends[node] = max(bar.end for bar in own)
        return starts, ends

    def _timely(
        self,
        orders: Orders,
        evictions: dict[Unit, Eviction],
        starts: dict[int, float],
        ends: dict[int, float],
    ) -> dict[Unit, Eviction]:
        """The same evictions, in which each copy back begins as late as it is in time."""
        place = places_of(orders)
        timely = dict(evictions)
        for units, order in zip(self.units, orders, strict=True):
            # From the last backward to the first: a copy back ends before the next one begins.
            latest = inf
            copied = [
                unit
                for unit in units
                if unit in evictions and evictions[unit].way.away is not None
            ]
            copied.sort(key=lambda unit: starts[self.uses[unit].backward])
            for unit in reversed(copied):
                eviction = evictions[unit]
                use = self.uses[unit]
                latest = min(latest, starts[use.backward])
                latest -= self.times[int(eviction.way.back), *unit]
                back = place[use.backward]
                while back > eviction.out and ends[order[back - 1]] > latest + ROUNDING:
                    back -= 1
                timely[unit] = evolve(eviction, back=back)
        return timely

    def changed(self, candidate: Candidate) -> Candidate:
        """The candidate with a change that is drawn: two ops swapped, an eviction more or less, or
        an op of an eviction at another place.
        """
        random = self.random
        if self.gathers.needs and random.random() < _GATHERS:
            return self._gathered(candidate)
        what = random.random()
        if what < _SWAPS or not (self.problem.ways and self.uses):
            return self._swapped(candidate)
        place = places_of(candidate.orders)
        evictions = dict(candidate.evictions)
        is_new = what < _SWAPS + _EVICTIONS or not evictions
        unit = random.choice(list(self.uses if is_new else evictions))
        use = self.uses[unit]
        first = place[use.forward] + 1
        last = place[use.backward]
        if is_new:
            way = random.choice(self.problem.ways)
            evictions[unit] = Eviction(
                way, first, random.randint(min(first, last), last)
            )
        elif what < _SWAPS + _EVICTIONS + _RETURNS:
            del evictions[unit]
        else:
            moves_out = what < _SWAPS + _EVICTIONS + _RETURNS + _MOVES
            which = "out" if moves_out else "back"
            moved = getattr(evictions[unit], which) + random.choice((-2, -1, 1, 2))
            at = min(max(moved, first), last)
            evictions[unit] = evolve(evictions[unit], **{which: at})
        return Candidate(candidate.orders, evictions, candidate.leads)

    def _gathered(self, candidate: Candidate) -> Candidate:
        """The candidate with a gather more or less, or one that begins sooner or later."""
        random = self.random
        leads = dict(candidate.leads)
        what = random.random()
        if what < _TAKEN_ALONG:
            return self._taken_along(candidate)
        if what < _TAKEN_ALONG + _GATHERED_ANEW:
            need = random.choice(self.gathers.needs)
            if leads.pop(need, None) is None:
                leads[need] = random.randint(0, _MOST_LEAD)
        else:
            need = random.choice(list(leads or self.gathers.needs))
            moved = leads.get(need, LEAD) + random.choice((-2, -1, 1, 2))
            leads[need] = max(moved, 0)
        return Candidate(candidate.orders, candidate.evictions, leads)

    def _taken_along(self, candidate: Candidate) -> Candidate:
        """The candidate with an op at another place, where its rank gathers as `gather within` some
        places has it.
        """
        random = self.random
        orders = list(candidate.orders)
        rank = random.randrange(len(orders))
        order = list(orders[rank])
        node = order.pop(random.randrange(len(order)))
        index = candidate.orders[rank].index(node) + random.randint(
            -_FARTHEST, _FARTHEST
        )
        order.insert(max(index, 0), node)
        orders[rank] = order
        places = random.randint(1, self.gathers.most)
        own = set(order)
        leads = {
            need: lead for need, lead in candidate.leads.items() if need[0] not in own
        }
        leads |= self.gathers.leads_within(order, places)
        return Candidate(orders, candidate.evictions, leads)

    def _swapped(self, candidate: Candidate) -> Candidate:
        """The candidate with two neighbours of an order swapped."""
        orders = list(candidate.orders)
        rank = self.random.randrange(len(orders))
        order = list(orders[rank])
        if len(order) > 1:
            index = self.random.randrange(len(order) - 1)
            order[index : index + 2] = order[index + 1], order[index]
        orders[rank] = order
        return Candidate(orders, candidate.evictions, candidate.leads)

    def without_needless(self, outcome: Outcome) -> Outcome:
        """The outcome without evictions and gathers that gain nothing."""
        for unit in outcome.candidate.evictions:
            fewer = dict(outcome.candidate.evictions)
            del fewer[unit]
            outcome = self._better(outcome, evolve(outcome.candidate, evictions=fewer))
        for need in outcome.candidate.leads:
            others = dict(outcome.candidate.leads)
            del others[need]
            outcome = self._better(outcome, evolve(outcome.candidate, leads=others))
        return outcome

    def _better(self, outcome: Outcome, candidate: Candidate) -> Outcome:
        """The better one of an outcome and that of a candidate, if there is time for it."""
        if monotonic() >= self.deadline:
            return outcome
        other = self.execute(candidate)
        return other if other.key < outcome.key else outcome


def evicting(
    problem: Problem, known: Answer, seconds: float, orders: Sequence[Orders], seed: int
) -> Iterator[Answer]:
    """See `Solver`. It begins with the given orders, which may exceed the memory, and with what is
    known. It proves no bound.
    """
    begin = monotonic()
    search = Search(problem, Random(seed), begin + seconds)
    best: Outcome | None = None
    schedules = [each for each in (problem.given, known.schedule) if each is not None]
    for outcome in _outcomes(search, orders, schedules):
        if not outcome.over and outcome.value < known.value:
            best = outcome
            known = _answer(known, outcome)
            yield known
        if known.is_best or monotonic() >= begin + seconds * _UNTIL_DROPPED:
            break
    if best is not None:
        yield _answer(known, search.without_needless(best))


def _outcomes(
    search: Search, orders: Sequence[Orders], schedules: Sequence[Schedule]
) -> Iterator[Outcome]:
    """Outcomes from each of the orders, then endlessly by changes of the best of these and of some
    schedules.
    """
    if not (search.uses or search.gathers.needs):
        return
    ways = search.problem.ways
    outcomes = [search.execute(search.candidate_of(each)) for each in schedules]
    # These take an execution each, and fitted orders take many.
    for each, places in product(orders, range(1, search.gathers.most + 1)):
        leads: dict[Need, int] = {}
        for order in each:
            leads |= search.gathers.leads_within(order, places)
        outcomes.append(search.execute(Candidate(each, {}, leads)))
        yield outcomes[-1]
    for each in orders:
        for turned in dict.fromkeys((ways, ways[::-1])):
            outcomes.append(search.fitted(each, turned))
            yield outcomes[-1]
    outcomes.sort(key=lambda outcome: outcome.key)
    kept = outcomes[: min(max(len(outcomes) // 3, 1), _MOST_KEPT)]
    while True:
        number = search.random.randrange(len(kept))
        outcome = search.execute(search.changed(kept[number].candidate))
        if outcome.key <= kept[number].key:
            kept[number] = outcome
        yield outcome


def _answer(known: Answer, outcome: Outcome) -> Answer:
    """An outcome as an answer."""
    return Answer(
        outcome.candidate.orders,
        outcome.value,
        min(known.bound, outcome.value),
        "evictions",
        outcome.schedule,
    )
