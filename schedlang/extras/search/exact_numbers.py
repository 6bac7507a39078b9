"""Sums and parts of numbers that floats stand for."""

from collections.abc import Sequence

from schedlang.schedule.fixed_point import fixed_point, meant


def added(numbers: Sequence[float]) -> float:
    """The sum of some numbers: the nearest float, if the sum is known exactly."""
    fixed = fixed_point(numbers)
    return float(fixed.numbers(fixed.counts(numbers).sum()))


def part(number: float, parts: int) -> float:
    """A part of a number, as the nearest float."""
    return float(meant(number) / parts)
