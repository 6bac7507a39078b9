"""Compares the sets in a certificate with its program. The program is read as sets once more, in
the same way as by the prover, and compared with the compiler at small sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import islpy as isl

from schedlang.extras.prove.check_orders import Wrong
from schedlang.extras.prove.check_sets import faults_of
from schedlang.extras.prove.open_program import Program
from schedlang.extras.prove.sets.evaluator import Mistake
from schedlang.extras.prove.sets.instances import differs
from schedlang.extras.prove.sets.numbers import Unreadable, in_time
from schedlang.extras.prove.sets.proofs import check_sizes, compared
from schedlang.extras.prove.sets.relations import Relations, document_of
from schedlang.extras.prove.sets.statements import of_program
from schedlang.extras.prove.sets.to_sets import read
from schedlang.extras.prove.sets.wording import condition_text
from schedlang.extras.prove.sets.written_batches import one_sided
from schedlang.schedule.transports import PORTABLE


def sets_of_program(program: Program, document: Mapping[str, Any]) -> str:
    """Check a certificate of sets and compare it with its program; return what it proves, as text.
    Wrong, with the reason, if it does not hold.
    """
    faults = faults_of(dict(document))
    if faults:
        raise Wrong("; ".join(faults))
    if program.transports != (PORTABLE,):
        raise Wrong("sets prove what holds on `portable`")
    try:
        with in_time():
            return _what_holds(program, document)
    except Unreadable as error:
        raise Wrong(f"its sets cannot be read in the text: {error.reason}") from None
    except isl.Error as error:
        raise Wrong(f"it is no certificate: {error}") from None


def _what_holds(program: Program, document: Mapping[str, Any]) -> str:
    check_sizes(program)
    reading = read(program.tree, program.params)
    relations = Relations(reading)
    for name, of in document_of(relations).items():
        if document[name] != of:
            raise Wrong(f"its `{name}` are not those of the program")
    proved = isl.Set(document["proved"])
    if not proved.is_subset(reading.domain):
        raise Wrong("it is for sizes that the program refuses")
    in_batch = Mistake("only one side issues a batch", one_sided(relations))
    for mistake in [*reading.mistakes, in_batch]:
        sizes = of_program(mistake.holds & reading.domain, reading)
        if not (sizes & proved).is_empty():
            raise Wrong(f"the program: {mistake.message}")
    for sizes_compared in compared(reading, proved):
        if differs(relations, program, sizes_compared):
            raise Wrong(f"its orders are not those of the compiler at {sizes_compared}")
    return program.proved_text(
        condition_text(proved, reading.sizes),
        "orders, stages, edges, transfers, rules for weights; it says nothing of claims and times",
        "each op runs once and reads the weights that it should, none waits forever",
    )
