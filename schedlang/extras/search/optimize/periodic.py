"""Repeating blocks: starts for the ops of one or a few microbatches, which repeat at an interval.
No rank runs two ops at a time or exceeds its memory.

The size of this problem does not depend on the number of microbatches (modulo
scheduling: Rau 1994, Iterative modulo scheduling; building blocks of pipelines: Qi et al. 2024,
Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 2).
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from math import ceil
from time import monotonic

from attrs import evolve, frozen
from ortools.sat.python import cp_model

from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.published import passed
from schedlang.extras.search.optimize.solver import solved, which_is_first
from schedlang.passes.op_graph import Orders

#: Intervals to try, as the share by which they exceed the work of the busiest rank.
_SLACK = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0)
#: The numbers of microbatches that a block may have.
_MICROBATCHES = (1, 2)
#: The most units of time in the work of the busiest rank. Times are rounded up to multiples of a
#: unit; fewer units make the search quicker.
_UNITS = 240
#: The limit of the solver's deterministic time for an interval, in seconds.
_EFFORT = 5.0


@frozen
class Block:
    """The starts of the ops of some `microbatches`; the block starts again every `interval`.

    `start[i]` are the starts of the ops of chain i of the problem's instance, one for each
    microbatch of the block. The last op ends `length` after the begin of the block. Times are
    multiples of `unit`.
    """

    interval: int
    microbatches: int
    start: tuple[tuple[int, ...], ...]
    length: int
    unit: Fraction

    def orders(self, instance: Instance) -> Orders:
        """The order of each rank if the block is repeated until all microbatches are done."""
        rows: list[list[tuple[int, int, int]]] = [[] for _ in instance.limits]
        for number, chain in enumerate(instance.chains):
            for index, node in enumerate(chain):
                repeat, place = divmod(index, self.microbatches)
                begin = self.start[number][place] + repeat * self.interval
                rows[instance.rank[node]].append((begin, instance.time[node], node))
        return [[node for _, _, node in sorted(of_rank)] for of_rank in rows]


def periodic(
    problem: Problem, known: Answer, seconds: float, workers: int = 1
) -> Iterator[Answer]:
    """See `Solver`. It proves no bound, and yields nothing unless all microbatches are alike."""
    deadline = monotonic() + seconds
    answer = known
    instance = Instance.of(problem)
    for block in blocks(instance, known.orders, seconds, workers):
        for orders in passed(problem, instance.in_chains(block.orders(instance))):
            value = problem.value(orders)
            if value < answer.value:
                answer = evolve(
                    answer, orders=orders, value=value, source="a repeating block"
                )
                yield answer
            if answer.is_best or monotonic() >= deadline:
                return


def blocks(
    instance: Instance, known: Orders, seconds: float, workers: int = 1
) -> Iterator[Block]:
    """Blocks within the memory of the ranks, one for each number of microbatches: with the shortest
    interval that was found, and of these the shortest block.

    If orders are known, the starts in the middle of their execution are a hint for the solver.
    """
    deadline = monotonic() + seconds
    if not _is_periodic(instance):
        return
    rough = _Rough.of(instance)
    hint = _middle(instance, known, rough.unit) if known else []
    # If the known orders repeat themselves, a block with their interval exists.
    known_intervals = [of_chain[1] - of_chain[0] for of_chain in hint]
    for microbatches in _MICROBATCHES:
        # No interval is shorter than the busiest rank's work. Intervals are tried in ascending
        # order, so the first one that has a block is the best.
        intervals = {ceil(rough.work * microbatches * (1 + slack)) for slack in _SLACK}
        if known_intervals:
            intervals.add(max(known_intervals) * microbatches)
        for interval in sorted(intervals):
            left = deadline - monotonic()
            if left <= 0:
                return
            block = _solved(rough, interval, microbatches, hint, left, workers)
            if block is not None:
                yield block
                break


def _middle(instance: Instance, orders: Orders, unit: Fraction) -> list[list[int]]:
    """The starts of each chain's ops, in units, for microbatches in the middle of an execution."""
    graph = instance.problem.graph
    ends = graph.ends(orders)
    first = (len(instance.chains[0]) - max(_MICROBATCHES)) // 2
    middle = [chain[first : first + max(_MICROBATCHES)] for chain in instance.chains]
    starts = [[ends[node] - graph.time[node] for node in nodes] for nodes in middle]
    begin = min(start for of_chain in starts for start in of_chain)
    return [
        [round((start - begin) / unit) for start in of_chain] for of_chain in starts
    ]


def _is_periodic(instance: Instance) -> bool:
    """Whether all microbatches are alike, so that one block fits all of them."""
    lengths = set(map(len, instance.chains))
    return len(lengths) == 1 and min(lengths) >= max(_MICROBATCHES)


@frozen
class _Rough:
    """The ops of one microbatch in rough units: rank, duration and memory by chain, and the lags
    between the starts of two ops.
    """

    instance: Instance
    unit: Fraction
    rank: list[int]
    time: list[int]
    change: list[int]
    rise: list[int]
    lags: list[tuple[int, int, int]]

    @classmethod
    def of(cls, instance: Instance) -> "_Rough":
        first = [chain[0] for chain in instance.chains]
        rank = [instance.rank[node] for node in first]
        work = [0] * len(instance.limits)
        for node in first:
            work[instance.rank[node]] += instance.time[node]
        # Units are kept as they are if there are few.
        scale = min(Fraction(_UNITS, max(max(work), 1)), Fraction(1))
        number = {node: index for index, node in enumerate(first)}
        # Durations are rounded up, so that a block in rough units holds in exact ones; and they are
        # at least 1, so that the ops of a rank have distinct starts.
        time = [max(ceil(instance.time[node] * scale), 1) for node in first]
        lags = []
        for one, other, lag in instance.lags:
            if one in number and other in number:
                delay = ceil((lag - instance.time[one]) * scale)
                lags.append((number[one], number[other], time[number[one]] + delay))
        return cls(
            instance,
            instance.unit / scale,
            rank,
            time,
            [instance.change[node] for node in first],
            [instance.rise[node] for node in first],
            lags,
        )

    @property
    def work(self) -> int:
        """The time that the busiest rank works for a microbatch."""
        return max(map(self.work_of, set(self.rank)))

    def work_of(self, rank: int) -> int:
        """The time that a rank works for a microbatch."""
        return sum(
            time
            for time, mine in zip(self.time, self.rank, strict=True)
            if mine == rank
        )

    @property
    def length(self) -> int:
        """The critical path of a microbatch."""
        # The longest path, by Bellman and Ford, since lags come in no order.
        end = list(self.time)
        for _ in self.time:
            before = list(end)
            for one, other, lag in self.lags:
                end[other] = max(
                    end[other], end[one] - self.time[one] + lag + self.time[other]
                )
            if end == before:
                break
        return max(end)


#: An op of the block: the number of its chain, and that of its microbatch in the block.
_Op = tuple[int, int]


def _solved(
    rough: _Rough,
    interval: int,
    microbatches: int,
    hint: Sequence[Sequence[int]],
    seconds: float,
    workers: int,
) -> Block | None:
    """A block with this interval; None if none was found. A hint has, for each chain, the starts of
    consecutive microbatches in rough units.
    """
    model = cp_model.CpModel()
    # A microbatch may take twice its critical path, and begin within the following intervals.
    most = 2 * rough.length // interval + 2
    numbers = range(len(rough.time))
    ops = [(number, place) for number in numbers for place in range(microbatches)]
    # The start of an op is its phase within an interval, and a number of intervals. With an
    # interval of 4, an op that starts at 6:
    #
    #     slot        0   1   2   3 │ 4   5   6   7
    #     phase                           2                 where in the interval
    #     later                     │ 1                     how many intervals later
    phase = {op: model.new_int_var(0, interval - 1, "") for op in ops}
    later = {op: model.new_int_var(0, most, "") for op in ops}
    start = {op: phase[op] + interval * later[op] for op in ops}
    for one, other, lag in rough.lags:
        for place in range(microbatches):
            model.add(start[other, place] >= start[one, place] + lag)
    for number in numbers:
        turns = [start[number, place] for place in range(microbatches)]
        # The microbatches of a chain come in their order, and before those of the next block.
        for turn, following in zip(
            turns, [*turns[1:], turns[0] + interval], strict=True
        ):
            model.add(following >= turn + rough.time[number])
    for rank in sorted(set(rough.rank)):
        mine = [op for op in ops if rough.rank[op[0]] == rank]
        _take_turns(model, rough, rank, mine, phase, later, interval)
    # A block can be shifted in time, so one op is fixed at 0.
    first = rough.instance.topological[0]
    origin = next(
        number
        for number, chain in enumerate(rough.instance.chains)
        if chain[0] == first
    )
    model.add(phase[origin, 0] == 0)
    model.add(later[origin, 0] == 0)
    end = model.new_int_var(0, interval * (most + 2), "")
    for op in ops:
        model.add(start[op] + rough.time[op[0]] <= end)
    model.minimize(end)
    for op in ops if hint else []:
        intervals, rest = divmod(hint[op[0]][op[1]], interval)
        model.add_hint(later[op], intervals)
        model.add_hint(phase[op], rest)
    solver, is_found = solved(model, workers, _EFFORT, seconds)
    if not is_found:
        return None
    begins = tuple(
        tuple(solver.value(start[number, place]) for place in range(microbatches))
        for number in numbers
    )
    return Block(interval, microbatches, begins, solver.value(end), rough.unit)


def _take_turns(
    model: cp_model.CpModel,
    rough: _Rough,
    rank: int,
    ops: Sequence[_Op],
    phase: dict[_Op, cp_model.IntVar],
    later: dict[_Op, cp_model.IntVar],
    interval: int,
) -> None:
    """Let the ops of a rank, of all repetitions, run one after the other and within its memory."""
    model.add_no_overlap(
        model.new_fixed_size_interval_var(phase[op], rough.time[op[0]], "")
        for op in ops
    )
    before: dict[tuple[_Op, _Op], cp_model.LiteralT] = {}
    for one, other in combinations(ops, 2):
        takes = rough.time[one[0]]
        other_takes = rough.time[other[0]]
        phases = phase[one], phase[other]
        is_first = which_is_first(model, *phases, takes, other_takes)
        # The last op of an interval ends before the first op of the next.
        model.add(phase[one] + takes <= phase[other] + interval)
        model.add(phase[other] + other_takes <= phase[one] + interval)
        before[one, other] = is_first
        before[other, one] = ~is_first
    for op in ops:
        if rough.rise[op[0]] <= 0:
            continue
        # When op starts for the n-th time, another op has started n times, plus the number of
        # intervals that it is ahead. The n times add up to nothing over all ops of a microbatch, so
        # they are left out.
        terms: list[cp_model.LiteralT] = []
        amounts: list[int] = []
        for other in ops:
            change = rough.change[other[0]]
            if other != op and change:
                terms += [later[op], later[other], before[other, op]]
                amounts += [change, -change, change]
        room = rough.instance.limits[rank] - rough.rise[op[0]]
        model.add(cp_model.LinearExpr.weighted_sum(terms, amounts) <= room)
