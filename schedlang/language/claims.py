"""What a program claims of its schedule with `assert`, held against the schedule's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from attrs import evolve

from schedlang.diagnostics.diagnostic import CompileError, number_text
from schedlang.language import syntax
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
from schedlang.language.scopes import FIGURES_OF_RANKS
from schedlang.language.sites import ClaimSite, Figures
from schedlang.language.stage_functions import stage_functions
from schedlang.language.trees import Itself
from schedlang.on_demand import on_demand
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Claim, Schedule

if TYPE_CHECKING:
    from fractions import Fraction

    from schedlang.diagnostics.repair import Edit
    from schedlang.language.wrong_claims import (
        is_told,
        untold,
        what_holds,
        wrong_claim,
    )
else:
    # For claims that do not hold, or about figures that are rounded.
    is_told = on_demand("schedlang.language.wrong_claims.is_told")
    untold = on_demand("schedlang.language.wrong_claims.untold")
    what_holds = on_demand("schedlang.language.wrong_claims.what_holds")
    wrong_claim = on_demand("schedlang.language.wrong_claims.wrong_claim")

#: The figures of time, and those of memory.
TIMES = frozenset(["makespan", "work", "bubble", "span", "span_bubble"])
AMOUNTS = frozenset(["peak"])


def check_claims(schedule: Schedule, figures: Figures, given: Costs = UNIT) -> None:
    """CompileError for every claim that does not hold, with the values in it.

    A program's claims are about its own costs. If a user has `given` others, claims about figures
    that depend on these are not checked.
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
        false = {finding.place for finding in findings if finding.code == "assert"}
        edits = {place: _edits(schedule, claims, figures, place) for place in false}
        findings = [evolve(each, edits=edits.get(each.place, ())) for each in findings]
        raise CompileError(diagnose(schedule, findings))


def _edits(
    schedule: Schedule, claims: Sequence[Claim], figures: Figures, place: int
) -> tuple[Edit, ...]:
    """Edits of the claim at a place of the program after which it holds, on all ranks."""
    there = [claim for claim in claims if claim.location == place]

    def value_of(claim: Claim) -> Callable[[syntax.Node], Any]:
        names = _names(schedule, figures, claim)
        return lambda node: _value(claim.statement, node, names)

    values = list(map(value_of, there))
    return what_holds(schedule.source, there[0].statement.condition, values)


def _rounded(figures: Figures) -> dict[str, float]:
    """The figures that may be rounded, each with a number that is at least as large."""
    found: dict[str, float] = {}
    if figures.rounded_makespan is not None:
        found |= dict.fromkeys(TIMES, figures.rounded_makespan)
    if figures.rounded_peak is not None:
        found |= dict.fromkeys(AMOUNTS, figures.rounded_peak)
    return found


def _names(schedule: Schedule, figures: Figures, claim: Claim) -> dict[str, Any]:
    """The values of all names in a claim, figures included."""
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
    """The stage of a rank's chunk."""
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


@lru_cache(64)
def _compiled(
    site: Itself[ClaimSite],
    node: Itself[syntax.Node],
    writer: Itself[type[Codegen]],
) -> CodeType:
    """Python that binds an expression of a claim as a function `value`, and before it the functions
    that the expression calls.
    """
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
    names = _names(schedule, figures, claim)

    def value(node: syntax.Node) -> Any:
        return _value(site, node, names)

    try:
        if rounded and not is_told(site, value, rounded):
            return untold(schedule, claim)
        if value(site.condition):
            return None
        return wrong_claim(schedule, claim, figures, value)
    except Fault as fault:
        return Finding(fault.code, fault.message, rank, claim.location, help=fault.help)
    except (RecursionError, MemoryError, SyntaxError):
        return Finding(
            "nesting", "the claim is nested too deeply", rank, claim.location
        )


def _figure(figures: Figures, name: str, as_decimal: bool) -> Any:
    """The value of a figure; with `as_decimal`, figures of time and memory are decimals. A figure
    of ranks becomes a function of a rank, which gives the highest of all ranks without an argument.
    """
    value = getattr(figures, name)
    as_decimal &= name in TIMES | AMOUNTS
    if name not in FIGURES_OF_RANKS:
        return as_fraction(value) if as_decimal else value
    values = list(map(as_fraction, value)) if as_decimal else value
    return partial(_of_rank, name, values)


def _of_rank(
    name: str, values: Sequence[int | Fraction], rank: int | Fraction | None = None
) -> int | Fraction:
    """The figure of a rank, or the highest of all ranks. The rank may be computed from figures."""
    if rank is None:
        return max(values)
    if rank not in range(len(values)):
        message = (
            f"`{name}({number_text(rank)})`, there are ranks 0 to {len(values) - 1}"
        )
        raise Fault("no-such-rank", message, 0)
    return values[int(rank)]
