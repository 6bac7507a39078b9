"""The best order that a search finds for a schedule, however many microbatches it has.

What a search finds repeats itself where the schedule does. So it looks at a schedule with fewer
microbatches, and what it finds there is continued. That this holds is shown by a walk over the
whole.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import product
from math import ceil, gcd, inf, lcm

import numpy as np
from attrs import evolve, frozen

from schedlang.lowering import lower
from schedlang.passes.find_periods import find_periods
from schedlang.passes.op_graph import ROUNDING, Graph, Orders
from schedlang.proof.durations import op_ends
from schedlang.proof.execution import Execution
from schedlang.proof.prove import can_run, ideal_execution, prove
from schedlang.schedule.columns import Floats, Ints, actions_of, counts_of, op_names
from schedlang.schedule.kinds import INPUT_HALVES, Kind
from schedlang.schedule.periods import Periods, steps_of
from schedlang.schedule.schedule import Schedule

#: Finds orders that hold no more than a limit, the best one first. It may take that share of the
#: work for a whole schedule that it sees of it.
Search = Callable[[Graph, float, float], list[Orders]]
#: By how many microbatches a schedule may repeat itself, and what is found for it by how many times
#: as many.
_PERIODS = (1, 2, 3, 4)
#: How much larger than the first the parts are for which a search is tried before the whole.
_LARGER = (1.0, 3.0, 9.0)
#: The same for ranks with unequal work, where two parts are needed, which may be of about one size.
_LARGER_UNEVEN = (1.0, 4 / 3, 3.0)
#: The share of its time for which a schedule may idle, where ranks have unequal work, for no other
#: order to be worth looking for.
_NEGLIGIBLE = 1e-3


@contextmanager
def _without_collection() -> Iterator[None]:
    """Within it Python looks for no cycles of objects: a search makes hundreds of thousands, and
    no cycles, and to look through them takes a fifth of its time and more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def best_order(
    schedule: Schedule, search: Search, limit: float | None = None
) -> Schedule | None:
    """A schedule of ops with each rank's in the best order that a search finds; None if there is
    none.

    No rank holds more than a limit then; without one, than the highest peak of the schedule.
    CompileError for a schedule that cannot run.
    """
    before = None
    for part in _parts(schedule, limit):
        found = part.searched(search, limit)
        whole = None if found is None else found.continued(before)
        if whole is not None:
            return whole
        before = found
    # What cannot run at all is refused before orders are tried: its proof says why.
    if not can_run(schedule):
        prove(lower(schedule))
    graph = Graph(schedule)
    if limit is None:
        limit = graph.highest_peak(graph.order)
    orders = search(graph, limit, 1.0)
    return graph.reordered(orders[0]) if orders else None


def _parts(schedule: Schedule, limit: float | None) -> Iterator["_Part"]:
    """The schedule with fewer and then more of its microbatches, up to a third of them.

    There are none where microbatches take different times, or where communication, copies or
    collectives are written, which leave no order to look for.
    """
    if schedule.costs.differ_by_microbatch:
        return
    if schedule.columns.is_transfer.any() or schedule.columns.is_beside.any():
        return
    ranks = len(schedule.ranks)
    is_even = _is_even(_work(schedule))
    larger = _LARGER if is_even else _LARGER_UNEVEN
    # For ranks with unequal work not so few periods that there is no time to gain anything.
    least = 4 if is_even else 12
    microbatches = [pipeline.microbatches for pipeline in schedule.layout.pipelines]
    for period, share in product(sorted({*_PERIODS, ranks}), _shares(microbatches)):
        each = tuple(period * number for number in share)
        periods = find_periods(schedule, each)
        if periods is None:
            continue
        # An order takes the longer to repeat itself, the more ranks follow each other; with as many
        # microbatches to a period as there are ranks, that is a few periods.
        stays = max(-(-3 * ranks // 4), least) if period < ranks else 2
        # Two thirds of the microbatches are left out at least.
        least_out = -(-2 * sum(microbatches) // (3 * sum(each)))
        for more in (_most_held(periods, stays, limit), 0):
            left_out = [
                periods.times - more - ceil(stays * factor) for factor in larger
            ]
            if period < ranks:
                # What is found may repeat itself by several periods only. The first part is small,
                # and enough for most; others leave out what any of these numbers divides.
                left_out[1:] = [
                    _divisible(out, least_out, lcm(*_PERIODS)) for out in left_out[1:]
                ]
            parts = [out for out in left_out if out >= least_out]
            if parts:
                yield from (_Part(periods, times) for times in parts)
                return


def _shares(microbatches: list[int]) -> list[tuple[int, ...]]:
    """By how many microbatches pipelines may go on while they do so side by side: all by as many,
    each by its share, or each by about that, in small numbers.
    """
    common = gcd(*microbatches)
    about = [
        Fraction(number, min(microbatches)).limit_denominator(max(_PERIODS))
        for number in microbatches
    ]
    denominator = lcm(*(ratio.denominator for ratio in about))
    shares = (
        tuple(1 for _ in microbatches),
        tuple(number // common for number in microbatches),
        tuple(int(ratio * denominator) for ratio in about),
    )
    return list(dict.fromkeys(shares))


def _divisible(number: int, least: int, divisor: int) -> int:
    """The next number down that can be divided; the number itself if that is less than `least`."""
    divisible = number - number % divisor
    return divisible if divisible >= least else number


def _most_held(periods: Periods[Schedule], stays: int, limit: float | None) -> int:
    """If some rank could do all forwards of a part before its first backward, in which so many
    periods stay besides those around them: how many more stay for it not to hold all microbatches
    until their last uses.
    """
    if limit is None or limit == inf:
        return 0
    schedule = periods.schedule
    memory = schedule.costs.memory(schedule.layout)
    forward = np.array(memory[Kind.F])
    #: How many microbatches, or slices of these, a period has for each stage.
    step = steps_of(schedule.layout, periods.microbatches)[Kind.F, : len(forward)]
    (half,) = INPUT_HALVES
    # What is held from the forward on, and what is left of it for the weight gradient.
    amounts = step * np.stack([forward, np.minimum(forward, forward + memory[half])])
    held, kept = (
        counts_of(schedule.placement, amount, len(schedule.ranks)) for amount in amounts
    )
    units = np.array(list(map(schedule.layout.units, range(len(schedule.placement)))))
    around = int((units // step).max()) - periods.times
    if (held[held > 0] * (around + stays) > limit).all():
        return 0
    return max(int(limit // kept[kept > 0].min(initial=inf)) + 1 - around, 0)


def _work(schedule: Schedule) -> Floats:
    """How long the ops of each rank take."""
    columns = schedule.columns
    durations = schedule.costs.durations(schedule.layout)
    after = op_ends(columns, np.arange(len(columns)), durations)
    # Of ops that overlap, the last one ends when all have.
    is_last = np.diff(columns.batch, append=-1) != 0
    work = counts_of(columns.rank[is_last], after[is_last], len(schedule.ranks))
    return work.astype(np.float64)


@frozen
class _Part:
    """A schedule without so many of its periods."""

    periods: Periods[Schedule]
    times: int

    def searched(self, search: Search, limit: float | None) -> "_Found | None":
        """The best order of the part, if there is one."""
        part = self.periods.more(-self.times)
        if not can_run(part):
            # The whole one says it of the right microbatches.
            return None
        graph = Graph(part)
        if limit is None:
            limit = graph.highest_peak(graph.order)
        share = len(part.columns) / len(self.periods.schedule.columns)
        orders = search(graph, limit, share)
        if not orders:
            return None
        execution = ideal_execution(graph.reordered(orders[0]))
        assert execution is not None
        return _Found(self, limit, execution, is_as_given=orders[0] == graph.order)


@frozen
class _Found:
    """What a search found for a part within a limit."""

    part: _Part
    limit: float
    execution: Execution
    #: Whether it is the order that the part has by itself.
    is_as_given: bool

    def continued(self, before: "_Found | None") -> Schedule | None:
        """The whole schedule in the order of the part, if that repeats itself, and the whole runs
        within the limit and idles no longer than can be expected, also by what was found for a
        smaller part.
        """
        growth = self.growth(before)
        if growth is None or _has_too_few(self.execution):
            return None
        part = self.part
        given = part.periods.schedule
        if self.is_as_given and self.is_as_good(given, part.times * growth):
            return given
        starts = np.concatenate([bars.start for bars in self.execution.timeline.ranks])
        for step in (times for times in _PERIODS if part.times % times == 0):
            each = tuple(step * number for number in part.periods.microbatches)
            periods = find_periods(self.execution.schedule, each, starts)
            # With little more of it, most of what does not hold is seen.
            if periods is None or not self.is_as_good(
                periods.more(2), 2 * step * growth
            ):
                continue
            order = periods.more(part.times // step)
            whole = _in_order(given, order)
            if whole is not None and self.is_as_good(whole, part.times * growth):
                return whole
        return None

    def growth(self, before: "_Found | None") -> float | None:
        """How much longer the whole may idle with every period that it has more than the part; None
        if the part does not tell.

        At first it is none, if there is next to nothing to gain, or if ranks have equal work. Where
        the whole idles longer all the same, because transfers take time, and where ranks have
        unequal work, some wait in every period, and the order may only gain with many of them:
        then it is as much in every period as between a smaller part and this one.
        """
        work = _work(self.part.periods.schedule)
        idle = _idle(self.execution)
        is_none = _is_even(work) or idle <= _NEGLIGIBLE * work.max()
        if before is None:
            return 0.0 if is_none else None
        more = self.part.times - before.part.times
        growth = (_idle(before.execution) - idle) / more
        return max(growth, 0.0) if is_none else growth

    def is_as_good(self, longer: Schedule, more: float) -> bool:
        """Whether a longer schedule runs within the limit, and idles so much more at most."""
        whole = ideal_execution(longer)
        if whole is None or max(whole.peak_memory) > self.limit + ROUNDING:
            return False
        most = _idle(self.execution) + more
        return _idle(whole) <= most + ROUNDING * whole.timeline.makespan


def _is_even(work: Floats) -> bool:
    """Whether all ranks have equal work."""
    most = float(work.max(initial=0.0))
    return most - float(work.min(initial=inf)) <= ROUNDING * most


def _has_too_few(execution: Execution) -> bool:
    """Whether some rank holds all microbatches at once: with more of them it might hold more."""
    schedule = execution.schedule
    for rank, most in enumerate(execution.peak_activations):
        if most >= sum(map(schedule.layout.units, schedule.stages_of(rank))) > 0:
            return True
    return False


def _in_order(schedule: Schedule, order: Schedule) -> Schedule | None:
    """The ops of a schedule in the order of another one, if that has the same ops."""
    mine = _keys(schedule)
    theirs = _keys(order)
    rows = np.argsort(mine)
    places = np.argsort(theirs)
    if not np.array_equal(mine[rows], theirs[places]):
        return None
    row_at = np.empty_like(rows)
    row_at[places] = rows
    ranks = actions_of(len(schedule.ranks), schedule.columns.taken(row_at))
    return evolve(schedule, ranks=ranks, slots=None)


def _keys(schedule: Schedule) -> Ints:
    """For each op a number that no other one has."""
    stride = max(map(schedule.layout.units, range(len(schedule.placement)))) + 1
    columns = schedule.columns
    # Optimizer steps have -1 for a microbatch.
    return op_names(len(schedule.placement), columns) * stride + columns.microbatch + 1


def _idle(execution: Execution) -> float:
    """By how much the objective is longer than what a rank works."""
    bars = [np.array([bars.start, bars.end]) for bars in execution.timeline.ranks]
    busy = max(float((end - start).sum()) for start, end in bars)
    return float(getattr(execution.timeline, execution.schedule.objective)) - busy
