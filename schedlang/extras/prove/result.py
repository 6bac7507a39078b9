"""The result of a proof for all sizes: a verdict for each transport, figures as formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from attrs import field, frozen

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.rendering import to_json


@frozen
class Verdict:
    """The verdict on one transport. The sizes of a program are divided into those at which it is
    `proved`, `wrong`, `refused` (by its own `require`) and `unknown`. Each field is a condition on
    the parameters in the program's words, and empty if there are no such sizes.

    A search pass has no formula: at the sizes `followed`, the program is proved if its passes go on
    as they did at smaller sizes. `pattern` says up to which size that was observed.

    `reason` says why sizes are unknown. `smallest` is the smallest wrong size, and `diagnostics`
    are the compiler's errors there.
    """

    proved: str = ""
    followed: str = ""
    wrong: str = ""
    refused: str = ""
    unknown: str = ""
    reason: str = ""
    pattern: str = ""
    smallest: Mapping[str, int] | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the program is proved at every size that it does not refuse."""
        return bool(self.proved) and not (self.wrong or self.unknown or self.followed)

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if self.wrong:
            return "wrong"
        if self.unknown:
            return "not proved"
        if self.followed:
            return "followed"
        return "proved" if self.proved else "refused"


@frozen
class Law:
    """The formula of a figure: pieces, each a condition and an expression of the parameters.

    `figure` is `makespan`, `work`, `bubble`, `span`, `span_bubble`, or `peak(r)` of a rank.
    """

    figure: str
    pieces: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The formula on one line."""
        if len(self.pieces) == 1:
            condition, expression = self.pieces[0]
            return f"{self.figure} = {expression} for {condition}"
        pieces = "; ".join(
            f"{expression} for {condition}" for condition, expression in self.pieces
        )
        return f"{self.figure} = {pieces}"


def _nothing() -> None:
    """The `certify` of a proof without a certificate."""


@frozen
class Proof:
    """The proof of a program: the values of the given parameters, the names of the `free` ones, a
    verdict for each transport, and the formulas of its figures in the ideal execution.

    `claims` are its assertions `for all` sizes; they hold where the verdict is proved. `argument`
    names the method of the proof. `certify` makes the `certificate`, or None where nothing is
    proved.
    """

    name: str
    params: Mapping[str, int]
    free: tuple[str, ...]
    verdicts: Mapping[str, Verdict]
    laws: tuple[Law, ...] = ()
    claims: tuple[str, ...] = ()
    argument: str = ""
    certify: Callable[[], Mapping[str, Any] | None] = field(
        default=_nothing, repr=False, eq=False
    )

    @cached_property
    def certificate(self) -> Mapping[str, Any] | None:
        """The certificate, which a checker reads that does not trust the prover. It takes a while,
        so it is made on demand. ValueError where this proof has no certificate.
        """
        return self.certify()

    @property
    def holds(self) -> bool:
        """Whether the program is proved on all transports."""
        return all(verdict.holds for verdict in self.verdicts.values())

    @property
    def title(self) -> str:
        """The program, its given parameters and its free ones."""
        given = ", ".join(f"{name} = {value}" for name, value in self.params.items())
        return f"{self.name} ({', '.join(filter(None, [given, 'any ' + ' and '.join(self.free)]))})"

    @property
    def text(self) -> str:
        """The proof as `schedc check` prints it, without the compiler's errors."""
        lines = [self.title]
        width = max(map(len, self.verdicts))
        for transport, verdict in self.verdicts.items():
            for number, line in enumerate(_lines(verdict)):
                lines.append(f"  {'' if number else transport:<{width}}  {line}")
        lines += [f"  {law.text}" for law in self.laws]
        is_proved = "proved" if self.holds else "not proved"
        lines += [f"  {is_proved} for all: {claim}" for claim in self.claims]
        if self.argument:
            lines.append(f"  {self.argument}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The proof as JSON, without the certificate."""
        return {
            "name": self.name,
            "params": dict(self.params),
            "free": list(self.free),
            "verdicts": [
                {
                    "transport": transport,
                    "verdict": verdict.word,
                    **{name: getattr(verdict, name) for name in _TEXTS},
                    "smallest": dict(verdict.smallest) if verdict.smallest else None,
                    "diagnostics": list(map(to_json, verdict.diagnostics)),
                }
                for transport, verdict in self.verdicts.items()
            ],
            "laws": [
                {
                    "figure": law.figure,
                    "pieces": [
                        {"where": condition, "value": expression}
                        for condition, expression in law.pieces
                    ],
                }
                for law in self.laws
            ],
            "claims": [{"claim": claim, "proved": self.holds} for claim in self.claims],
            "argument": self.argument,
        }


#: The fields of a verdict that are texts, in the order of its JSON.
_TEXTS = ("proved", "followed", "wrong", "refused", "unknown", "pattern", "reason")


def _lines(verdict: Verdict) -> list[str]:
    lines = []
    if verdict.proved:
        lines.append(f"proved for {verdict.proved}")
    if verdict.followed:
        lines.append(f"proved for {verdict.followed}, {verdict.pattern}")
    if verdict.wrong:
        lines.append(f"wrong for {verdict.wrong}")
    if verdict.unknown:
        lines.append(f"not proved for {verdict.unknown}: {verdict.reason}")
    if verdict.refused:
        lines.append(f"refused by the program for {verdict.refused}")
    return lines
