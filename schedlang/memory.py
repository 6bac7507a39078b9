"""What a rank holds over time."""

from heapq import heappop, heappush
from math import inf

from attrs import define, field


@define
class Level:
    """What a rank holds now, and the most it has held; amounts are taken and given back in order of time.

    `steps` has what it holds from each time on when that changes, in order of time.
    """

    now: float = 0.0
    peak: float = 0.0
    steps: list[tuple[float, float]] = field(factory=list)
    #: What will be taken or given back, as (time, amount); of one time, what is given back comes first.
    _later: list[tuple[float, float]] = field(factory=list)

    def change(self, time: float, amount: float) -> None:
        """Let an amount be taken, or given back where it is negative, at a time from now on."""
        heappush(self._later, (time, amount))

    def hold(self, start: float, amount: float) -> None:
        """Take an amount at a time, and give it back at once: it counts for the peak only."""
        self.advance(start)
        self.peak = max(self.peak, self.now + amount)
        self.steps += (start, self.now + amount), (start, self.now)

    def run(self, begin: float, end: float, amount: float, stays: bool) -> None:
        """Run an op: what it takes, it takes as it begins, what it gives back, as it ends; or it holds it meanwhile."""
        if not stays:
            self.hold(begin, amount)
        else:
            self.change(begin if amount > 0 else end, amount)

    def advance(self, time: float = inf) -> None:
        """Let time go on, by default to the end."""
        while self._later and self._later[0][0] <= time:
            at, amount = heappop(self._later)
            self.now += amount
            self.peak = max(self.peak, self.now)
            self.steps.append((at, self.now))
