"""Put weight gradients into bubbles: a rank can compute them while it waits for other ranks."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import inf

import numpy as np
from attrs import define, evolve, field, frozen

from schedlang.passes.best_order import best_order
from schedlang.passes.filling import Greedy, Rules
from schedlang.passes.op_graph import ROUNDING, Graph, Orders
from schedlang.passes.slots import fill_slots
from schedlang.passes.squeeze import squeeze
from schedlang.passes.warmup import longer_warmups
from schedlang.schedule.actions import Actions
from schedlang.schedule.arrays import Flags, Ints, is_any
from schedlang.schedule.columns import SLOTS, actions_from, table_of
from schedlang.schedule.kinds import INPUT_HALVES, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule

#: Rules of the first round of trials; then the shares that the second round tries.
_FIRST = (Rules(), Rules(skips=True))
_SHARES = (0.5, 0.75, 1.0)
#: An execution is given up once it takes this many times the best one so far. Other rules change
#: the result by a few percent, so they could not make this order of F and B the best.
_HOPELESS = 1.1
#: With more nodes than this, all orders and rules would take more than a second. Then only the best
#: orders of a part are filled, as many as _BEST_ORDERS says.
_MOST_NODES = 15_000
_BEST_ORDERS = 2


def fill_weights(schedule: Schedule) -> Schedule:
    """The schedule with a `W` for every input gradient; every `W` that it already had moves, too.

    In a schedule that is drawn at slots, each empty slot of a rank gets the oldest weight gradient
    that the rank owes, and the rest run at the end.
    """
    if schedule.slots is None:
        filled = fill_within(schedule, inf)
        assert filled is not None
        return filled
    pairs = zip(schedule.ranks, schedule.slots, strict=True)
    drawn = [_fill_drawn(schedule.layout, *of_rank) for of_rank in pairs]
    ranks, slots = zip(*drawn, strict=True)
    return evolve(schedule, ranks=ranks, slots=slots)


def _fill_drawn(
    layout: Layout, actions: Actions, slots: Sequence[int]
) -> tuple[Actions, tuple[int, ...]]:
    """One rank's actions and slots, with its weight gradients in the empty slots."""
    table = table_of(actions)
    stays = table[0] != Kind.W
    table = table[:, stays]
    is_owing = _owes(layout, table)
    order, filled = fill_slots(
        np.array(slots)[stays], SLOTS[table[0]], is_owing.astype(int)
    )
    both = np.concatenate([table, _weights_of(table[:, is_owing])], axis=1)
    return actions_from(both[:, order]), tuple(filled.tolist())


def _owes(layout: Layout, table: Ints) -> Flags:
    """Which actions need a weight gradient later: the input gradients of stages that train."""
    owes: Flags = is_any(table[0], *INPUT_HALVES)
    if layout.frozen:
        stages = range(len(layout.placement))
        owes &= np.array(list(map(layout.trains, stages)))[table[1]]
    return owes


def _weights_of(halves: Ints) -> Ints:
    """A table of weight gradients, one for each of these input gradients."""
    weights = halves.copy()
    weights[0] = Kind.W
    weights[4] = 0
    return weights


def fill_within(schedule: Schedule, limit: float) -> Schedule | None:
    """The best schedule found in which no rank holds more than `limit`; None if none is found.

    With a finite limit, orders with longer warm-ups are tried as well.
    """
    return best_order(squeeze(_complete(schedule)), _Fillings(), limit)


@define
class _Fillings:
    """Finds orders within a limit, for a schedule or a part of it, by the rules of `Greedy`.

    For a part, all rules are tried. If the part's order cannot be continued and the whole schedule
    is large, only the orders of forwards and backwards that were best for the last part are filled.
    """

    #: The best orders for the last part, by their index in `_choices`, each with its best rules.
    best: list[tuple[int, Rules]] = field(factory=list)

    def __call__(self, graph: Graph, limit: float, share: float) -> list[Orders]:
        """The orders that are found, the best first; the schedule's own is first among equals."""
        given = _as_given(graph, limit)
        if given and limit < inf and _is_full(graph):
            return [graph.order]
        trials = _Trials(graph, limit)
        is_known = share == 1.0 and len(graph) > _MOST_NODES and self.best
        tried = self._by_the_best(trials) if is_known else self._by_all(trials)
        fillings = sorted([*given, *tried], key=lambda filling: filling.value)
        return [filling.orders for filling in fillings]

    def _by_all(self, trials: "_Trials") -> list["_Filling"]:
        """Try all rules in three rounds, since each combination takes an execution. Stop once an
        execution ends as early as any order can.
        """
        # Each round varies one thing and takes up the best results of the round before:
        #
        #     1   orders of F and I: given, longer warm-ups   x   may a backward pass a forward?
        #     2   the best two orders                         x   which waits are worth a W
        #     3   all results with `even` rules               x   ranks that waited less may wait
        #
        # One round with every combination would need the product of all these numbers.
        orders = list[Orders]()
        tried = list[_Filling]()
        for order in _choices(trials.graph, trials.limit):
            orders.append(order)
            tried += trials.run_all((order, rules) for rules in _FIRST)
            if trials.is_over:
                break
        for best in _best_of_two_orders(tried):
            pairs = product(_SHARES, (False, True))
            rules = [Rules(share, even, best.rules.skips) for share, even in pairs]
            tried += trials.run_all((best.bare, rule) for rule in rules)
        evened = [filling for filling in tried if filling.rules.even]
        tried += trials.run_all((filling.bare, filling.spared()) for filling in evened)
        rules_of = dict[int, Rules]()
        for filling in sorted(tried, key=lambda filling: filling.value):
            number = next(n for n, order in enumerate(orders) if order is filling.bare)
            rules_of.setdefault(number, filling.rules)
        self.best = list(rules_of.items())[:_BEST_ORDERS]
        return tried

    def _by_the_best(self, trials: "_Trials") -> list["_Filling"]:
        """Try the orders that were best for the last part. The very best is tried by several rules,
        since most rules give the same result in a part, which is short.
        """
        orders = list(_choices(trials.graph, trials.limit))
        known = [(number, evolve(rules, spare=())) for number, rules in self.best]
        (first, best_rules), *others = known
        tried = trials.run_all(
            (orders[first], rules) for rules in (best_rules, *_FIRST)
        )
        if tried:
            best = min(tried, key=lambda filling: filling.value)
            rules = Rules(min(_SHARES), skips=best.rules.skips)
            tried += trials.run_all([(best.bare, rules)])
            best = min(tried, key=lambda filling: filling.value)
            tried += trials.run_all([(best.bare, best.spared())])
        tried += trials.run_all((orders[number], rules) for number, rules in others)
        return tried


def _is_full(graph: Graph) -> bool:
    """Whether no rank idles, so that there is nothing to fill."""
    busy = max(sum(graph.time[node] for node in order) for order in graph.order)
    return graph.objective(graph.order, graph.own_ends) <= busy + ROUNDING


@frozen
class _Filling:
    """An execution within the limit: its orders, and from which orders without weight gradients
    (`bare`) and by which rules they were made.
    """

    value: tuple[float, float, float]
    orders: Orders
    bare: Orders
    rules: Rules
    waited: tuple[float, ...] = ()

    def spared(self) -> Rules:
        """The rules, which now let each rank wait as long as the one that waited longest."""
        longest = max(self.waited)
        return evolve(
            self.rules, spare=tuple(longest - waited for waited in self.waited)
        )


def _best_of_two_orders(tried: list[_Filling]) -> list[_Filling]:
    """The best filling, and the best one that follows another order of forwards and backwards."""
    by_value = sorted(tried, key=lambda filling: filling.value)
    others = [filling for filling in by_value if filling.bare is not by_value[0].bare]
    return by_value[:1] + others[:1]


@define
class _Trials:
    """Executions by orders and rules. A trial that is known to repeat an earlier execution is not
    run again, and one that falls too far behind the best is not run to its end.
    """

    graph: Graph
    limit: float
    runs: list[tuple[Greedy, _Filling | None]] = field(factory=list)
    least: float = inf
    is_over: bool = False

    def run_all(self, choices: Iterable[tuple[Orders, Rules]]) -> list[_Filling]:
        """Run orders by rules, up to the first execution that ends as early as any can; return the
        executions that were not given up.
        """
        fillings = []
        for bare, rules in choices:
            if self.is_over:
                break
            filling = self.run(bare, rules)
            if filling is not None:
                fillings.append(filling)
                objective, last, _ = filling.value
                is_least = objective <= self.graph.least_objective + ROUNDING
                self.is_over = is_least and last <= self.graph.least_makespan + ROUNDING
        return fillings

    def run(self, bare: Orders, rules: Rules) -> _Filling | None:
        """Run these orders filled by these rules; None if the execution is given up."""
        for earlier, filling in self.runs:
            if earlier.given is bare and earlier.is_like(rules):
                return filling and evolve(filling, rules=rules)
        # A rank ends after its busy time and its waits, so waits alone tell early that it is late.
        patience = (_HOPELESS * self.least - self.graph.work).tolist()
        run = Greedy(self.graph, bare, self.limit, rules, patience)
        filling = None
        if run.run():
            value = _value(self.graph, run.orders, run.ends)
            self.least = min(self.least, value[0])
            filling = _Filling(value, run.orders, bare, rules, tuple(run.waited))
        self.runs.append((run, filling))
        return filling


def _as_given(graph: Graph, limit: float) -> list[_Filling]:
    """The schedule's own order, if it stays within the limit."""
    order = graph.order
    if max(map(graph.peak, order)) > limit + ROUNDING:
        return []
    return [_Filling(_value(graph, order, graph.own_ends), order, order, Rules())]


def _value(
    graph: Graph, orders: Orders, ends: list[float]
) -> tuple[float, float, float]:
    """What is minimised: the objective, then the makespan, then the sum of the ranks' peaks."""
    return (
        graph.objective(orders, ends),
        max(ends, default=0.0),
        sum(map(graph.peak, orders)),
    )


def _choices(graph: Graph, limit: float) -> Iterator[Orders]:
    """Orders of forwards and backwards: the schedule's own, and with a limit, longer warm-ups."""
    given = graph.without_weights()
    yield given
    if limit == inf:
        return
    found = [given]
    for order in longer_warmups(graph, given, limit):
        # Often no warm-up can be longer. Equal orders are one object, so that trials are shared.
        found.append(next((same for same in found if same == order), order))
        yield found[-1]


def _complete(schedule: Schedule) -> Schedule:
    """The schedule with the weight gradients that it lacks, at the end of each rank."""
    ranks = tuple(_completed(schedule.layout, actions) for actions in schedule.ranks)
    return evolve(schedule, ranks=ranks)


def _completed(layout: Layout, actions: Actions) -> Actions:
    """One rank's actions with the weight gradients that it lacks."""
    if sum(map(actions.kind.count, INPUT_HALVES)) == actions.kind.count(Kind.W):
        return actions
    table = table_of(actions)
    kind, stage, microbatch, *_ = table
    names = stage * np.int64(microbatch.max() + 1) + microbatch
    lacks = _owes(layout, table) & ~np.isin(names, names[kind == Kind.W])
    return actions_from(np.concatenate([table, _weights_of(table[:, lacks])], axis=1))
