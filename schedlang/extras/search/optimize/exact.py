"""The exact search, by CP-SAT: orders and lower bounds, until an order is proved to be the best."""

from collections.abc import Iterator
from itertools import count
from math import inf
from time import monotonic

from attrs import define, evolve, field

from schedlang.extras.search.optimize.constraints import Effort, Outcome, look
from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.windows import Windows
from schedlang.passes.op_graph import Orders

#: The first effort for one rank, and for all ranks; it doubles in each turn.
_RANK_EFFORT = 0.5
_EFFORT = 2.0
#: The first effort to raise the bound by a rank that has no order at the bound.
_FAR_EFFORT = 2.0
#: The first effort of the search window by window; it doubles in each turn.
_WINDOWS_EFFORT = 1.0
#: The first target for all ranks together, as a share of the gap between the bound and the best
#: value that is known.
_SHARE = 1 / 4


def exact(
    problem: Problem, known: Answer, seconds: float, workers: int = 1, seed: int = 0
) -> Iterator[Answer]:
    """See `Solver`: better and better answers, until the best is found and proved."""
    deadline = monotonic() + seconds
    return _Search(problem, known, deadline, workers, seed).answers()


@define
class _Search:
    problem: Problem
    answer: Answer
    deadline: float
    workers: int
    seed: int
    instance: Instance = field(init=False)
    #: A proved lower bound of the objective, and the best value that is known, in units.
    low: int = field(init=False)
    high: int = field(init=False)
    #: By rank: the best value that was found for this rank alone.
    alone: dict[int, int] = field(init=False, factory=dict)
    #: The search window by window from the best orders, and its answers to come.
    windows: Windows | None = field(init=False, default=None)
    to_come: Iterator[Answer] = field(init=False, factory=lambda: iter(()))

    def __attrs_post_init__(self) -> None:
        self.instance = Instance.of(self.problem)
        self.low = 0
        # Orders that never wait without need take no longer than all ops and latencies in sequence.
        time = self.instance.time
        waits = sum(lag - time[first] for first, _, lag in self.instance.lags)
        self.high = sum(time) + waits + 1
        if self.answer.value < inf:
            self.high = self.instance.units(self.answer.value)

    def answers(self) -> Iterator[Answer]:
        """Better and better answers, until one is the best or the time is over."""
        for _ in self._steps():
            yield self.answer
            # Without any known order, an empty range means that no order fits into this memory.
            if (
                self.answer.is_best
                or self.low >= self.high
                or monotonic() >= self.deadline
            ):
                return

    def _steps(self) -> Iterator[None]:
        # The two bounds approach each other, with a larger effort in each turn:
        #
        #     low ├──────────────────────────────────────────────────────┤ high
        #         └ rises: ranks alone, then all      falls: windows, all ┘
        self._raise(self.instance.least)
        yield
        for scale in (2**times for times in count()):
            yield from self._ranks(scale)
            yield from self._windows(_WINDOWS_EFFORT * scale)
            yield from self._whole(_EFFORT * scale)

    def _raise(self, bound: int) -> None:
        """Raise the lower bound, in units."""
        self.low = max(self.low, bound)
        least = min(self.instance.value_of(self.low), self.answer.value)
        answer = evolve(self.answer, bound=max(self.answer.bound, least))
        self.answer = self.instance.closed(answer)

    def _take(self, orders: Orders, value: float, source: str) -> bool:
        """Keep these orders if they are better than the best ones; return whether they are."""
        if value >= self.answer.value:
            return False
        bound = min(self.answer.bound, value)
        self.answer = Answer(orders, value, bound, source)
        self.high = min(self.high, self.instance.units(value))
        return True

    def _look(
        self, high: int, effort: float, ranks: list[int] | None = None
    ) -> Outcome:
        left = max(self.deadline - monotonic(), 0.01)
        workers = self.workers if ranks is None else 1
        effort_left = Effort(effort, left, workers, self.seed)
        hint = self.answer.orders if ranks is None and self.answer.value < inf else None
        return look(self.instance, self.low, high, effort_left, ranks, hint)

    def _ranks(self, scale: int) -> Iterator[None]:
        """Find a lower bound from each rank alone, as though the others ran any nodes at once."""
        for rank in range(len(self.problem.limits)):
            # Most ranks have an order at the bound, which is soon found. A rank without one may be
            # the bottleneck: then its best value is searched at once.
            for is_far, effort in ((False, _RANK_EFFORT), (True, _FAR_EFFORT)):
                # A rank that can reach the bound cannot raise it.
                if self.low >= self.high or self.alone.get(rank, self.high) <= self.low:
                    break
                low = self.low
                target = self.high - 1 if is_far else low
                outcome = self._look(target, effort * scale, [rank])
                if outcome.value is not None:
                    self.alone[rank] = outcome.value
                self._raise(outcome.bound)
                yield
                if outcome.bound == low:
                    break

    def _windows(self, effort: float) -> Iterator[None]:
        """Improve the best orders window by window. The search continues where it stopped, unless
        better orders were found elsewhere.
        """
        if self.answer.value == inf:
            return
        if self.windows is None or self.answer.value < self.windows.answer.value:
            self.windows = Windows(
                self.problem, self.answer, self.deadline, self.workers
            )
            self.to_come = self.windows.answers()
        until = self.windows.spent + effort
        for answer in self.to_come:
            self._take(answer.orders, answer.value, "windows")
            yield
            if self.windows.spent >= until:
                return

    def _whole(self, effort: float) -> Iterator[None]:
        """Search all ranks together for a value in the lower part of the gap. The part grows if it
        is refuted, and shrinks if the solver gives up.
        """
        share = _SHARE
        while self.low < self.high:
            target = self.low + int((self.high - 1 - self.low) * share)
            # Here the question is only whether some order reaches the bound.
            is_narrowest = target == self.low
            outcome = self._look(target, effort)
            self._raise(outcome.bound)
            is_better = outcome.orders is not None and self._take(
                outcome.orders, self.problem.value(outcome.orders), "exact search"
            )
            yield
            # The target is refuted, so the next question may be wider.
            if outcome.bound > target:
                share = min(2 * share, 1.0)
            elif not is_better:
                share /= 2
                if is_narrowest:
                    return
