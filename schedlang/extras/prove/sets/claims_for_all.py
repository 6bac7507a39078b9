"""Compares the claims `for all` of a program with its closed forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import islpy as isl
from attrs import frozen

from schedlang.extras.prove.sets.closed_forms import PEAK, Form
from schedlang.extras.prove.sets.counting import RANK
from schedlang.extras.prove.sets.evaluator import Symbolic, peak_function
from schedlang.extras.prove.sets.isl_functions import nowhere, without
from schedlang.extras.prove.sets.numbers import Number, Unreadable, plain
from schedlang.extras.prove.sets.statements import (
    Claim,
    Reading,
    of_program,
    sizes_only,
)
from schedlang.extras.prove.sets.symbolic_code import SymbolicCodegen
from schedlang.language.claims import condition_of
from schedlang.language.codegen import variable


@frozen(eq=False)
class Judgement:
    """The sizes at which a claim fails, and those at which a claim is undecided, with the
    reason.
    """

    fails: isl.Set
    unknown: isl.Set
    reason: str


def judged(reading: Reading, proved: isl.Set, forms: Iterable[Form]) -> Judgement:
    """Judge the claims of a program, at the sizes at which it is proved otherwise."""
    figures = {form.figure: form.value for form in forms}
    fails = unknown = nowhere()
    reason = ""
    for claim in reading.claims:
        where = claim.where & proved
        try:
            there = where
            for figure in _figures_of(claim):
                if figure not in figures:
                    raise Unreadable(f"there is no closed form of its {figure}")
                there = there & without(figures[figure].domain(), [RANK])
            holds = _holds(claim, there, figures)
        except Unreadable as unreadable:
            unknown = unknown | of_program(where, reading)
            reason = f"a claim for all: {unreadable.reason}"
            continue
        failing = sizes_only(there - holds, reading.sizes)
        some_fail = of_program(failing, reading)
        some_hold = of_program(sizes_only(there, reading.sizes) - failing, reading)
        fails = fails | (some_fail - some_hold)
        # Without a flush: the number of updates is the plan's, and no parameter of the program.
        both = some_fail & some_hold
        if not both.is_empty():
            unknown = unknown | both
            reason = "a claim for all: whether it holds depends on how many updates there are"
        if not there.is_equal(where):
            unknown = unknown | of_program(where - there, reading)
            reason = (
                "a claim for all: there is a closed form for some of the sizes only"
            )
    return Judgement(fails.coalesce(), unknown - fails, reason)


def _figures_of(claim: Claim) -> set[str]:
    """The figures that occur in a claim, by the names of their closed forms."""
    return {PEAK if name == "peak" else name for name in claim.site.figures}


def _holds(claim: Claim, where: isl.Set, figures: Mapping[str, Number]) -> isl.Set:
    """Where a claim holds, among the sizes at which its figures have a value."""
    evaluator = claim.evaluator
    names = evaluator.names()
    names |= {variable(name): value for name, value in claim.values.items()}
    for name in claim.site.figures:
        if name == "peak":
            peaks = plain(figures[PEAK], figures[PEAK].domain())
            names[variable(name)] = peak_function(evaluator, peaks)
        else:
            names[variable(name)] = Symbolic(evaluator, figures[name])
    with evaluator.within(where):
        return evaluator.truth(condition_of(claim.site, names, SymbolicCodegen))
