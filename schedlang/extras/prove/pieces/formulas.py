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

from schedlang.extras.prove.pieces.expansion import divide
from schedlang.extras.prove.pieces.linear import (
    Linear,
    NotLinear,
    listed_for_all,
    number,
)
from schedlang.extras.prove.pieces.pieces import (
    ZERO,
    Pair,
    at_round,
    is_negative,
    minus,
    plus,
    times,
)
from schedlang.extras.prove.pieces.start_times import Timed
from schedlang.language.arithmetic import decimal, quotient, rest
from schedlang.language.claims import AMOUNTS, TIMES, condition_of
from schedlang.language.codegen import variable
from schedlang.language.faults import Fault
from schedlang.language.sites import ClaimSite
from schedlang.language.stages import stage_functions
from schedlang.schedule.actions import is_collective
from schedlang.schedule.schedule import Claim, Schedule


@frozen(kw_only=True)
class Held:
    """What each rank holds at most, of activations and of versions of weights, and the staleness of
    gradients.
    """

    peak: tuple[Pair, ...]
    versions: tuple[int, ...]
    staleness: int = 0

    def of(self, name: str) -> Any:
        """NotLinear: a schedule without a flush has no figure of time."""
        raise NotLinear(f"`{name}` of a schedule without a flush")


@frozen(kw_only=True)
class Figures(Held):
    """All figures of a program with a flush, for any n."""

    makespan: Pair
    work: Pair
    span: Pair

    def of(self, name: str) -> Any:
        """A figure of time by its name in programs."""
        match name:
            case "bubble":
                return minus(self.makespan, self.work)
            case "span_bubble":
                return minus(self.span, self.work)
        return getattr(self, name)

    def named(self) -> dict[str, Pair]:
        """All figures by name, with the peak of each rank."""
        peaks = {f"peak({rank})": peak for rank, peak in enumerate(self.peak)}
        return {name: self.of(name) for name in NAMES} | peaks


#: The figures of a whole schedule, in the order in which they are printed.
NAMES = ("makespan", "work", "bubble", "span", "span_bubble")


def figures_of(timed: Sequence[Timed], schedules: Sequence[Schedule]) -> Figures:
    """The figures that follow from pieces with start times; `schedules` are those at n = 0, 1, …"""
    ranks = range(len(schedules[0].ranks))
    pieces = [[each for each in timed if each.rank == rank] for rank in ranks]
    starts = [_first_start(own) for own in pieces if own]
    ends = [
        at_round(own[-1].end(-1), minus(own[-1].piece.rounds, (1, 0)))
        for own in pieces
        if own
    ]
    busy = [
        _sum(times(each.piece.rounds, sum(each.takes)) for each in own)
        for own in pieces
    ]
    spans = [minus(end, start) for end, start in zip(ends, starts, strict=True)]
    first = _negative(largest([_negative(start) for start in starts]))
    return Figures(
        makespan=minus(largest(ends), first),
        work=largest(busy),
        span=largest(spans),
        peak=tuple(_peak(own, schedules) for own in pieces),
        # With one optimizer step at the end there is one version of the weights.
        versions=(1,) * len(ranks),
    )


def _first_start(pieces: Sequence[Timed]) -> Pair:
    """When the first op of a rank starts; gathers and sums do not count."""
    return next(
        start[:2]
        for each in pieces
        for batch, start in zip(each.piece.batches, each.starts, strict=True)
        if not is_collective(batch[0].kind)
    )


def largest(numbers: Sequence[Pair]) -> Pair:
    """The largest number for all n; NeedsBase if it changes with n."""
    best = numbers[0]
    for other in numbers[1:]:
        if other != best and is_negative(minus(best, other)):
            best = other
    return best


def _negative(number: Pair) -> Pair:
    return minus(ZERO, number)


def _sum(numbers: Any) -> Pair:
    total: Pair = ZERO
    for each in numbers:
        total = plus(total, each)
    return total


def held_by(schedules: Sequence[Schedule]) -> Callable[[int, int], Pair]:
    """A function that gives how much memory an op of a kind and stage adds. It may depend on n,
    since a gather may hold memory for each microbatch.
    """
    amounts = [schedule.costs.memory(schedule.layout) for schedule in schedules]

    def of(kind: int, stage: int) -> Pair:
        first, second, *others = (
            each.fixed.exact(each[kind][stage]) for each in amounts
        )
        by_n = second - first
        if any(other != first + by_n * n for n, other in enumerate(others, 2)):
            raise NotLinear("what a gather holds goes up by no one number")
        return first, by_n

    return of


def _peak(pieces: Sequence[Timed], schedules: Sequence[Schedule]) -> Pair:
    """The most that a rank holds. In a batch, first all ops allocate, then all free."""
    amount_of = held_by(schedules)
    held: Pair = ZERO
    #: What it holds at the first and the last round of each piece, when it holds more than before.
    levels: set[Pair] = {ZERO}
    for each in pieces:
        within: Pair = ZERO
        seen: set[Pair] = {ZERO}
        for batch in each.piece.batches:
            most = left = within
            for op in batch:
                amount = amount_of(op.kind, op.stage)
                if not is_negative(amount):
                    most = plus(most, amount)
                # Recomputation is the same for all microbatches of a stage, so any one will do.
                if schedules[0].keeps(op.kind, op.stage, 0):
                    left = plus(left, amount)
            seen.add(most)
            within = left
        # Each round adds the same amount, so the peak is in the first or the last one.
        before_last = _product(minus(each.piece.rounds, (1, 0)), within)
        for change in seen:
            levels |= {plus(held, change), plus(plus(held, before_last), change)}
        held = plus(plus(held, before_last), within)
    return largest(_upper(levels))


def _product(rounds: Pair, amount: Pair) -> Pair:
    if rounds[1] and amount[1]:
        raise NotLinear("what a round of a loop holds depends on `microbatches`")
    return times(rounds, amount[0]) if rounds[1] else times(amount, rounds[0])


def _upper(levels: set[Pair]) -> list[Pair]:
    """The largest of the numbers with the same slope, for each slope."""
    best: dict[Any, Any] = {}
    for constant, by_n in levels:
        best[by_n] = max(constant, best.get(by_n, constant))
    return [(constant, by_n) for by_n, constant in best.items()]


# Claims


def claim_holds(claim: Claim, figures: Held, schedule: Schedule) -> bool:
    """Whether a claim holds for all n; Fault if it cannot be evaluated."""
    site: ClaimSite = claim.statement
    held = schedule.stages_of(claim.rank) if claim.rank is not None else []
    names = {
        "decimal": decimal,
        "divide": divide,
        "divide_quotient": quotient,
        "divide_rest": rest,
        "multiply": lambda left, right, _: left * right,
        "listed": listed_for_all,
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
    return _value(figures.of(name), as_decimal)


def _of_rank(values: Sequence[Any], rank: Any = None) -> Any:
    if rank is None:
        return max(values)
    if isinstance(rank, Linear) or rank not in range(len(values)):
        raise Fault("no-such-rank", f"rank {rank}, there are {len(values)} ranks", 0)
    return values[int(rank)]


def _value(pair: Pair, as_decimal: bool) -> Any:
    constant, by_n = map(Fraction, pair) if as_decimal else pair
    return number(constant, by_n)


def in_microbatches(pair: Pair, base: int, period: int) -> Pair:
    """A number in n as a number in microbatches = base + period * n."""
    slope = Fraction(pair[1]) / period
    return Fraction(pair[0]) - slope * base, slope


def expression(pair: Pair) -> str:
    """The expression `constant + slope * microbatches`, as a program would write it."""
    constant, slope = map(Fraction, pair)
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
