"""Mistakes met while a program runs: where, on which rank, and with which values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from schedlang.language.scopes import LARGEST

NO_LABELS: Mapping[int, str] = MappingProxyType({})


class Fault(Exception):
    """A mistake met while a program runs; `location` is an index into the program's spans.

    `labels` say what is at that location, and at others.
    """

    def __init__(
        self,
        code: str,
        message: str,
        location: int,
        help: str | None = None,
        labels: Mapping[int, str] = NO_LABELS,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.location = location
        self.help = help
        self.labels = labels


@frozen
class Met:
    """A fault, the rank whose run met it, and the values its names had there."""

    fault: Fault
    rank: int | None
    values: str


def values_text(values: Mapping[str, int]) -> str:
    """Names and values as a note shows them; very large numbers say nothing."""
    return ", ".join(
        f"{name} = {number_text(value)}"
        for name, value in values.items()
        if abs(value) <= LARGEST
    )


def number_text(value: Any) -> str:
    """A number of a program; of a decimal, as many digits as one looks at."""
    return str(int(value)) if value == int(value) else f"{float(value):.10g}"
