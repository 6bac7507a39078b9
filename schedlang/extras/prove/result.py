"""What was found out of a program for all its sizes: where it is proved, where it is wrong, and its
figures as formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from attrs import field, frozen

from schedlang.diagnostics.diagnostic import Diagnostic, to_json


@frozen
class Verdict:
    """Of a program on one transport: the sizes at which it is `proved`, `wrong`, `refused` by its
    own `require`, and those of which nothing is known, as `unknown`; each as constraints on its
    parameters in the program's words, or empty where there are none. At the sizes `followed` it is
    proved if its passes, which are searches, go on as they do at those before: `pattern` says up to
    where they were seen to.

    `reason` says why some sizes are unknown. `smallest` is the smallest size that is wrong, and
    `diagnostics` what compiling it says.
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
        """Whether it is proved wherever the program does not refuse to be."""
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
    """A figure as a formula of the parameters: pieces, each of a condition and an expression.

    The figure is `makespan`, `work`, `bubble`, `span`, `span_bubble`, or `peak(r)` of a rank.
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
    """No certificate."""


@frozen
class Proof:
    """A program for all its sizes: the values of the parameters that are given, the names of those
    that are `free`, a verdict for each transport, and its figures, in the ideal execution.

    `claims` are those that it makes `for all` sizes, which hold where the verdict says proved.
    `argument` says what the proof rests on. `certify` makes the `certificate`, which holds what a
    checker needs that does not trust the prover, or nothing where there is no proof.
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
        """The certificate: made when it is asked for, since it takes a while. ValueError where what
        is proved cannot be written as one.
        """
        return self.certify()

    @property
    def holds(self) -> bool:
        """Whether it is proved on all the transports."""
        return all(verdict.holds for verdict in self.verdicts.values())

    @property
    def title(self) -> str:
        """The program, the parameters that are given, and those that are free."""
        given = ", ".join(f"{name} = {value}" for name, value in self.params.items())
        return f"{self.name} ({', '.join(filter(None, [given, 'any ' + ' and '.join(self.free)]))})"

    @property
    def text(self) -> str:
        """All of it, for people; what is wrong at the smallest size is told apart."""
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
        """All but the certificate, for programs."""
        return {
            "name": self.name,
            "params": dict(self.params),
            "free": list(self.free),
            "verdicts": [
                {
                    "transport": transport,
                    "verdict": verdict.word,
                    "proved": verdict.proved,
                    "followed": verdict.followed,
                    "wrong": verdict.wrong,
                    "refused": verdict.refused,
                    "unknown": verdict.unknown,
                    "pattern": verdict.pattern,
                    "reason": verdict.reason,
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
