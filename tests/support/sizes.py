"""How much `make test` tries, and how much it leaves to `make large`."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")

#: The name of hypothesis's profile with which `make large` runs; the other one is for `make test`.
LARGE = "large"
USUAL = "usual"
#: How many times as many examples `make large` makes up.
MORE = 3
#: Of a long list, `make test` has one value in so many: no divisor of 12 or 16, as lists that are
#: products would be cut at the same places.
FEW = 5


def sizes(values: Iterable[T], is_large: Callable[[T], bool]) -> list[object]:
    """The values for a test's parameter, the large ones behind the marker `large`: they find what
    smaller ones do not reach, once the rest is right.
    """
    return [
        pytest.param(value, marks=pytest.mark.large) if is_large(value) else value
        for value in values
    ]


def shares(values: Iterable[T]) -> list[object]:
    """Two lists of the values, for a parameter of a test that goes through a list on the same
    processes: a few values for `make test`, and the others for `make large`.
    """
    listed = list(values)
    few = listed[::FEW]
    others = [value for value in listed if value not in few]
    return [
        pytest.param(few, id="few", marks=pytest.mark.core),
        pytest.param(others, id="others"),
    ]


def examples(count: int, usual: int | None = None, **more: Any) -> settings:
    """So many examples for a test with `make large`, and a part of them, or a `usual` number, with
    `make test`; `more` is what else hypothesis is to be told.
    """
    is_large = settings.get_current_profile_name() == LARGE
    fewer = count // MORE if usual is None else usual
    return settings(max_examples=count if is_large else fewer, **more)


#: How many steps a training has that is compared with one process, loss by loss and in the end weight
#: by weight: what goes wrong does so by the third, where optimizers have state and buffers are used
#: again. More steps only go on.
STEPS = sizes([5, 20], lambda steps: steps > 5)
