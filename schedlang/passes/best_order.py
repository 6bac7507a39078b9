"""Search an order of ops for a schedule with few microbatches, and continue it to all of them.

A schedule repeats itself every few microbatches, and the order that a search finds usually repeats
itself too. So the search runs on a *part*, the schedule with fewer microbatches, and the periods of
its order are repeated. The whole schedule is then executed once, to check memory and idle time.
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
from schedlang.schedule.arrays import Floats, Ints, counts_of
from schedlang.schedule.columns import actions_of, op_names
from schedlang.schedule.kinds import INPUT_HALVES, Kind
from schedlang.schedule.periods import Periods, steps_of
from schedlang.schedule.schedule import Schedule

#: Finds orders within a memory limit, the best one first. The third argument is the share of the
#: whole schedule that the graph contains; the search may spend that share of its budget.
Search = Callable[[Graph, float, float], list[Orders]]
#: Periods to try, in microbatches. An order that the search finds may repeat after a multiple of
#: one.
_PERIODS = (1, 2, 3, 4)
#: Sizes of the parts that are searched before the whole schedule, relative to the first part.
_LARGER = (1.0, 3.0, 9.0)
#: The same sizes for ranks with unequal work: these need two parts, of about the same size.
_LARGER_UNEVEN = (1.0, 4 / 3, 3.0)
#: With unequal ranks, a schedule that is idle for less than this share of its makespan is good
#: enough: no other order is searched.
_NEGLIGIBLE = 1e-3


@contextmanager
def _without_collection() -> Iterator[None]:
    """Switch Python's garbage collector off: a search makes hundreds of thousands of objects
    without cycles, and to scan them would take a fifth of its time and more.
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
    """The schedule with each rank's ops in the best order that the search finds; None if it finds
    none.

    No rank holds more than `limit`, by default the highest peak of the given schedule.
    CompileError for a schedule that cannot run.
    """
    before = None
    for part in _parts(schedule, limit):
        found = part.searched(search, limit)
        whole = None if found is None else found.continued(before)
        if whole is not None:
            return whole
        before = found
    # A schedule that cannot run is refused before any search: its proof reports why.
    if not can_run(schedule):
        prove(lower(schedule))
    graph = Graph(schedule)
    if limit is None:
        limit = graph.highest_peak(graph.order)
    orders = search(graph, limit, 1.0)
    return graph.reordered(orders[0]) if orders else None


def _parts(schedule: Schedule, limit: float | None) -> Iterator["_Part"]:
    """Parts of the schedule, small ones first, with up to a third of its microbatches.

    There are no parts if microbatches differ in their times, since nothing repeats then, or if the
    program writes communication, copies or collectives, since these fix the order of ops.
    """
    if schedule.costs.differ_by_microbatch:
        return
    if schedule.columns.is_transfer.any() or schedule.columns.is_beside.any():
        return
    ranks = len(schedule.ranks)
    is_even = _is_even(_work(schedule))
    larger = _LARGER if is_even else _LARGER_UNEVEN
    # With unequal ranks, a search gains nothing in fewer periods than this.
    least = 4 if is_even else 12
    microbatches = [pipeline.microbatches for pipeline in schedule.layout.pipelines]
    for period, share in product(sorted({*_PERIODS, ranks}), _shares(microbatches)):
        each = tuple(period * number for number in share)
        periods = find_periods(schedule, each)
        if periods is None:
            continue
        # With more ranks, more periods pass until an order repeats itself; two are enough if a
        # period has as many microbatches as there are ranks.
        stays = max(-(-3 * ranks // 4), least) if period < ranks else 2
        # A part leaves out at least two thirds of the microbatches.
        least_out = -(-2 * sum(microbatches) // (3 * sum(each)))
        for more in (_most_held(periods, stays, limit), 0):
            left_out = [
                periods.times - more - ceil(stays * factor) for factor in larger
            ]
            if period < ranks:
                # The order that is found may repeat only after several periods. The first part is
                # small, and enough for most schedules; the larger ones leave out a number of
                # periods that every number in _PERIODS divides.
                left_out[1:] = [
                    _divisible(out, least_out, lcm(*_PERIODS)) for out in left_out[1:]
                ]
            parts = [out for out in left_out if out >= least_out]
            if parts:
                yield from (_Part(periods, times) for times in parts)
                return


def _shares(microbatches: list[int]) -> list[tuple[int, ...]]:
    """How many microbatches of each pipeline a period may have: one of each, a number in proportion
    to the pipeline's microbatches, or that proportion rounded to small numbers.
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
    """Round a number down to a multiple of `divisor`, unless the result is less than `least`."""
    divisible = number - number % divisor
    return divisible if divisible >= least else number


def _most_held(periods: Periods[Schedule], stays: int, limit: float | None) -> int:
    """How many periods a part needs beside the `stays` that it has, so that the memory limit keeps
    every rank from holding all of its microbatches until their last uses.

    It needs no more if no rank could run all forwards of the part before its first backward.
    """
    if limit is None or limit == inf:
        return 0
    schedule = periods.schedule
    memory = schedule.costs.memory(schedule.layout)
    forward = np.array(memory[Kind.F])
    #: How many microbatches, or slices of these, a period has for each stage.
    step = steps_of(schedule.layout, periods.microbatches)[Kind.F, : len(forward)]
    (half,) = INPUT_HALVES
    # Memory that is held from the forward on, and the rest of it that the weight gradient needs.
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
    """The busy time of each rank: the sum of its ops' durations."""
    columns = schedule.columns
    durations = schedule.costs.durations(schedule.layout)
    after = op_ends(columns, np.arange(len(columns)), durations)
    # The last of several overlapped ops ends when all of them have ended.
    is_last = np.diff(columns.batch, append=-1) != 0
    work = counts_of(columns.rank[is_last], after[is_last], len(schedule.ranks))
    return work.astype(np.float64)


@frozen
class _Part:
    """A schedule with `times` of its periods left out."""

    periods: Periods[Schedule]
    times: int

    def searched(self, search: Search, limit: float | None) -> "_Found | None":
        """Search the part; None if it cannot run, or if no order stays within the limit."""
        part = self.periods.more(-self.times)
        if not can_run(part):
            # The whole schedule cannot run either, and its error names the right microbatches.
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
    """The execution of the best order that a search found for a part, within a memory limit."""

    part: _Part
    limit: float
    execution: Execution
    #: Whether the best order is the one that the schedule had before the search.
    is_as_given: bool

    def continued(self, before: "_Found | None") -> Schedule | None:
        """The whole schedule in the part's order; None if that order does not repeat itself, or if
        the whole schedule exceeds the limit or idles longer than the part and the smaller part
        `before` let expect.
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
            # Two more periods show most faults, and cost less than all of them.
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
        """By how much each further period may lengthen the idle time; None if one part alone cannot
        tell.

        Ranks with equal work, and ranks that hardly idle in the part, should not idle longer with
        more periods; so the growth is 0 for the first part. But ranks with unequal work wait in
        every period, and so may equal ones if transfers take time. Then the growth for each
        period is measured between the smaller part `before` and this one.
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
        """Whether a longer schedule stays within the limit and idles at most `more` longer."""
        whole = ideal_execution(longer)
        if whole is None or max(whole.peak_memory) > self.limit + ROUNDING:
            return False
        most = _idle(self.execution) + more
        return _idle(whole) <= most + ROUNDING * whole.timeline.makespan


def _is_even(work: Floats) -> bool:
    """Whether all ranks are busy for the same time."""
    most = float(work.max(initial=0.0))
    return most - float(work.min(initial=inf)) <= ROUNDING * most


def _has_too_few(execution: Execution) -> bool:
    """Whether some rank holds every microbatch at once; with more, its peak might rise."""
    schedule = execution.schedule
    for rank, most in enumerate(execution.peak_activations):
        if most >= sum(map(schedule.layout.units, schedule.stages_of(rank))) > 0:
            return True
    return False


def _in_order(schedule: Schedule, order: Schedule) -> Schedule | None:
    """The schedule with its ops in the order of another one; None if that has other ops."""
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
    """A unique number for each op."""
    stride = max(map(schedule.layout.units, range(len(schedule.placement)))) + 1
    columns = schedule.columns
    # Optimizer steps have -1 for a microbatch.
    return op_names(len(schedule.placement), columns) * stride + columns.microbatch + 1


def _idle(execution: Execution) -> float:
    """The idle time of the busiest rank: the objective less that rank's busy time."""
    bars = [np.array([bars.start, bars.end]) for bars in execution.timeline.ranks]
    busy = max(float((end - start).sum()) for start, end in bars)
    return float(getattr(execution.timeline, execution.schedule.objective)) - busy
