"""Put weight gradients where they cost least: they are what a rank can do while it waits."""

from collections.abc import Sequence
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
    pairs = [_fill_drawn(*each) for each in zip(schedule.ranks, schedule.slots, strict=True)]
    return evolve(
        schedule,
        ranks=tuple(actions for actions, _ in pairs),
        slots=tuple(slots for _, slots in pairs),
    )


def _fill_drawn(actions: Actions, slots: Sequence[int]) -> tuple[Actions, tuple[int, ...]]:
    """One rank's actions and slots with its weight gradients in free slots."""
    rows = [
        (slot, actions.row(index))
        for index, slot in enumerate(slots)
        if actions.kind[index] != Kind.W
    ]
    filled = fill_slots(
        (slot, OPS[row[0]].slots, row, [(Kind.W, *row[1:4], 0)] if row[0] == Kind.I else [])
        for slot, row in rows
    )
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
    found = list(filter(None, [_as_given(graph, limit)]))
    tried = [
        each
        for bare in _choices(graph, limit)
        for rules in _FIRST
        if (each := trials.run(bare, rules))
    ]
    for best in _best_of_two_orders(tried):
        rules = [
            Rules(share, even, best.rules.skips) for share in _SHARES for even in (False, True)
        ]
        tried += [each for rule in rules if (each := trials.run(best.bare, rule))]
    tried += [
        each for one in tried if one.rules.even and (each := trials.run(one.bare, one.spared()))
    ]
    found += tried
    return graph.reordered(min(found, key=lambda each: each.value).orders) if found else None


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
class _Found:
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
        return evolve(self.rules, spare=tuple(max(self.waited) - each for each in self.waited))


def _best_of_two_orders(tried: list[_Found]) -> list[_Found]:
    """The best one, and the best one with other orders of forwards and backwards."""
    best = sorted(tried, key=lambda each: each.value)
    return best[:1] + [each for each in best if each.bare is not best[0].bare][:1]


@frozen
class _Run:
    """A run by rules. Any other share above `share_below` and up to `share_above` gives the same
    execution.
    """

    bare: Orders
    rules: Rules
    share_below: float
    share_above: float
    found: _Found | None

    def is_like(self, bare: Orders, rules: Rules) -> bool:
        """Whether a run with some orders and rules gives the same execution."""
        is_share_alike = self.share_below < rules.share <= self.share_above
        return (
            is_share_alike and evolve(self.rules, share=rules.share) == rules and self.bare == bare
        )


@define
class _Trials:
    """Runs by rules. What is known to give the same execution as an earlier one is not run again:
    longer warm-ups are often none, and most waits are worth any share of a weight gradient.
    """

    graph: Graph
    limit: float
    runs: list[_Run] = field(factory=list)

    def run(self, bare: Orders, rules: Rules) -> _Found | None:
        """The execution with some orders, filled by some rules, if it comes to its end."""
        for earlier in self.runs:
            if earlier.is_like(bare, rules):
                return earlier.found and evolve(earlier.found, bare=bare, rules=rules)
        run = Greedy(self.graph, bare, self.limit, rules)
        found = None
        if run.run():
            value = _value(self.graph, run.orders, run.ends)
            found = _Found(value, run.orders, bare, rules, tuple(run.waited))
        self.runs.append(_Run(bare, rules, run.share_below, run.share_above, found))
        return found


def _as_given(graph: Graph, limit: float) -> _Found | None:
    if max(map(graph.peak, graph.order)) > limit + ROUNDING:
        return None
    return _Found(
        _value(graph, graph.order, graph.ends(graph.order)), graph.order, graph.order, Rules()
    )


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
        there = {row[1:3] for row in rows if row[0] == Kind.W}
        ranks.append(Actions())
        for row in [
            *rows,
            *((Kind.W, *row[1:4]) for row in rows if row[0] == Kind.I and row[1:3] not in there),
        ]:
            ranks[-1].add(*row)
    return evolve(schedule, ranks=tuple(ranks))
