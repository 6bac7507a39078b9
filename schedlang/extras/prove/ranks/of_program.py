"""Whether a certificate for any number of ranks is one of its program.

`check_certificate` takes the sets of a certificate as they are. Here they are read in the text once
more, as the prover does, and at small sizes compared with the compiler.
"""

from __future__ import annotations

from typing import Any

import islpy as isl

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.prove.check_certificate import Wrong
from schedlang.extras.prove.of_program import program_of
from schedlang.extras.prove.ranks.certificate import VERSION, of_reading
from schedlang.extras.prove.ranks.check_certificate import faults_of
from schedlang.extras.prove.ranks.checks import (
    Relations,
    check,
    check_batches,
    of_program,
)
from schedlang.extras.prove.ranks.instances import differs
from schedlang.extras.prove.ranks.numbers import Unreadable, in_time
from schedlang.extras.prove.ranks.proofs import check_sizes, compared
from schedlang.extras.prove.ranks.reading import read
from schedlang.extras.prove.ranks.words import condition_text


def what_it_proves(document: dict[str, Any]) -> str:
    """Check a certificate, and that it is one of the program in it; then say what it proves, and by
    whom. Wrong, with the reason, if it does not hold.
    """
    if document.get("version") != VERSION:
        raise Wrong("it has another version: prove it anew")
    faults = faults_of(document)
    if faults:
        raise Wrong("; ".join(faults))
    try:
        with in_time():
            return _of_program(document)
    except CompileError as error:
        raise Wrong(f"the compiler says: {error.diagnostics[0].message}") from None
    except Unreadable as error:
        raise Wrong(f"its sets cannot be read in the text: {error.reason}") from None
    except (ValueError, TypeError, LookupError, isl.Error) as error:
        raise Wrong(f"it is no certificate: {type(error).__name__}: {error}") from None


def _of_program(document: dict[str, Any]) -> str:
    source, tree, params = program_of(document)
    check_sizes(source, tree, params)
    reading = read(tree, params)
    relations = Relations(reading)
    for name, of in of_reading(reading, relations).items():
        if document[name] != of:
            raise Wrong(f"its `{name}` are not those of the program")
    proved = isl.Set(document["proved"])
    if not proved.is_subset(reading.domain):
        raise Wrong("it is for sizes that the program refuses")
    for mistake in [*reading.mistakes, *check(relations), *check_batches(relations)]:
        sizes = of_program(mistake.holds & reading.domain, reading)
        if not (sizes & proved).is_empty():
            raise Wrong(f"the program: {mistake.message}")
    for sizes_compared in compared(reading, proved):
        if differs(relations, source, tree, params, sizes_compared):
            raise Wrong(f"its orders are not those of the compiler at {sizes_compared}")
    given = "".join(f", {name} = {value}" for name, value in params.items())
    return (
        f"the certificate proves {reading.name}{given} for "
        f"{condition_text(proved, reading.sizes)} on portable\n"
        "  read in its text by schedc, for all these sizes: orders, stages, edges, transfers, "
        "rules for weights; it says nothing of claims and times\n"
        "  proved of these by the checker: each op runs once and reads the weights that it "
        "should, none waits forever"
    )
