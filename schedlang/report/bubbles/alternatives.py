"""What a rank could run in place of waiting: ops that come later in its order."""

from bisect import bisect_right
from operator import add

from schedlang.report.bubbles.waits import ROUNDING, Step, Waits
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import Kind


class Alternatives:
    """A rank's steps, and what it holds before each of them, in the program's amounts."""

    def __init__(self, waits: Waits, rank: int, costs: Costs) -> None:
        self.waits = waits
        self.steps = waits.ranks[rank]
        self.actions = waits.schedule.ranks[rank]
        kinds = [{self.actions.kind[row] for row in step.rows} for step in self.steps]
        #: The indices of the first step with a backward, and of the last one with a forward.
        self.first_backward = next(
            (i for i, each in enumerate(kinds) if {Kind.B, Kind.I} & each), len(kinds)
        )
        self.last_forward = max((i for i, each in enumerate(kinds) if Kind.F in each), default=-1)
        #: The indices of the steps that do the same on the same stages.
        self.alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for index, step in enumerate(self.steps):
            ops = tuple((self.actions.kind[row], self.actions.stage[row]) for row in step.rows)
            self.alike.setdefault(ops, []).append(index)
        self._measure(costs.memory(len(waits.schedule.placement)))

    def between(self, index: int, start: float, end: float) -> dict[str, float]:
        """From when an op could run in a gap before step `index`, and be over by its end.

        Of each op and stage the next one is looked at. By `order`, where it fits into the rank's
        peak memory, or by `memory`, where it does not.
        """
        found: dict[str, float] = {}
        for indices in self.alike.values():
            place = bisect_right(indices, index)
            if place < len(indices):
                step = self.steps[indices[place]]
                ready = max(start, (step.latest() or (step, 0.0))[1])
                if ready + step.end - step.start <= end + ROUNDING * self.waits.makespan:
                    cause = "order" if self._fits(index, indices[place]) else "memory"
                    found[cause] = min(found.get(cause, end), ready)
        return found

    def _measure(self, amounts: dict[int, list[float]]) -> None:
        """Find what the rank holds before each step, what the step adds at most, and what it
        leaves.
        """
        owner: dict[int, Step] = {row: step for step in self.steps for row in step.rows}
        now = 0.0
        held: dict[int, list[float]] = {}
        for row, (kind, stage, microbatch, *_) in enumerate(
            map(self.actions.row, range(len(self.actions)))
        ):
            if is_transfer(kind):
                continue
            amount = amounts[kind][stage]
            levels = held.setdefault(id(owner.get(row)), [now, now])
            levels[1] = max(levels[1], now + amount)
            now += amount * self.waits.schedule.keeps(kind, stage, microbatch)
            levels.append(now)
        by_step = [held[id(step)] for step in self.steps]
        self.held = [levels[0] for levels in by_step]
        self.rise = [levels[1] - levels[0] for levels in by_step]
        self.change = [levels[-1] - levels[0] for levels in by_step]
        self.peak = max(map(add, self.held, self.rise), default=0.0)

    def _fits(self, index: int, later: int) -> bool:
        """Whether a later step could run before step `index` within the rank's peak."""
        peak = self.peak * (1 + ROUNDING)
        if self.held[index] + self.rise[later] > peak:
            return False
        more = self.change[later]
        return more <= 0 or all(
            self.held[each] + self.rise[each] + more <= peak for each in range(index, later)
        )
