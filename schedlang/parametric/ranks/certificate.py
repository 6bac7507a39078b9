"""A proof as data: the program as integer sets, in isl's notation, and the time stamps. What checks
it is in `schedlang.parametric.ranks.checker`.
"""

from math import lcm
from typing import Any

import islpy as isl

from schedlang.parametric.ranks.checks import stage_relation
from schedlang.parametric.ranks.counting import RANK
from schedlang.parametric.ranks.prove import Case, Outcome
from schedlang.parametric.ranks.reading import STAGE
from schedlang.parametric.ranks.symbols import points

#: The version of what a certificate has.
VERSION = 1


def certificate_of(outcome: Outcome) -> dict[str, Any]:
    """The certificate of all that is proved in an outcome."""
    reading, relations = outcome.reading, outcome.relations
    functions = max((_functions(case) for case in outcome.cases), default=0)
    return {
        "certificate": "a schedule program for all its sizes",
        "version": VERSION,
        "name": reading.name,
        "sizes": list(reading.sizes),
        "proved": str(outcome.proved),
        "delay": reading.delay,
        "stream": reading.is_stream,
        "held": str(_pairs(reading.held, STAGE, RANK)),
        "after": str(stage_relation(reading, "after")),
        "replicas": str(stage_relation(reading, "replicas")),
        "wanted": str(relations.wanted()),
        "depth": relations.depth,
        "functions": functions,
        "statements": [
            {
                "name": statement.name,
                "kind": statement.kind.name,
                "at": [statement.span.start, statement.span.end],
                "item": str(relations.items[statement.number]),
                "place": str(relations.places[statement.number]),
            }
            for statement in reading.statements
        ],
        "cases": [
            {"where": str(case.where), "stamps": _whole(case, functions)} for case in outcome.cases
        ],
    }


def _functions(case: Case) -> int:
    return max((len(rows) for rows in case.stamps.values()), default=0)


def _whole(case: Case, functions: int) -> dict[str, list[list[int]]]:
    """The stamps in whole numbers: each function of all statements times one factor."""
    factors = [1] * functions
    for rows in case.stamps.values():
        for at, row in enumerate(rows):
            factors[at] = lcm(factors[at], *(value.denominator for value in row))
    stamps = {}
    for number, rows in case.stamps.items():
        whole = [
            [int(value * factor) for value in row]
            for row, factor in zip(rows, factors, strict=False)
        ]
        whole += [[0] * len(rows[0])] * (functions - len(whole))
        stamps[f"S{number}"] = whole
    return stamps


def _pairs(condition: isl.Set, one: str, other: str) -> isl.Map:
    """A condition of two symbols as a relation."""
    both = isl.Map.from_domain(points(condition, [one, other]))
    return both.move_dims(isl.dim_type.out, 0, isl.dim_type.in_, 1, 1)
