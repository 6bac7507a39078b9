"""Idle time that is exposed to communication: behind the wait is a transfer on its way, or one that
is held back.

The sum over the causes "transfer", "transport" and "collective" of
`schedlang.report.bubbles.attribution`, in time linear in the steps: a wait is not followed again
through the waits behind it, of which what is exposed is known.
"""

from bisect import bisect_right
from itertools import accumulate

import numpy as np
from attrs import define, field

from schedlang.report.bubbles.reasons import Gaps, Why, reasons
from schedlang.report.bubbles.waits import Waits


def exposed(waits: Waits) -> float:
    """The exposed idle time of all ranks together."""
    found = _Exposed(waits)
    found.follow()
    return _at_the_end(waits) + sum(sums[-1] for sums in found.sums)


@define
class _Exposed:
    """Of each rank, the exposed time in its first waits: `sums[r][i]` in those before its steps 0
    to i - 1.
    """

    waits: Waits
    sums: list[list[float]] = field(init=False)
    starts: list[list[float]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.sums = [[0.0] for _ in self.waits.ranks]
        self.starts = [[step.start for step in steps] for steps in self.waits.ranks]

    def follow(self) -> None:
        """Take the waits in an order in which those behind a wait come before it."""
        # A rank goes on until it waits for a step whose own waits are not yet known; that step's
        # rank then lets it go on. The waits of an execution form no circle, so all come to their
        # ends.
        ready = list(range(len(self.sums)))
        held: dict[tuple[int, int], list[int]] = {}
        while ready:
            rank = ready.pop()
            sums = self.sums[rank]
            for index in range(len(sums) - 1, len(self.waits.ranks[rank])):
                maker, _ = self.waits.latest(rank, index)
                if (
                    maker
                    and not maker.is_copy
                    and len(self.sums[maker.rank]) < maker.index + 2
                ):
                    held.setdefault((maker.rank, maker.index), []).append(rank)
                    break
                sums.append(
                    sums[-1] + self.since(rank, index, self.idle_from(rank, index))
                )
                ready += held.pop((rank, index), ())

    def between(self, rank: int, start: int, stop: int) -> float:
        """The exposed time in a rank's waits before its steps `start` up to `stop`."""
        return self.sums[rank][stop] - self.sums[rank][start]

    def idle_from(self, rank: int, index: int) -> float:
        """When a rank begins to wait with one of its steps."""
        return self.waits.ranks[rank][index - 1].end if index else 0.0

    def since(self, rank: int, index: int, start: float) -> float:
        """The exposed time in a rank's wait with one of its steps, from a time in that wait on."""
        total = 0.0
        while True:
            step = self.waits.ranks[rank][index]
            maker, _ = self.waits.latest(rank, index)
            total += max(step.start - max(start, maker.end if maker else 0.0), 0.0)
            if maker is None or maker.is_copy or maker.end <= start:
                return total
            # Behind it are the waits on the maker's rank: that it may be in at the start, and those
            # that follow.
            rank = maker.rank
            index = min(bisect_right(self.starts[maker.rank], start), maker.index + 1)
            if self.idle_from(rank, index) >= start:
                return total + self.between(rank, index, maker.index + 1)
            total += self.between(rank, index + 1, maker.index + 1)


def _at_the_end(waits: Waits) -> float:
    """The exposed time while ranks wait for the end of all: what is behind it is the same for all
    of them.
    """
    ends = [steps[-1].end if steps else 0.0 for steps in waits.ranks]
    last = waits.steps[waits.last].rank
    whole = Gaps(
        np.array([last]),
        np.array([len(waits.ranks[last])]),
        np.array([min(ends)]),
        np.array([waits.makespan]),
    )
    behind = reasons(waits, whole)
    is_exposed = np.isin(behind.why, [Why.TRANSFER, Why.TRANSPORT, Why.COLLECTIVE])
    pieces = sorted(
        zip(
            behind.start[is_exposed].tolist(),
            behind.end[is_exposed].tolist(),
            strict=True,
        )
    )
    starts = [start for start, _ in pieces]
    # `later[n]` is the time in the last n pieces.
    later = [0.0, *accumulate(end - start for start, end in reversed(pieces))]
    total = 0.0
    for start in ends:
        begun = bisect_right(starts, start)
        # All pieces behind the start, and what is left of the one that it is in.
        total += later[len(pieces) - begun] + (
            max(pieces[begun - 1][1] - start, 0.0) if begun else 0.0
        )
    return total
