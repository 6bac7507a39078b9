"""Mistakes met while a program runs: where, on which rank, and with which values."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from attrs import frozen

from schedlang.language.scopes import LARGEST


class Fault(Exception):
    """A mistake met while a program runs; `place` is an index into the program's spans."""

    def __init__(self, code: str, message: str, place: int, help: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.place = place
        self.help = help


@frozen
class Met:
    """A fault, the rank whose run met it, and the values its names had there."""

    fault: Fault
    rank: int | None
    values: str


def values_at(traceback: TracebackType | None) -> str:
    """The program's names and values where a fault was met: `r = 0, m = 3`."""
    values: dict[str, int] = {}
    while traceback is not None:
        found = (
            traceback.tb_frame.f_locals if traceback.tb_frame.f_code.co_name == "program" else {}
        )
        values |= {
            name[2:]: int(found[name])
            for name in found
            if name[:2] == "v_" and isinstance(found[name], int)
        }
        traceback = traceback.tb_next
    return values_text(values)


def values_text(values: Mapping[str, int]) -> str:
    """Names and values as a note shows them; very large numbers say nothing."""
    return ", ".join(f"{name} = {value}" for name, value in values.items() if abs(value) <= LARGEST)
