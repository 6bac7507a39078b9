"""Mistakes met while a program runs: where, on which rank, and with which values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
