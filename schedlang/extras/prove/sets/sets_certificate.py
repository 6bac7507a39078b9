"""Writes the certificate of a proof for any number of ranks: the program as integer sets in isl's
notation, and time stamps. `schedlang.extras.prove.check_sets` checks it.
"""

from fractions import Fraction
from math import lcm
from typing import Any

import islpy as isl

from schedlang.extras.prove.sets.numbers import digits
from schedlang.extras.prove.sets.outcome import Case, Outcome
from schedlang.extras.prove.sets.relations import Relations, document_of
from schedlang.extras.prove.sets.stamps import Frame
from schedlang.extras.prove.sets.statements import Statement


def certificate_of(outcome: Outcome) -> dict[str, Any]:
    """What a certificate has of an outcome."""
    reading = outcome.reading
    relations = outcome.relations
    frame = Frame(reading.sizes, reading.base)
    depth = 1 + max(
        (len(rows) for case in outcome.cases for rows in case.stamps.values()),
        default=0,
    )
    width = depth * frame.digits
    return {
        "proved": str(outcome.proved),
        **document_of(relations),
        "width": width,
        "cases": [
            {
                "where": str(case.where),
                "stamps": {
                    statement.name: str(
                        _stamp(relations, statement, case, frame, width)
                    )
                    for statement in reading.statements
                },
            }
            for case in outcome.cases
        ],
    }


def _stamp(
    relations: Relations, statement: Statement, case: Case, frame: Frame, width: int
) -> isl.Map:
    """From a statement's instances to their stamps, as whole numbers that are compared
    lexicographically; zeros if the statement has no stamp.
    """
    domain = relations.items[statement.number].domain().intersect_params(case.where)
    domain = frame.aligned(domain).reset_tuple_id()
    none = (Fraction(0),) * (frame.digits * frame.width(statement))
    rows = case.stamps.get(statement.number, ())
    entries: list[isl.PwAff] = []
    for at in range(width // frame.digits):
        # The functions of all statements are multiplied by one common factor.
        of_all = [own[at] for own in case.stamps.values() if at < len(own)]
        factor = lcm(*(value.denominator for row in of_all for value in row))
        row = tuple(value * factor for value in rows[at]) if at < len(rows) else none
        value, _ = frame.number(domain, row)
        entries += [value.low] if frame.base is None else digits(value, domain)
    stamp = isl.Map.from_domain_and_range(domain, isl.Set("{ [] }"))
    for entry in entries:
        stamp = stamp.flat_range_product(isl.Map.from_pw_aff(entry))
    return stamp.set_tuple_name(isl.dim_type.in_, statement.name).coalesce()
