"""Sets of numbers of microbatches, and their text as conditions of a program."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from attrs import define, field

#: The most remainders that a condition lists.
_FEW = 8


@define
class Sizes:
    """A set of numbers: single ones, and `progressions` (start, period) that go on for ever."""

    single: set[int] = field(factory=set)
    progressions: list[tuple[int, int]] = field(factory=list)

    def __contains__(self, number: int) -> bool:
        return number in self.single or any(
            number >= start and (number - start) % period == 0
            for start, period in self.progressions
        )

    def __bool__(self) -> bool:
        return bool(self.single or self.progressions)

    @property
    def least(self) -> int:
        """The smallest number."""
        return min([*self.single, *(start for start, _ in self.progressions)])

    def text(self, name: str = "microbatches") -> str:
        """The set as a condition on a parameter."""
        if not self:
            return ""
        if not self.progressions:
            return " or ".join(_ranges(self.single, name))
        period = lcm(*(period for _, period in self.progressions))
        # From here on, only the progressions matter.
        first = max([0, *self.single]) + 1
        first = max([first, *(start for start, _ in self.progressions)])
        # The remainders that occur in one whole period, then as text:
        #
        #     {3} and 5 + 2n, 6 + 4n      of 6 .. 9 it has the rests 2 3 1: "% 4 != 0"
        rests = [
            number % period for number in range(first, first + period) if number in self
        ]
        # Use the shortest period with the same numbers.
        for shorter in range(1, period + 1):
            if period % shorter == 0:
                short = {rest % shorter for rest in rests}
                if len(short) * (period // shorter) == len(rests):
                    period = shorter
                    rests = sorted(short)
                    break
        # Single numbers before it that fit the period belong to it.
        while first > 1 and ((first - 1) in self) == ((first - 1) % period in rests):
            first -= 1
        while (first % period) not in rests:
            first += 1
        texts = _ranges({number for number in range(1, first) if number in self}, name)
        tail = f"{name} >= {first}"
        if period > 1 and len(rests) == 1:
            tail += f" and {name} % {period} == {rests[0]}"
        elif period > 1 and len(rests) == period - 1:
            missing = next(rest for rest in range(period) if rest not in rests)
            tail += f" and {name} % {period} != {missing}"
        elif period > 1:
            few = ", ".join(map(str, rests[:_FEW])) + (
                ", …" if len(rests) > _FEW else ""
            )
            tail += f" and {name} % {period} in {{{few}}}"
        return " or ".join([*texts, tail])


def _ranges(numbers: Iterable[int], name: str) -> list[str]:
    """Conditions for finitely many numbers: `a == 3`, `5 <= a <= 7`."""
    texts = []
    ordered = sorted(numbers)
    at = 0
    while at < len(ordered):
        end = at
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        if end > at:
            texts.append(f"{ordered[at]} <= {name} <= {ordered[end]}")
        else:
            texts.append(f"{name} == {ordered[at]}")
        at = end + 1
    return texts
