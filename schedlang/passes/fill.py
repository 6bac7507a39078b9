"""Put weight gradients where they cost least: they are what a rank can do while it waits."""

from collections.abc import Iterable, Sequence
from itertools import product
from math import inf

from attrs import define, evolve, field, frozen

from schedlang.lowering import lower
from schedlang.passes.graph import ROUNDING, Graph, Orders
from schedlang.passes.greedy import Greedy, Rules
from schedlang.passes.slots import fill_slots
from schedlang.passes.squeeze import squeeze
from schedlang.passes.warmup import longer_warmups
from schedlang.proof.prove import ideal_execution, prove
from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.schedule import Schedule

_FIRST = (Rules(), Rules(skips=True))
_SHARES = (0.5, 0.75, 1.0)


def fill_weights(schedule: Schedule) -> Schedule:
    """The schedule with a `W` for every input gradient; a `W` that it has already gives up its
    place.

    In a schedule drawn at slots, the oldest one owed comes in each free slot of its rank, and the
    rest at the end.
    """
    if schedule.slots is None:
        filled = fill_within(schedule, inf)
        assert filled is not None
        return filled
    ranks, slots = zip(*map(_fill_drawn, schedule.ranks, schedule.slots), strict=True)
    return evolve(schedule, ranks=ranks, slots=slots)


def _fill_drawn(actions: Actions, slots: Sequence[int]) -> tuple[Actions, tuple[int, ...]]:
    """One rank's actions and slots with its weight gradients in free slots."""
    placed = []
    for slot, row in zip(slots, map(actions.row, range(len(actions))), strict=True):
        kind = row[0]
        if kind != Kind.W:
            owed = [(int(Kind.W), *row[1:4], 0)] if kind == Kind.I else []
            placed.append((slot, OPS[kind].slots, row, owed))
    filled = fill_slots(placed)
    changed = Actions()
    for _, row in filled:
        changed.add(*row)
    return changed, tuple(slot for slot, _ in filled)


def fill_within(schedule: Schedule, limit: float) -> Schedule | None:
    """The best schedule found in which no rank holds more than `limit`; None if none is found.

    Where there is a limit, ranks may do forwards earlier. Rules are tried in rounds, because a run
    at 32 ranks and 256 microbatches takes a tenth of a second: which order to follow, then which
    waits to fill, then which ranks may wait.
    """
    schedule = squeeze(_complete(schedule))
    if _is_best(schedule, limit):
        return schedule
    # What cannot run at all is refused before orders are tried.
    prove(lower(schedule))
    graph = Graph(schedule)
    trials = _Trials(graph, limit)
    tried = trials.run_all(product(_choices(graph, limit), _FIRST))
    for best in _best_of_two_orders(tried):
        pairs = product(_SHARES, (False, True))
        rules = [Rules(share, even, best.rules.skips) for share, even in pairs]
        tried += trials.run_all((best.bare, rule) for rule in rules)
    evened = [filling for filling in tried if filling.rules.even]
    tried += trials.run_all((filling.bare, filling.spared()) for filling in evened)
    # Of equals the first: the order as it was.
    fillings = [*_as_given(graph, limit), *tried]
    if not fillings:
        return None
    return graph.reordered(min(fillings, key=lambda filling: filling.value).orders)


def _is_best(schedule: Schedule, limit: float) -> bool:
    """Whether a schedule runs within a limit without idle time to fill: then it stays as it was
    written.
    """
    execution = ideal_execution(schedule)
    if execution is None:
        return False
    least = max(execution.timeline.busy)
    is_full = getattr(execution.timeline, schedule.objective) <= least + ROUNDING
    return is_full and limit < inf and max(execution.peak_memory) <= limit + ROUNDING


@frozen
class _Filling:
    """An execution within the limit: its orders, and the orders without weight gradients and the
    rules it is from.
    """

    value: tuple[float, ...]
    orders: Orders
    bare: Orders
    rules: Rules
    waited: tuple[float, ...] = ()

    def spared(self) -> Rules:
        """The rules with what each rank could have waited more without waiting longest."""
        longest = max(self.waited)
        return evolve(self.rules, spare=tuple(longest - waited for waited in self.waited))


def _best_of_two_orders(tried: list[_Filling]) -> list[_Filling]:
    """The best one, and the best one with other orders of forwards and backwards."""
    by_value = sorted(tried, key=lambda filling: filling.value)
    others = [filling for filling in by_value if filling.bare is not by_value[0].bare]
    return by_value[:1] + others[:1]


@frozen
class _Run:
    """A run by rules. Any other share above `share_below` and up to `share_above` gives the same
    execution.
    """

    bare: Orders
    rules: Rules
    share_below: float
    share_above: float
    filling: _Filling | None

    def is_like(self, bare: Orders, rules: Rules) -> bool:
        """Whether a run with some orders and rules gives the same execution."""
        is_share_alike = self.share_below < rules.share <= self.share_above
        are_others_alike = evolve(self.rules, share=rules.share) == rules
        return is_share_alike and are_others_alike and self.bare == bare


@define
class _Trials:
    """Runs by rules. What is known to give the same execution as an earlier one is not run again:
    longer warm-ups are often none, and most waits are worth any share of a weight gradient.
    """

    graph: Graph
    limit: float
    runs: list[_Run] = field(factory=list)

    def run_all(self, choices: Iterable[tuple[Orders, Rules]]) -> list[_Filling]:
        """The executions with some orders and rules that come to their ends."""
        fillings = [self.run(bare, rules) for bare, rules in choices]
        return [filling for filling in fillings if filling is not None]

    def run(self, bare: Orders, rules: Rules) -> _Filling | None:
        """The execution with some orders, filled by some rules, if it comes to its end."""
        for earlier in self.runs:
            if earlier.is_like(bare, rules):
                return earlier.filling and evolve(earlier.filling, bare=bare, rules=rules)
        run = Greedy(self.graph, bare, self.limit, rules)
        filling = None
        if run.run():
            value = _value(self.graph, run.orders, run.ends)
            filling = _Filling(value, run.orders, bare, rules, tuple(run.waited))
        self.runs.append(_Run(bare, rules, run.share_below, run.share_above, filling))
        return filling


def _as_given(graph: Graph, limit: float) -> list[_Filling]:
    """The order as it was, if it holds no more than the limit."""
    order = graph.order
    if max(map(graph.peak, order)) > limit + ROUNDING:
        return []
    return [_Filling(_value(graph, order, graph.ends(order)), order, order, Rules())]


def _value(graph: Graph, orders: Orders, ends: list[float]) -> tuple[float, ...]:
    """What is minimised: the objective; of equals the last end, then memory, all ranks together."""
    return graph.objective(orders, ends), max(ends, default=0.0), sum(map(graph.peak, orders))


def _choices(graph: Graph, limit: float) -> list[Orders]:
    """The schedule's forwards and backwards, and where there is a limit, with longer warm-
    ups too.
    """
    given = graph.without_weights()
    return [given] if limit == inf else [given, *longer_warmups(graph, given, limit)]


def _complete(schedule: Schedule) -> Schedule:
    """The schedule with the weight gradients that it lacks at the end of each rank."""
    ranks = list[Actions]()
    for actions in schedule.ranks:
        if actions.kind.count(Kind.I) == actions.kind.count(Kind.W):
            ranks.append(actions)
            continue
        rows = list(map(actions.row, range(len(actions))))
        there = {(stage, microbatch) for kind, stage, microbatch, *_ in rows if kind == Kind.W}
        completed = Actions()
        for row in rows:
            completed.add(*row)
        for kind, stage, microbatch, place, _ in rows:
            if kind == Kind.I and (stage, microbatch) not in there:
                completed.add(Kind.W, stage, microbatch, place)
        ranks.append(completed)
    return evolve(schedule, ranks=tuple(ranks))
