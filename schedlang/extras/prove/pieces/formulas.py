"""Makespan, work, span and peaks for any n, from the start times of pieces; and whether claims
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from math import lcm
from typing import Any

from attrs import frozen

from schedlang.extras.prove.pieces.expansion import ARITHMETIC
from schedlang.extras.prove.pieces.linear import (
    ZERO,
    Affine,
    Linear,
    NotLinear,
    number,
)
from schedlang.extras.prove.pieces.start_times import Timed
from schedlang.language.arithmetic import decimal, quotient, rest
from schedlang.language.claims import AMOUNTS, TIMES, condition_of
from schedlang.language.codegen import variable
from schedlang.language.faults import Fault
from schedlang.language.sites import ClaimSite
from schedlang.language.stage_functions import stage_functions
from schedlang.schedule.actions import is_collective
from schedlang.schedule.kept import keeps
from schedlang.schedule.schedule import Claim, Schedule


@frozen(kw_only=True)
class Held:
    """What each rank holds at most, of activations and of versions of weights, and the staleness of
    gradients.
    """

    peak: tuple[Affine, ...]
    versions: tuple[int, ...]
    staleness: int = 0


@frozen(kw_only=True)
class Figures(Held):
    """All figures of a program with a flush, for any n."""

    makespan: Affine
    work: Affine
    span: Affine

    @property
    def bubble(self) -> Affine:
        """The idle time of the busiest rank."""
        return self.makespan - self.work

    @property
    def span_bubble(self) -> Affine:
        """The idle time within the span."""
        return self.span - self.work


#: The figures of a whole schedule, in the order in which they are printed.
NAMES = ("makespan", "work", "bubble", "span", "span_bubble")


def named(figures: Any) -> dict[str, Any]:
    """All figures by name, with the peak of each rank."""
    peaks = {f"peak({rank})": peak for rank, peak in enumerate(figures.peak)}
    return {name: getattr(figures, name) for name in NAMES} | peaks


def figures_of(timed: Sequence[Timed], schedules: Sequence[Schedule]) -> Figures:
    """The figures that follow from pieces with start times; `schedules` are those at n = 0, 1, …"""
    ranks = range(len(schedules[0].ranks))
    pieces = [[each for each in timed if each.rank == rank] for rank in ranks]
    starts = [_first_start(own) for own in pieces if own]
    ends = [own[-1].end(-1).in_round(own[-1].piece.rounds - 1) for own in pieces if own]
    busy = [
        sum((each.piece.rounds * sum(each.takes) for each in own), ZERO)
        for own in pieces
    ]
    spans = [end - start for end, start in zip(ends, starts, strict=True)]
    first = -largest([-start for start in starts])
    return Figures(
        makespan=largest(ends) - first,
        work=largest(busy),
        span=largest(spans),
        peak=tuple(_peak(own, schedules) for own in pieces),
        # With one optimizer step at the end there is one version of the weights.
        versions=(1,) * len(ranks),
    )


def _first_start(pieces: Sequence[Timed]) -> Affine:
    """When the first op of a rank starts; gathers and sums do not count."""
    return next(
        start.in_round(ZERO)
        for each in pieces
        for batch, start in zip(each.piece.batches, each.starts, strict=True)
        if not is_collective(batch[0].kind)
    )


def largest(numbers: Sequence[Affine]) -> Affine:
    """The largest number for all n; NeedsBase if it changes with n."""
    best = numbers[0]
    for other in numbers[1:]:
        if other != best and (best - other).is_negative:
            best = other
    return best


def held_by(schedules: Sequence[Schedule]) -> Callable[[int, int], Affine]:
    """A function that gives how much memory an op of a kind and stage adds. It may depend on n,
    since a gather may hold memory for each microbatch.
    """
    amounts = [schedule.costs.memory(schedule.layout) for schedule in schedules]

    def of(kind: int, stage: int) -> Affine:
        first, second, *others = (
            each.fixed.exact(each[kind][stage]) for each in amounts
        )
        by_n = second - first
        if any(other != first + by_n * n for n, other in enumerate(others, 2)):
            raise NotLinear("what a gather holds goes up by no one number")
        return Affine(first, by_n)

    return of


def _peak(pieces: Sequence[Timed], schedules: Sequence[Schedule]) -> Affine:
    """The most that a rank holds. In a batch, first all ops allocate, then all free."""
    amount_of = held_by(schedules)
    held = ZERO
    #: What it holds at the first and the last round of each piece, when it holds more than before.
    levels: set[Affine] = {ZERO}
    for each in pieces:
        within = ZERO
        seen: set[Affine] = {ZERO}
        for batch in each.piece.batches:
            most = left = within
            for op in batch:
                amount = amount_of(op.kind, op.stage)
                if not amount.is_negative:
                    most += amount
                # Recomputation is the same for all microbatches of a stage, so any one will do.
                if keeps(schedules[0], op.kind, op.stage, 0):
                    left += amount
            seen.add(most)
            within = left
        # Each round adds the same amount, so the peak is in the first or the last one.
        before_last = _product(each.piece.rounds - 1, within)
        for change in seen:
            levels |= {held + change, held + before_last + change}
        held += before_last + within
    return largest(_upper(levels))


def _product(rounds: Affine, amount: Affine) -> Affine:
    if rounds.by_n and amount.by_n:
        raise NotLinear("what a round of a loop holds depends on `microbatches`")
    growing, factor = (rounds, amount) if rounds.by_n else (amount, rounds)
    return Affine(growing.constant * factor.constant, growing.by_n * factor.constant)


def _upper(levels: set[Affine]) -> list[Affine]:
    """The largest of the numbers with the same slope, for each slope."""
    best: dict[Any, Any] = {}
    for constant, by_n, _ in levels:
        best[by_n] = max(constant, best.get(by_n, constant))
    return [Affine(constant, by_n) for by_n, constant in best.items()]


# Claims


def claim_holds(claim: Claim, figures: Held, schedule: Schedule) -> bool:
    """Whether a claim holds for all n; Fault if it cannot be evaluated."""
    site: ClaimSite = claim.statement
    held = schedule.stages_of(claim.rank) if claim.rank is not None else []
    names = {
        "decimal": decimal,
        "divide_quotient": quotient,
        "divide_rest": rest,
        **ARITHMETIC,
        "own_stage": partial(_own_stage, held),
        **stage_functions(schedule.layout.pipelines),
        **{variable(name): value for name, value in claim.values.items()},
        **{variable(name): _figure(name, figures, site) for name in site.figures},
    }
    return bool(condition_of(site, names))


def _own_stage(held: Sequence[int], number: Any, location: int) -> int:
    if 0 <= number < len(held):
        return held[int(number)]
    raise Fault(
        "no-such-stage", f"`stage({number})`, the rank holds {len(held)}", location
    )


def _figure(name: str, figures: Held, site: ClaimSite) -> Any:
    as_decimal = site.has_decimals and name in TIMES | AMOUNTS
    match name:
        case "staleness":
            return figures.staleness
        case "versions":
            return partial(_of_rank, figures.versions)
        case "peak":
            values = [_value(of, as_decimal) for of in figures.peak]
            return partial(_of_rank, values)
    if not isinstance(figures, Figures):
        raise NotLinear(f"`{name}` of a schedule without a flush")
    return _value(getattr(figures, name), as_decimal)


def _of_rank(values: Sequence[Any], rank: Any = None) -> Any:
    if rank is None:
        return max(values)
    if isinstance(rank, Linear) or rank not in range(len(values)):
        raise Fault("no-such-rank", f"rank {rank}, there are {len(values)} ranks", 0)
    return values[int(rank)]


def _value(value: Affine, as_decimal: bool) -> Any:
    return number(*(map(Fraction, value) if as_decimal else value))


def in_microbatches(value: Affine, base: int, period: int) -> Affine:
    """A number in n as a number in microbatches = base + period * n."""
    slope = Fraction(value.by_n) / period
    return Affine(Fraction(value.constant) - slope * base, slope)


def expression(value: Affine) -> str:
    """The expression `constant + slope * microbatches`, as a program would write it."""
    constant, slope, _ = map(Fraction, value)
    below = lcm(constant.denominator, slope.denominator)
    factor = int(slope * below)
    add = int(constant * below)
    if not factor:
        text = str(add)
    else:
        text = "microbatches" if factor == 1 else f"{factor} * microbatches"
        if add:
            text += f" {'+' if add > 0 else '-'} {abs(add)}"
    if below == 1:
        return text
    return f"({text}) / {below}" if " " in text else f"{text} / {below}"
