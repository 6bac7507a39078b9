"""Checks a certificate against the text of its program.

The checkers (`check_orders` and `check_sets`) prove statements about the orders, times or sets in a
certificate. They do not read the program. This module reads the program once more, in the same way
as the prover, and compares the result with the certificate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from schedlang.compiler import wrong_ops
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.prove.check_orders import Wrong, check
from schedlang.extras.prove.open_program import Program, certified_program
from schedlang.extras.prove.pieces.linear import NotLinear, Searched, Undecided
from schedlang.extras.prove.pieces.prover import Class, prover_of
from schedlang.extras.prove.pieces.size_sets import Sizes
from schedlang.extras.prove.pieces.start_times import NoStamps
from schedlang.extras.prove.pieces.written_transfers import NotRepeated
from schedlang.language.faults import Fault

#: At this many sizes of each class, the compiler proves the program too.
_COMPILED = 3


def what_it_proves(document: Any) -> str:
    """Check a certificate and compare it with its program; return what it proves, as text. Wrong,
    with the reason, if it does not hold.
    """
    try:
        program = certified_program(document)
        if "statements" in document:
            from schedlang.extras.prove.sets.reread import sets_of_program

            return sets_of_program(program, document)
        return _orders_of_program(program, document)
    except CompileError as error:
        raise Wrong(f"the compiler says: {error.diagnostics[0].message}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise Wrong(f"it is no certificate: {type(error).__name__}: {error}") from None


def _orders_of_program(program: Program, document: Mapping[str, Any]) -> str:
    """What a certificate for any number of microbatches proves."""
    check(document)
    classes = document["classes"]
    if not classes:
        raise Wrong("it has no sizes")
    try:
        _check_classes(program, classes)
    except Searched as error:
        raise Wrong(f"its orders do not follow from the text: {error}") from None
    except Undecided:
        raise Wrong("the text has not one order for all these sizes") from None
    except Fault as fault:
        raise Wrong(f"the program: {fault.message}") from None
    except (NotLinear, NotRepeated, NoStamps, RecursionError) as error:
        raise Wrong(f"its orders cannot be read in the text: {error}") from None
    sizes = Sizes(progressions=[(one["base"], one["period"]) for one in classes])
    return program.proved_text(
        sizes.text(),
        "orders, stages, edges, costs, transfers, claims",
        "each op runs once, none waits forever; all times and figures",
    )


def _check_classes(program: Program, classes: Sequence[Mapping[str, Any]]) -> None:
    """Prove each class of the certificate again from the text. Wrong, or another error, unless the
    result is the same.
    """
    prover = prover_of(program)
    keys = [(one["base"], one["period"], one["unrolled"]) for one in classes]
    if not all(type(part) is int and part > 0 for key in keys for part in key):
        raise Wrong("it has no sizes")
    for key in dict.fromkeys(keys):
        one = Class(*key)
        for n in range(_COMPILED):
            schedule = prover.expanded(one, n)
            for name, wrong in wrong_ops(schedule, program.transports).items():
                if wrong:
                    at = f"at {one.base + n * one.period} microbatches, on `{name}`"
                    raise Wrong(f"{at}: {wrong[0].message}")
        again = prover.tried(one, one.unrolled)
        for name in program.transports:
            outcome, reason = prover.outcome_on(name, again)
            if outcome != "proved":
                raise Wrong(f"on `{name}` the program is {outcome} {reason}".rstrip())
        if again.certify is None:
            raise Wrong("a certificate has no streams, and no costs of overlap")
        own = [of for of, its in zip(classes, keys, strict=True) if its == key]
        _check_same(own, again.certify())


def _check_same(
    own: Sequence[Mapping[str, Any]], proved: Sequence[Mapping[str, Any]]
) -> None:
    """Wrong unless the parts of a class equal those of the new proof, byte for byte."""
    if [one.keys() for one in own] != [one.keys() for one in proved]:
        raise Wrong("not each class is there as it must be")
    for one, again in zip(own, proved, strict=True):
        for name, of in again.items():
            if json.dumps(one[name]) != json.dumps(of):
                raise Wrong(f"its `{name}` are not those of the program")
