"""Better orders for problems of any size, where the exact search does not come to an end: blocks
that repeat, then what gains window by window.
"""

from collections.abc import Iterator
from time import monotonic

from attrs import frozen

from schedlang.extras.search.optimize.periodic import periodic
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.windows import windows

#: Which share of the time goes to the search for blocks.
_SHARE_OF_BLOCKS = 0.3


@frozen
class Large:
    """The `Solver` for large problems, with so many threads. It proves nothing."""

    workers: int = 1

    def __call__(
        self, problem: Problem, known: Answer, seconds: float
    ) -> Iterator[Answer]:
        """Better and better answers, until nothing gains, or the time is over."""
        deadline = monotonic() + seconds
        answer = known
        for solver, share in ((periodic, _SHARE_OF_BLOCKS), (windows, 1.0)):
            left = share * (deadline - monotonic())
            if answer.is_best or left <= 0:
                return
            for better in solver(problem, answer, left, self.workers):
                answer = better
                yield answer
