"""What there is to say of each number that costs are given with: the metadata of the fields of
`Costs`.
"""

from collections.abc import Iterable, Iterator
from numbers import Rational
from typing import Any, Literal

import numpy as np
from attrs import field, frozen

from schedlang.diagnostics.wrong_arguments import check_number, check_whole, shown

#: The largest number that is taken: sums and products of such ones are still numbers.
_MOST = 1e100

#: How deep lists are nested. The number of a stage may be a list with one for each microbatch, and
#: that of a microbatch one for each of its slices, where a cost is of a `unit`.
_DEPTHS = {"number": 0, "whole": 0, "stage": 1, "rank": 1, "link": 2, "unit": 3}


@frozen
class Cost:
    """The description of a field of `Costs`.

    `shape` says whether the field is one number, or a list with a number for each stage, rank, or
    link between ranks; or for each unit, which is a microbatch on a stage, or a slice of it.
    Messages use the name in `called`, or else the name of the field. `default` stands in for a cost
    that is not given: a number, or another field of the group; with None, `Costs` works it out. No
    number may be below `least`. Fields with the same word in `together` depend on each other, as
    all fields of transfers do: costs that give one of them take none of the others from elsewhere.
    """

    group: Literal[
        "time", "latency", "bandwidth", "link", "size", "memory", "bytes", "room"
    ]
    shape: Literal["number", "whole", "stage", "rank", "link", "unit"]
    called: str = ""
    default: float | str | None = 0.0
    least: float = 0.0
    together: str = ""

    @property
    def depends_on(self) -> str:
        """The word that fields have in common that depend on each other."""
        transfers = ("latency", "bandwidth", "link", "size")
        if self.group in transfers and not self.together:
            return "transfers"
        return "memory" if self.group == "memory" else self.together

    @property
    def is_single(self) -> bool:
        """Whether the field is one number and never a list."""
        return _DEPTHS[self.shape] == 0

    @property
    def gives_back(self) -> bool:
        """Whether the cost may be negative, since an op may give memory back."""
        return self.least < 0

    def check(self, name: str, given: Any) -> None:
        """TypeError for what is no number, ValueError for a number that cannot be this cost."""
        if self.shape == "whole":
            check_whole(name, given, least=1)
        elif self.is_single:
            check_number(name, given)
            if not self.least <= given <= _MOST:
                raise ValueError(
                    f"`{name}` is {given:g}: it must be a number from {self.least:g} to {_MOST:g}"
                )
        else:
            self._check_list(name, given)

    def _check_list(self, name: str, values: Any) -> None:
        is_list = isinstance(values, tuple)
        numbers = list(_leaves(values, _DEPTHS[self.shape])) if is_list else None
        if numbers is None or not all(map(_is_number, set(map(type, numbers)))):
            wanted = "numbers, one for all stages or one for each, such as (1.0,)"
            raise TypeError(f"`{name}` is {shown(values)}: it must be {wanted}")
        if not numbers or not all(self.least <= value <= _MOST for value in numbers):
            raise ValueError(
                f"`{name}` must be numbers from {self.least:g} to {_MOST:g}, not {shown(values)}"
            )
        if self.shape == "link":
            _check_square(name, values)


def time_of(op: str, default: float | str = 0.0, together: str = "") -> Any:
    """A field for the duration of an op, which may differ by microbatch."""
    return cost("time", "unit", f"durations of {op}", default, together=together)


def memory_of(op: str, default: float | None = 0.0) -> Any:
    """A field for what an op adds to the memory of its rank, or gives back."""
    called = f"memories of {op}"
    return cost("memory", "unit", called, default, -_MOST)


def bandwidth() -> Any:
    """A field for the bytes that a link takes in a unit of time."""
    return cost("bandwidth", "number", least=1 / _MOST)


def cost(*about: Any, **more: Any) -> Any:
    """A field of `Costs`, with the arguments of `Cost`."""
    known = Cost(*about, **more)
    converter = None if known.is_single else _tuple
    return field(default=None, converter=converter, metadata={"cost": known})


def leaves(values: Any) -> Iterator[Any]:
    """All numbers in a cost, which may be nested tuples."""
    return _leaves(values if isinstance(values, tuple) else (values,), 3)


def _leaves(values: tuple[Any, ...], depth: int) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple) and depth > 1 and value:
            yield from _leaves(value, depth - 1)
        else:
            yield value


def _tuple(values: Any) -> Any:
    """Nested lists as nested tuples. What is no list is left to `Cost.check`."""
    # Numbers of numpy count as what they are.
    if isinstance(values, np.number):
        return float(values)
    if isinstance(values, str) or not isinstance(values, Iterable):
        return values
    return tuple(map(_tuple, values))


def _is_number(kind: type[Any]) -> bool:
    """Whether numbers of a type may be costs. Fractions may: they are exact."""
    return kind is not bool and issubclass(kind, (float, Rational))


def _check_square(name: str, rows: tuple[Any, ...]) -> None:
    """ValueError unless there are as many numbers in each row as there are rows."""
    for row in rows:
        if not isinstance(row, tuple) or len(row) != len(rows):
            raise ValueError(
                f"`{name}` must have a row for each rank, with a number for each rank: it has "
                f"{len(rows)} rows, and one of them is {shown(row)}"
            )
