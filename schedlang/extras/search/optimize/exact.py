"""The least that any order comes to, by CP-SAT: orders that are proved to be the best."""

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

#: The effort of the first look at one rank, and at all; it doubles in each turn.
_RANK_EFFORT = 0.5
_EFFORT = 2.0
#: The first effort to find how far above the bound a rank is that has no order at the bound.
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
    #: No order is below the one, in units; and there are orders at the other.
    low: int = field(init=False)
    high: int = field(init=False)
    #: By rank: what it comes to at the least by itself is this or less.
    alone: dict[int, int] = field(init=False, factory=dict)
    #: The search window by window from the best orders, and its answers to come.
    windows: Windows | None = field(init=False, default=None)
    to_come: Iterator[Answer] = field(init=False, factory=lambda: iter(()))

    def __attrs_post_init__(self) -> None:
        self.instance = Instance.of(self.problem)
        self.low = 0
        # All ops one after the other take as long as any orders that never wait without need.
        time = self.instance.time
        waits = sum(lag - time[first] for first, _, lag in self.instance.lags)
        self.high = sum(time) + waits + 1
        if self.answer.value < inf:
            self.high = self.instance.units(self.answer.value)

    def answers(self) -> Iterator[Answer]:
        """Better and better answers, until one is the best or the time is over."""
        for _ in self._steps():
            yield self.answer
            # Where nothing is left to look at, no order holds so little.
            if (
                self.answer.is_best
                or self.low >= self.high
                or monotonic() >= self.deadline
            ):
                return

    def _steps(self) -> Iterator[None]:
        # The bounds are closed in from both sides, ever more thoroughly:
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
        """Raise the lower bound to some units."""
        self.low = max(self.low, bound)
        least = min(self.instance.value_of(self.low), self.answer.value)
        answer = evolve(self.answer, bound=max(self.answer.bound, least))
        self.answer = self.instance.closed(answer)

    def _take(self, orders: Orders, value: float, source: str) -> bool:
        """Keep some orders if they are better than the best that is known; whether they are."""
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
        """Find a lower bound from each rank alone, as though the others could do all at once."""
        for rank in range(len(self.problem.limits)):
            # Most ranks have orders at the bound, and some are soon found. Where there are none,
            # the rank may be what all others wait for: then it is asked at once how far up.
            for is_far, effort in ((False, _RANK_EFFORT), (True, _FAR_EFFORT)):
                # Once the bound is above what this rank comes to, it has no more to say.
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
        """Better orders window by window; where there are no better ones since, it goes on where it
        was.
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
        """What all ranks together come to, up to a share of what is between the bound and the best
        that is known: a larger one where there is nothing, a smaller one where that is not found
        out.
        """
        share = _SHARE
        while self.low < self.high:
            target = self.low + int((self.high - 1 - self.low) * share)
            # Nothing is between the bound and the target: what was asked is whether the bound is
            # reached.
            is_narrowest = target == self.low
            outcome = self._look(target, effort)
            self._raise(outcome.bound)
            is_better = outcome.orders is not None and self._take(
                outcome.orders, self.problem.value(outcome.orders), "exact search"
            )
            yield
            # Refuted: more may be asked for the next time.
            if outcome.bound > target:
                share = min(2 * share, 1.0)
            elif not is_better:
                share /= 2
                if is_narrowest:
                    return
