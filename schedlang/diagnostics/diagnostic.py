"""What is wrong with a program or a plan, as data; `schedlang.diagnostics.rendering` prints it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from schedlang.diagnostics.source import Label, Source
from schedlang.on_demand import on_demand

if TYPE_CHECKING:
    from schedlang.diagnostics.repair import Edit, Repair
    from schedlang.diagnostics.waiting_ranks import Wait

#: The largest number that a note shows.
_LARGEST_SHOWN = 10**18


@frozen
class Diagnostic:
    """One mistake: a code word, a message that can be read alone, the places in the program that
    it is about, and the way out.

    The first label is where the mistake is; without labels, the mistake is about `file` as a
    whole. `waits` says which ranks wait, and for whom. `edits` do what the help says, where that is
    as simple as another spelling; or they make a claim one that holds. A `repair` has been proved
    to work, and is shown in place of the help. A warning does not make a program wrong. `ranks` are
    those that a claim or a capacity is about, if it is not about all of the schedule.
    """

    code: str
    message: str
    labels: tuple[Label, ...] = ()
    source: Source | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    help: str | None = None
    file: str | None = None
    waits: tuple[Wait, ...] = ()
    severity: str = "error"
    repair: Repair | None = None
    edits: tuple[Edit, ...] = ()
    ranks: tuple[int, ...] = ()

    def with_note(self, note: str) -> Diagnostic:
        """The diagnostic with one more note."""
        return evolve(self, notes=(*self.notes, note))

    def with_waits(self, waits: tuple[Wait, ...]) -> Diagnostic:
        """The diagnostic with more to say of the ranks that wait, in its labels as well."""
        labels = tuple(label for wait in waits for label in wait.labels())
        return evolve(self, waits=waits, labels=labels or self.labels)


#: What adds advice to the diagnostics of an error that a script shows.
_advise: list[Callable[[CompileError], None]] = []


def advise_with(advise: Callable[[CompileError], None]) -> None:
    """Say what adds advice to errors. It stands above what raises them, and takes many trials: so
    it is asked when the text of an error is wanted.
    """
    _advise[:] = [advise]


class CompileError(Exception):
    """All that is wrong with a program or a plan; `diagnostics` is never empty."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        super().__init__(diagnostics)
        self.diagnostics = diagnostics
        #: The arguments of `advise` for what was compiled, until there is advice.
        self.compiled: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        if _advise and self.compiled is not None:
            _advise[0](self)
        to_text = on_demand("schedlang.diagnostics.rendering.to_text")
        return "\n\n".join(map(to_text, self.diagnostics))

    def __repr__(self) -> str:
        told = [
            f"{diagnostic.code}: {diagnostic.message}"
            for diagnostic in self.diagnostics[:1]
        ]
        more = len(self.diagnostics) - 1
        return f"<{type(self).__name__} {'; '.join(told)}{f'; {more} more' if more > 0 else ''}>"


class ParameterError(CompileError, ValueError):
    """Parameters that a program does not have, or has no value for: the mistake of the caller."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 rank`, `2 microbatches`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def number_text(value: Any) -> str:
    """A number of a program; of a decimal, as many digits as one looks at."""
    return str(int(value)) if value == int(value) else f"{float(value):.10g}"


def values_text(values: Mapping[str, int]) -> str:
    """Names and values as a note shows them; very large numbers are left out."""
    return ", ".join(
        f"{name} = {number_text(value)}"
        for name, value in values.items()
        if abs(value) <= _LARGEST_SHOWN
    )
