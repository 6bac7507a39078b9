"""Proves a program for any number of ranks and microbatches; the result is a `Proof`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import islpy as isl
from attrs import evolve

from schedlang.compiler import NO_PARAMS
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.extras.prove.open_program import Program, program_of
from schedlang.extras.prove.result import Law, Proof, Verdict
from schedlang.extras.prove.sets.claims_for_all import Judgement, judged
from schedlang.extras.prove.sets.closed_forms import Form, forms_of
from schedlang.extras.prove.sets.instances import differs
from schedlang.extras.prove.sets.numbers import Unreadable, in_time
from schedlang.extras.prove.sets.outcome import Outcome, contains, prove, small_sizes
from schedlang.extras.prove.sets.sets_certificate import certificate_of
from schedlang.extras.prove.sets.statements import SIZES, UPDATES, Reading
from schedlang.extras.prove.sets.wording import (
    condition_text,
    pieces_of,
    possible_sizes,
)
from schedlang.language import syntax
from schedlang.language.expand import check_text, expand
from schedlang.schedule.transports import PORTABLE

#: The number of small sizes at which the sets are compared with the compiler's order.
_COMPARED = 24
_ARGUMENT = (
    "time stamps that grow along every edge of the event graph, found by linear programming and "
    "checked exactly by isl: docs/proof.md"
)


def prove_for_all_ranks(
    source: Source | str | Path,
    params: Mapping[str, int] = NO_PARAMS,
    transports_asked: Iterable[str] = (PORTABLE,),
) -> Proof:
    """Prove a program for any number of ranks and microbatches, and of slices where it has them.

    `source` and `params` are those of `schedlang.compile`; sizes that are given are not open. The
    verdict on each transport says at which sizes the program is proved, and at which it is wrong.
    If it cannot be read as integer sets, or no proof was found, it is not proved, with the reason.
    CompileError for a program that cannot be read, TypeError or ValueError for wrong arguments.
    """
    program = program_of(source, params, transports_asked)
    check_sizes(program)
    doing(f"{program.name}: reading it as integer sets")
    try:
        with in_time():
            outcome = prove(program.tree, program.params)
    except Unreadable as unreadable:
        reason = unreadable.reason
        if unreadable.span is not None:
            span = unreadable.span
            text = program.whole.text[span.start : span.end]
            reason = f"`{' '.join(text.split())[:60]}`: {reason}"
        return _unproved(program, reason)
    # The sets are read apart from the compiler: compare the two op by op at small sizes.
    for each in compared(outcome.reading, outcome.proved):
        at = ", ".join(f"{size} = {value}" for size, value in each.items())
        try:
            is_other = differs(outcome.relations, program, each)
        except CompileError as error:
            # A mistake at all sizes, which is not in the order of a rank.
            reason = f"at {at} the compiler says: {error.diagnostics[0].message}"
            return _unproved(program, reason)
        if is_other:
            raise AssertionError(f"{program.name} was read wrong: see it at {at}")
    forms: list[Form] = []
    if outcome.cases:
        doing(f"{program.name}: looking for closed forms")
        # Forms that were found before time ran out are kept.
        with suppress(Unreadable), in_time():
            for form in forms_of(outcome, program.tree):
                forms.append(form)
    sizes = outcome.reading.sizes
    laws = [Law(form.figure, pieces_of(form.value, sizes)) for form in forms]
    judgement = judged(outcome.reading, outcome.proved, forms)
    per_rank = [item for item in program.tree.items if isinstance(item, syntax.PerRank)]
    if any(item.word == "capacity" for item in per_rank):
        reason = "it has a `capacity`, and what its ranks hold is compared with that at given sizes"
        unknown = outcome.proved - judgement.fails
        judgement = evolve(judgement, unknown=unknown, reason=reason)
    return Proof(
        program.name,
        program.params,
        _free(program),
        {
            name: _verdict(outcome, judgement, program, name)
            for name in program.transports
        },
        laws=tuple(laws),
        claims=program.claims,
        argument=_ARGUMENT if outcome.cases else "",
        certify=partial(_certificate, outcome, program),
    )


def _certificate(outcome: Outcome, program: Program) -> Mapping[str, Any] | None:
    """The certificate of an outcome, on `portable`; None if nothing is proved. ValueError if its
    stamps cannot be written.
    """
    try:
        if not outcome.cases:
            return None
        portable = evolve(program, transports=(PORTABLE,))
        return portable.certificate(certificate_of(outcome))
    except Unreadable as error:
        raise ValueError(
            f"the stamps of the proof cannot be written: {error}"
        ) from None


def _unproved(program: Program, reason: str) -> Proof:
    """The proof of a program of which nothing is proved, for this reason."""
    free = _free(program)
    unknown = " and ".join(f"{name} >= 1" for name in free)
    verdict = Verdict(unknown=unknown, reason=reason)
    verdicts = dict.fromkeys(program.transports, verdict)
    return Proof(program.name, program.params, free, verdicts)


def check_sizes(program: Program) -> None:
    """CompileError for names and sizes that the compiler refuses."""
    params = program.params
    one = {
        item.name.text: 1
        for item in program.tree.items
        if isinstance(item, syntax.Param)
        and item.name.text in SIZES
        and item.default is None
    }
    check_text(program.whole, program.tree, {**one, **params})
    if any(params.get(size, 1) < 1 for size in SIZES):
        # The program ends with a fault before its parameters; this raises it with its place.
        expand(program.whole, program.tree, {**one, **params})


def _free(program: Program) -> tuple[str, ...]:
    """The sizes that are not given."""
    items = program.tree.items
    declared = [item.name.text for item in items if isinstance(item, syntax.Param)]
    return tuple(
        name for name in declared if name in SIZES and name not in program.params
    )


def compared(reading: Reading, right: isl.Set) -> list[dict[str, int]]:
    """Small sizes at which the program is right, to compare the sets with the compiler."""
    return [each for each in small_sizes(reading) if contains(right, each)][:_COMPARED]


def _verdict(
    outcome: Outcome,
    judgement: Judgement,
    program: Program,
    name: str,
) -> Verdict:
    """The verdict on one transport, with the compiler's errors at the smallest wrong size."""
    sizes = outcome.reading.sizes
    proved, wrong, unknown, reason = outcome.on(name)
    if judgement.reason:
        reason = judgement.reason
    unknown = (unknown | (proved & judgement.unknown)).coalesce()
    wrong = (wrong | (proved & judgement.fails)).coalesce()
    proved = (proved - judgement.unknown - judgement.fails).coalesce()
    possible = possible_sizes(sizes)
    verdict = Verdict(
        proved=condition_text(proved, sizes),
        wrong=condition_text(wrong, sizes),
        refused=condition_text(possible - outcome.domain, sizes),
        unknown=condition_text(unknown, sizes),
        reason=reason,
    )
    if wrong.is_empty():
        return verdict
    smallest = next(
        (each for each in small_sizes(outcome.reading) if contains(wrong, each)), None
    )
    if smallest is None:
        return verdict
    shown = {size: value for size, value in smallest.items() if size != UPDATES}
    diagnostics = program.errors_at(shown, name)
    return evolve(verdict, smallest=shown, diagnostics=diagnostics)
