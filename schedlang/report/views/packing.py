"""Columns of numbers, packed for the page: a schedule of a quarter of a million ops in some hundred
kilobytes. data.js unpacks them.

A column becomes whole numbers, each the difference to the one before it. Of all these differences
first the lowest bytes are written, then the next ones: so what repeats in a schedule repeats in
the bytes too, and is packed well.
"""

import zlib
from base64 import b64encode
from collections.abc import Sequence
from math import floor, gcd, log10
from typing import Any

import numpy as np
from attrs import define, field

#: Times and amounts are kept to so many digits, more than can be seen.
_DIGITS = 9


@define
class Packer:
    """Columns that are packed together."""

    parts: list[bytes] = field(factory=list)

    def whole(self, values: Sequence[int] | np.ndarray[Any, Any]) -> int:
        """Add a column of whole numbers; returns how many."""
        numbers = np.asarray(values, np.int64)
        # Four bytes for each difference, the lowest first:
        #
        #     numbers        1000           1010           1020
        #     differences    1000           10             10
        #     bytes          E8 03 00 00    0A 00 00 00    0A 00 00 00
        #     written        E8 0A 0A  03 00 00  00 00 00  00 00 00
        steps = np.diff(numbers, prepend=0).astype("<i4")
        self.parts.append(steps.view(np.uint8).reshape(-1, 4).T.tobytes())
        return len(numbers)

    def packed(self) -> str:
        """All columns, in the order in which they were added, as text."""
        return b64encode(zlib.compress(b"".join(self.parts), 9)).decode()


@define
class Ticks:
    """Numbers as whole multiples of one tick, which is `numerator / denominator`."""

    numerator: float
    denominator: float

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray[Any, Any]]) -> "Ticks":
        """The longest tick of which all numbers in some columns are multiples, to nine digits."""
        most = max(
            (float(np.abs(array).max(initial=0.0)) for array in arrays), default=0.0
        )
        # The largest number has nine digits before the point then, so all are whole to as many
        # digits.
        power = floor(log10(most)) + 1 - _DIGITS if most else 0
        # A tick is kept as a fraction: a float has 1000 exactly, and 0.001 not.
        tick = cls(10.0 ** max(power, 0), 10.0 ** max(-power, 0))
        common = gcd(*(int(np.gcd.reduce(tick.count(array))) for array in arrays)) or 1
        return cls(tick.numerator * common, tick.denominator)

    def count(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """How many ticks some numbers are."""
        scaled = values * self.denominator / self.numerator
        return np.rint(scaled).astype(np.int64)
