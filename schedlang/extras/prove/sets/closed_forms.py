"""Closed forms: makespan, work, bubble, and the peak of each rank as functions of the sizes.

The makespan is that of the ideal execution at unit costs (`schedlang.extras.prove.sets.timing`).
The peak of a rank follows from its order alone: before each op, the activations taken so far less
those given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import combinations

import islpy as isl
from attrs import evolve, frozen

from schedlang.extras.prove.sets.counting import RANK, Many, how_many_before
from schedlang.extras.prove.sets.isl_functions import (
    between,
    constant,
    number,
    points,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    BASE,
    Number,
    Unreadable,
    digits,
    folded,
    most,
    multiple_of_base,
    of_number,
    simplified_number,
    union,
)
from schedlang.extras.prove.sets.outcome import Outcome
from schedlang.extras.prove.sets.statements import (
    STAGE,
    UPDATES,
    Line,
    Reading,
    Statement,
    sizes_only,
)
from schedlang.extras.prove.sets.timing import MICROBATCHES, makespan_of
from schedlang.language import syntax
from schedlang.schedule.costs import UNIT
from schedlang.schedule.kinds import MAKERS, OPS, REPEATS, Kind
from schedlang.schedule.layout import Layout, Pipeline

#: The base in which slices are counted.
_SLICES = "slices"
#: The figure that each rank has one of.
PEAK = "peak(r)"


@frozen(eq=False)
class Form:
    """A figure as a function of the sizes, and of RANK if each rank has one."""

    figure: str
    value: Number


def forms_of(outcome: Outcome, tree: syntax.Schedule) -> Iterator[Form]:
    """The closed forms that were found, at the sizes at which the program is proved."""
    reading = outcome.reading
    if sum([reading.is_stream, reading.in_base, _SLICES in reading.sizes]) > 1:
        # The figures would be products of three sizes.
        return
    costs = [item for item in tree.items if isinstance(item, syntax.Cost)]
    priced = [item for item in costs if not isinstance(item, syntax.PerRank)]
    if not any(isinstance(item, syntax.Memory) for item in priced):
        # Memory has no influence on times, so the peak may be missing alone.
        with suppress(Unreadable):
            yield Form(PEAK, _peak(outcome))
    if any(not isinstance(item, syntax.Memory) for item in priced):
        return
    makespan = next((each for each in _makespans(outcome) if each is not None), None)
    if makespan is not None:
        yield Form("makespan", makespan)
        with suppress(Unreadable):
            work = _work(outcome)
            yield Form("work", work)
            bubble = makespan.minus(work)
            yield Form("bubble", simplified_number(folded(bubble, bubble.domain())))


def _makespans(outcome: Outcome) -> Iterator[Number | None]:
    """The makespan, first with the program's own base, then as a product of sizes."""
    base = _base(outcome.reading)
    yield makespan_of(outcome, _durations(), base)
    if base is None and {BASE, MICROBATCHES} <= {*outcome.reading.sizes}:
        yield makespan_of(outcome, _durations(), BASE)


def _durations() -> dict[Kind, int]:
    """The duration of each kind of op at unit costs."""
    layout = Layout((0,), (Pipeline("", 0, 1, 1),))
    durations = UNIT.durations(layout)
    return {Kind(kind): int(durations[Kind(kind)][0]) for kind in OPS}


def _base(reading: Reading) -> str | None:
    """The base of a program's figures, if they have two digits."""
    wanted = MICROBATCHES if reading.is_stream else _SLICES
    is_any = (
        wanted in reading.sizes and constant(symbol(wanted), reading.domain) is None
    )
    return wanted if is_any else reading.base


def _work(outcome: Outcome) -> Number:
    """The work of the busiest rank: all slices of all microbatches on all its stages."""
    reading = outcome.reading
    takes = _durations()
    kinds = {s.kind for s in reading.statements}
    of_unit = takes[Kind.F]
    if kinds & set(MAKERS[Kind.B]):
        of_unit += takes[Kind.B]
    for repeat in kinds & {*REPEATS}:
        _check_runs_again(outcome, repeat)
        of_unit += takes[repeat]
    every = outcome.proved & without(reading.held, [STAGE])
    total = of_number(0).within(every)
    for stage in reading.own_stages:
        for line in reading.lines:
            own = stage.domain() & between(
                line.first, stage, line.first.add(line.stages)
            )
            own = own & every
            run = _run_by(line, reading)
            parts = [run.times(of_unit).within(own), of_number(0).within(every - own)]
            total = total.plus(union(parts))
    return _highest(total, every, reading.sizes)


def _check_runs_again(outcome: Outcome, *repeats: Kind) -> None:
    """Unreadable unless every forward is recomputed."""
    relations = outcome.relations
    again = relations.of(*repeats).range()
    if not relations.of(Kind.F).range().is_equal(again):
        raise Unreadable("some forwards are recomputed")


def _run_by(line: Line, reading: Reading) -> Number:
    """How many slices a pipeline runs in all updates; Unreadable if that is not a number of two
    digits.
    """
    slices = constant(reading.slices, reading.domain)
    if slices is None:
        assert line.microbatches.high is None
        return Number(number(0), line.microbatches.low, _SLICES)
    if not reading.is_stream:
        return line.microbatches.times(slices)
    multiple = multiple_of_base(line.microbatches.low, reading.domain, MICROBATCHES)
    if multiple is None:
        raise Unreadable(
            "a pipeline's share of the microbatches is no multiple of them"
        )
    _, bases, more = multiple
    low, high = (
        symbol(UPDATES).scale_val(isl.Val(times * slices)) for times in (more, bases)
    )
    return Number(low, high, MICROBATCHES)


# Memory


def _peak(outcome: Outcome) -> Number:
    """The most activations that a rank holds."""
    reading = outcome.reading
    relations = outcome.relations
    ops = [s for s in reading.statements if s.kind in OPS]
    kinds = {s.kind for s in ops}
    holding = [s for s in ops if OPS[s.kind].holds > 0]
    if kinds == {Kind.F}:
        staying: list[Statement] = []
    elif kinds & {*REPEATS}:
        _check_runs_again(outcome, *REPEATS)
        staying = [s for s in holding if s.kind in REPEATS]
    else:
        staying = holding
    giving = [s for s in ops if OPS[s.kind].holds < 0]
    for one, other in combinations(holding, 2):
        is_mate = one.batch and one.batch == other.batch
        if is_mate and not relations.together(one, other).is_empty():
            raise Unreadable("forwards that overlap")
    highest: list[Number] = []
    keep = ("updates", *reading.sizes, RANK)
    for op in holding:
        # The op's own activation, and those taken and not given back before it.
        held = of_number(1)
        for sign, others in ((1, staying), (-1, giving)):
            counted = _counted(op, others, _base(reading) or BASE)
            held = held.plus(counted.times(sign))
        domain = op.domain & outcome.proved
        highest.append(_highest(held, domain, keep))
    peak = reduce(_highest_of, highest)
    every = outcome.proved & without(reading.held, [STAGE])
    pieces = list(peak.pieces())
    # If one function holds for all ranks, its condition is that of the whole proof.
    if len(pieces) == 1 and pieces[0][0].is_equal(every):
        return pieces[0][1].within(every)
    return peak


def _many(statement: Statement) -> Many:
    return Many(statement.domain, statement.indices, statement.order)


def _counted(op: Statement, others: Sequence[Statement], base: str) -> Number:
    """How many instances of `others` precede each instance of an op; Unreadable if they cannot be
    counted.
    """

    def counted(each: Sequence[Many]) -> Number:
        counts = [how_many_before(_many(op), other, base) for other in each]
        return reduce(Number.plus, counts, of_number(0))

    cases = list(map(_many, others))
    try:
        return counted(cases)
    except Unreadable:
        # The rounds of a whole call may have one length where those of its cases have not.
        return counted(_calls(cases))


def _calls(cases: Sequence[Many]) -> list[Many]:
    """The cases of each call as one: they share their order vector."""
    calls: list[Many] = []
    for case in cases:
        if calls and calls[-1].order is case.order:
            calls[-1] = evolve(
                calls[-1], where=(calls[-1].where | case.where).coalesce()
            )
        else:
            calls.append(case)
    return calls


def _highest_of(one: Number, other: Number) -> Number:
    """The maximum of two numbers, at each size at which one of them has a value."""
    both = one.domain() & other.domain()
    parts = [
        one.within(one.domain() - both),
        other.within(other.domain() - both),
        most([one, other], both).within(both),
    ]
    # Simplify after each step, so that the pieces do not multiply.
    there = [part for part in parts if not part.domain().is_empty()]
    return simplified_number(union(there))


def _highest(value: Number, where: isl.Set, keep: Sequence[str]) -> Number:
    """The highest value of a number over all symbols but `keep`."""
    value = folded(value, where)
    if value.high is None:
        values = where & symbol("_value").eq_set(value.low)
        values = sizes_only(values, [*keep, "_value"])
        return Number(points(values, ["_value"]).dim_max(0).coalesce())
    high, low = digits(value, where)
    values = where & symbol("_high").eq_set(high) & symbol("_low").eq_set(low)
    values = sizes_only(values, [*keep, "_high", "_low"])
    top = points(values, ["_high", "_low"]).lexmax_pw_multi_aff()
    highest = Number(top.get_pw_aff(1), top.get_pw_aff(0), value.base)
    return folded(highest, highest.domain())
