"""What a program claims of its schedule with `assert`, held against the schedule's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from schedlang.diagnostics.diagnostic import CompileError, number_text
from schedlang.diagnostics.source import Source
from schedlang.language import expressions, syntax
from schedlang.language.arithmetic import (
    as_fraction,
    decimal,
    divide,
    listed,
    multiply,
    quotient,
    rest,
)
from schedlang.language.codegen import Codegen, variable
from schedlang.language.faults import Fault
from schedlang.language.sites import ClaimSite
from schedlang.language.stages import stage_functions
from schedlang.language.trees import Itself
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.fixed_point import exact_text
from schedlang.schedule.schedule import Claim, Schedule

if TYPE_CHECKING:
    from fractions import Fraction

#: The figures of time, and those of memory.
TIMES = frozenset(["makespan", "work", "bubble", "span", "span_bubble"])
AMOUNTS = frozenset(["peak"])
#: The figures in the order in which they are told: of the whole schedule, and of each rank.
_OF_ALL = ("makespan", "work", "bubble", "span", "span_bubble", "staleness")
_OF_RANKS = ("peak", "versions")
_TERMS = (
    expressions.Reference,
    expressions.Call,
    expressions.Element,
    expressions.OwnStage,
)
#: By such a share of them, figures may be rounded where they are not exact.
_ROUNDING = 1e-9
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


class Figures(Protocol):
    """The figures of a schedule: an attribute for each name of `schedlang.language.names.FIGURES`,
    those of ranks as sequences.

    Where sums of times, or of amounts of memory, are rounded, `rounded_makespan` and `rounded_peak`
    are numbers of which they all are a part.
    """

    @property
    def rounded_makespan(self) -> float | None:
        """The makespan, if times are rounded."""

    @property
    def rounded_peak(self) -> float | None:
        """The highest peak, if amounts are rounded."""


def check_claims(schedule: Schedule, figures: Figures, given: Costs = UNIT) -> None:
    """CompileError for every claim that does not hold, with the figures it is about.

    A program's claims are about its own costs: where a user has `given` others, those that these
    enter are not checked.
    """
    others: frozenset[str] = frozenset()
    if given.gives_times:
        others |= TIMES
    if given.gives_memory:
        others |= AMOUNTS
    claims = [
        claim for claim in schedule.claims if not claim.statement.figures & others
    ]
    rounded = _rounded(figures) if claims else {}
    checked = [_check(schedule, claim, figures, rounded) for claim in claims]
    findings = [finding for finding in checked if finding is not None]
    if findings:
        raise CompileError(diagnose(schedule, findings))


def _rounded(figures: Figures) -> dict[str, float]:
    """The figures that may be rounded, each with a number of which it is a part."""
    found: dict[str, float] = {}
    if figures.rounded_makespan is not None:
        found |= dict.fromkeys(TIMES, figures.rounded_makespan)
    if figures.rounded_peak is not None:
        found |= dict.fromkeys(AMOUNTS, figures.rounded_peak)
    return found


def _names(schedule: Schedule, figures: Figures, claim: Claim) -> dict[str, Any]:
    """What the names in a claim are, its figures included."""
    held = schedule.stages_of(claim.rank) if claim.rank is not None else []
    return {
        "decimal": decimal,
        "divide": divide,
        "divide_quotient": quotient,
        "divide_rest": rest,
        "multiply": multiply,
        "listed": listed,
        "own_stage": partial(_own_stage, held),
        **stage_functions(schedule.layout.pipelines),
        **{variable(name): value for name, value in claim.values.items()},
        **{
            variable(name): _figure(figures, name, claim.statement.has_decimals)
            for name in claim.statement.figures
        },
    }


def _own_stage(held: Sequence[int], number: int, location: int) -> int:
    """The stage that a rank holds as its chunk of a number."""
    if 0 <= number < len(held):
        return held[number]
    raise Fault(
        "no-such-stage", f"`stage({number})`, the rank holds {len(held)}", location
    )


def condition_of(
    site: ClaimSite, names: Mapping[str, Any], writer: type[Codegen] = Codegen
) -> Any:
    """The value of a claim's condition, by the values of its names, its functions and figures; the
    `writer` generates the Python that these are for.
    """
    return _value(site, site.condition, names, writer)


def _value(
    site: ClaimSite,
    node: syntax.Node,
    names: Mapping[str, Any],
    writer: type[Codegen] = Codegen,
) -> Any:
    """The value of an expression in a claim."""
    # `exec` writes into it.
    known = dict(names)
    exec(_compiled(Itself(site), Itself(node), Itself(writer)), known)
    return known["value"]()


@frozen
class _Judge:
    """Evaluates one claim: its site in the program, the text there, and the values of its names."""

    site: ClaimSite
    source: Source
    names: Mapping[str, Any]

    def holds(self) -> bool:
        """Whether the claim holds."""
        return bool(self.value(self.site.condition))

    def value(self, node: syntax.Node) -> Any:
        """The value of an expression in the claim."""
        return _value(self.site, node, self.names)

    def comparisons(self) -> Iterator[expressions.Binary]:
        """The comparisons that make the claim fail."""
        waiting: list[syntax.Node] = [self.site.condition]
        while waiting:
            node = waiting.pop(0)
            match node:
                case expressions.Binary("or", left, right):
                    waiting[:0] = [left, right]
                case expressions.Binary("and", left, right):
                    # What stands behind one that fails was never asked.
                    waiting[:0] = [right if self.value(left) else left]
                case expressions.Unary("not", operand):
                    waiting[:0] = [operand]
                case expressions.Binary(operator) if operator in _COMPARISONS:
                    yield node

    def is_told(self, rounded: Mapping[str, float]) -> bool:
        """Whether rounding decides about no comparison; of the figures that may be rounded, numbers
        of which they are a part are given.
        """
        waiting: list[syntax.Node] = [self.site.condition]
        while waiting:
            node = waiting.pop()
            waiting += expressions.children(node)
            names = expressions.references(node) & rounded.keys()
            if not names or not isinstance(node, expressions.Binary):
                continue
            if node.operator in _COMPARISONS:
                left = self.value(node.left)
                right = self.value(node.right)
                most = max(abs(left), abs(right), *map(rounded.__getitem__, names))
                if abs(left - right) <= _ROUNDING * most:
                    return False
        return True

    def sides(self, node: expressions.Binary) -> str:
        """A comparison with the values of its two sides."""
        text = self.text(node)
        left = self.value(node.left)
        right = self.value(node.right)
        of = number_text
        # What looks equal is told to its last digit, if it is not.
        if left != right and of(left) == of(right):
            of = exact_text
        values = f"{of(left)} {node.operator} {of(right)}"
        if text == values:
            return f"`{text}`"
        # Under a `not`, it is what holds that makes the claim fail.
        return f"`{text}` {'holds,' if self.value(node) else 'is'} {values}"

    def terms(self, node: syntax.Node) -> Iterator[str]:
        """The values of the names and calls within an expression."""
        for child in expressions.children(node):
            yield from self.terms(child)
        if isinstance(node, _TERMS):
            # Where it stands in a branch that was not taken, it need not have a value.
            with suppress(Fault):
                yield f"{self.text(node)} = {number_text(self.value(node))}"

    def text(self, node: syntax.Node) -> str:
        """An expression as the program has it, on one line."""
        return " ".join(self.source.text[node.span.start : node.span.end].split())


@lru_cache(64)
def _compiled(
    site: Itself[ClaimSite],
    node: Itself[syntax.Node],
    writer: Itself[type[Codegen]],
) -> CodeType:
    """Python that binds an expression of a claim as a function `value`, after those it calls."""
    codegen = writer.it(has_decimals=site.it.has_decimals, notes_variables=True)
    functions = [
        line for function in site.it.functions for line in codegen.statement(function)
    ]
    text = [*functions, f"def value(): return {codegen.expression(node.it)}"]
    return compile("\n".join(text), "<claim>", "exec")


def _check(
    schedule: Schedule, claim: Claim, figures: Figures, rounded: Mapping[str, float]
) -> Finding | None:
    """What is wrong with a claim, if anything is."""
    site: ClaimSite = claim.statement
    rank = claim.rank
    judge = _Judge(site, schedule.source, _names(schedule, figures, claim))
    try:
        if rounded and not judge.is_told(rounded):
            return Finding(
                "assert",
                f"`{judge.text(site.condition)}` cannot be told: costs have too many digits for "
                "sums of them to be exact",
                rank,
                claim.location,
                help="write the costs with fewer digits, or claim a little more or less",
            )
        if judge.holds():
            return None
        said = (
            f"the schedule claims: {site.reason}"
            if site.reason
            else "a claim does not hold"
        )
        failing = list(judge.comparisons())
        sides = "; ".join(map(judge.sides, failing))
        message = f"{said}: {sides}" if sides else said
        message += "" if claim.rank is None else f", on rank {claim.rank}"
        # A dictionary, since it keeps the order and has each term once.
        terms = dict.fromkeys(term for node in failing for term in judge.terms(node))
        label = f"where {', '.join(terms)}" if terms else ""
        return Finding(
            "assert",
            message,
            rank,
            claim.location,
            label,
            help=_text(schedule, figures),
        )
    except Fault as fault:
        return Finding(fault.code, fault.message, rank, claim.location, help=fault.help)
    except (RecursionError, MemoryError, SyntaxError):
        return Finding(
            "nesting", "the claim is nested too deeply", rank, claim.location
        )


def _text(schedule: Schedule, figures: Figures) -> str:
    """All figures."""
    texts = [f"{name} {number_text(getattr(figures, name))}" for name in _OF_ALL]
    for name in _OF_RANKS:
        values = " ".join(map(number_text, getattr(figures, name)))
        texts.append(f"{name} per rank {values}")
    frozen = ", ".join(map(str, schedule.layout.frozen))
    where = f" with the frozen stages {frozen}" if frozen else ""
    return f"the figures{where} are {', '.join(texts)}"


def _figure(figures: Figures, name: str, as_decimal: bool) -> Any:
    """A figure by its name, of time or memory `as_decimal` even if it is whole; one of ranks as a
    function of a rank, or of none for the highest.
    """
    value = getattr(figures, name)
    as_decimal &= name in TIMES | AMOUNTS
    if name not in _OF_RANKS:
        return as_fraction(value) if as_decimal else value
    values = list(map(as_fraction, value)) if as_decimal else value
    return partial(_of_rank, name, values)


def _of_rank(
    name: str, values: Sequence[int | Fraction], rank: int | Fraction | None = None
) -> int | Fraction:
    """A rank's figure, or the highest of all ranks; which rank may be a figure itself."""
    if rank is None:
        return max(values)
    if rank not in range(len(values)):
        message = (
            f"`{name}({number_text(rank)})`, there are ranks 0 to {len(values) - 1}"
        )
        raise Fault("no-such-rank", message, 0)
    return values[int(rank)]
