"""Two orders of things laid side by side: what is equal, what moved, what came and what went.

In each order a thing stands once, or else the n-th one is that of the other order. So a longest
common subsequence is a longest increasing subsequence of places, which is found in n log n steps,
and in n where the orders are equal.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from enum import StrEnum

from attrs import frozen


class Change(StrEnum):
    """What became of a thing."""

    EQUAL = "equal"
    MOVED = "moved"
    REMOVED = "removed"
    ADDED = "added"


@frozen
class Run:
    """Neighbours of which the same became: the places `before` in the first order, and `after` in
    the second.

    What was removed has no places `after`, but an empty range where it would stand; and so has what
    was added `before`.
    """

    change: Change
    before: range
    after: range

    @property
    def size(self) -> int:
        """How many things it has."""
        return max(len(self.before), len(self.after))


def align(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[Run]:
    """What became of the things of one order in another one: as few as can be have moved.

    The runs are in the second order; each place of an order that has a thing is in one of them.
    """
    runs: list[Run] = []
    for piece in _pieces(_told_apart(before), _told_apart(after)):
        if runs and (joined := _joined(runs[-1], piece)):
            runs[-1] = joined
        else:
            runs.append(piece)
    return runs


def _told_apart(things: Sequence[Hashable]) -> Sequence[Hashable]:
    """The things, with how many were alike before where some are."""
    if len(set(things)) == len(things):
        return things
    count = Counter[Hashable]()
    apart: list[Hashable] = []
    for thing in things:
        apart.append((thing, count[thing]) if count[thing] else thing)
        count[thing] += 1
    return apart


def _pieces(before: Sequence[Hashable], after: Sequence[Hashable]) -> Iterator[Run]:
    """The runs, not yet joined: each of one thing."""
    place_after = {thing: place for place, thing in enumerate(after)}
    # Places before and after of what is in both orders, in the first one's order. Where the second
    # numbers grow, nothing moved:
    #
    #     a b c d e  →  a c d b e        (0,0) (1,3) (2,1) (3,2) (4,4)        b has moved
    shared = [
        (place, place_after[thing])
        for place, thing in enumerate(before)
        if thing in place_after
    ]
    place_before = {place: origin for origin, place in shared}
    done_before = done_after = 0
    # Behind the last that is equal, the ends of both are, as it were, equal too.
    for origin, place in [*_longest_increasing(shared), (len(before), len(after))]:
        for gone in range(done_before, origin):
            if before[gone] not in place_after:
                yield Run(
                    Change.REMOVED, range(gone, gone + 1), range(done_after, done_after)
                )
        for come in range(done_after, place):
            here = range(come, come + 1)
            if come in place_before:
                was = place_before[come]
                yield Run(Change.MOVED, range(was, was + 1), here)
            else:
                yield Run(Change.ADDED, range(origin, origin), here)
        if origin < len(before) and place < len(after):
            yield Run(Change.EQUAL, range(origin, origin + 1), range(place, place + 1))
        done_before = origin + 1
        done_after = place + 1


def _joined(first: Run, second: Run) -> Run | None:
    """Two runs as one, if the second goes on where the first one ends."""
    goes_on = (
        first.change == second.change
        and first.before.stop == second.before.start
        and first.after.stop == second.after.start
    )
    if not goes_on:
        return None
    return Run(
        first.change,
        range(first.before.start, second.before.stop),
        range(first.after.start, second.after.stop),
    )


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most pairs that can be kept so that their second numbers grow, as the first ones do.

    Of pairs that could end a subsequence of some length, the one with the least second number is
    kept: these numbers grow with the length, so the place of the next one is searched by halves
    (patience sorting).
    """
    ends: list[int] = []
    of_length: list[int] = []
    previous: list[int] = []
    for index, (_, number) in enumerate(pairs):
        length = len(ends) if not ends or number > ends[-1] else bisect(ends, number)
        previous.append(of_length[length - 1] if length else -1)
        # A slice, since it also puts one at the end.
        ends[length : length + 1] = [number]
        of_length[length : length + 1] = [index]
    subsequence = []
    index = of_length[-1] if of_length else -1
    while index >= 0:
        subsequence.append(pairs[index])
        index = previous[index]
    return subsequence[::-1]
