"""Which sizes `make test` tries, and which it leaves to `make large`."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def sizes(values: Iterable[T], is_large: Callable[[T], bool]) -> list[object]:
    """The values for a test's parameter, the large ones behind the marker `large`: they find what
    smaller ones do not reach, once the rest is right.
    """
    return [
        pytest.param(value, marks=pytest.mark.large) if is_large(value) else value
        for value in values
    ]
