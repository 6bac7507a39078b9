"""Certificates made by somebody who has read their checker: of another text, with other numbers, or
with several that fit each other.
"""

import copy
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tests.support.damaged_certificates import changed, places
from tests.support.mistakes import damaged
from tests.support.paths import PROGRAMS

#: Where a text does something else: at sizes that no checker tries, it may hope.
_CONDITIONS = [
    "microbatches > {}",
    "microbatches == {}",
    "microbatches % 13 == {} % 13",
    "microbatches / 7 > {}",
]
_NUMBERS = [9, 17, 40, 101, 1000]
#: What may depend on that condition, as a line before the order of ranks.
_LINES = [
    "cost F = if {0} then 3 else 1",
    "cost B(s) = if {0} then s + 3 else 2",
    "cost send = if {0} then 2 else 0",
    "memory F = if {0} then 2 else 1",
    "memory W = if {0} then 0 - 2 else 0 - 1",
    "capacity = if {0} then 0 else 1000",
    "require not ({0})",
    "require (if {0} then 1 else 0) == 0",
    "assert bubble < (if {0} then 0 else 1000)",
    "assert peak() <= (if {0} then 0 else microbatches)",
    "assert makespan <= 40 * ranks",
    "frozen 0 .. (if {0} then 1 else 0)",
    "stage s in 0 .. ranks on (if {0} then 0 else s)",
    "stage s in 0 .. (if {0} then 1 else ranks) on s",
    "weights stash",
    "weights delay (if {0} then 1 else 0)",
    "edge s in 0 .. ranks - 1 from s to (if {0} then ranks - 1 else s + 1)",
    "skip s in 0 .. (if {0} then 1 else 0) from s to s + 2",
    "param slices = if {0} then 2 else 1",
    "fill W",
    "reorder",
    'import "lib/v.sched"',
]
#: What an op's microbatch may become.
_MICROBATCHES = [
    "(if {0} then 0 else m)",
    "(if m == {1} then 0 else m)",
    "(if {0} then microbatches - 1 - m else m)",
]


def forged(
    honest: Mapping[str, Any], others: list[Mapping[str, Any]], rng: Random
) -> tuple[dict[str, Any], str]:
    """A forgery of an honest certificate, and how it was made."""
    document = copy.deepcopy(dict(honest))
    forger = rng.choice(_FORGERS)
    forger(document, others, rng)
    return document, forger.__name__


def _condition(rng: Random) -> str:
    return rng.choice(_CONDITIONS).format(rng.choice(_NUMBERS))


def _another_line(document: Any, _: Any, rng: Random) -> None:
    line = rng.choice(_LINES).format(_condition(rng))
    order = document["program"].index("rank r {")
    document["program"] = (
        f"{document['program'][:order]}{line}\n{document['program'][order:]}"
    )


def _another_microbatch(document: Any, _: Any, rng: Random) -> None:
    other = rng.choice(_MICROBATCHES).format(_condition(rng), rng.choice(_NUMBERS))
    text = document["program"]
    found = [at for at in range(len(text)) if text[at : at + 3] == "(m)"]
    if found:
        at = rng.choice(found)
        document["program"] = f"{text[:at]}({other}){text[at + 3 :]}"


def _with_a_mistake(document: Any, _: Any, rng: Random) -> None:
    document["program"] = damaged(document["program"], rng)


def _of_another_text(document: Any, others: Any, rng: Random) -> None:
    document["program"] = rng.choice(
        [
            *(other["program"] for other in others),
            "1f1b",
            str(PROGRAMS / "gpipe.sched"),
        ]
    )


def _with_other_classes(document: Any, others: Any, rng: Random) -> None:
    document["classes"] = [
        *rng.choice([[], document["classes"]]),
        *rng.choice(others)["classes"],
    ]


def _with_another_field(document: Any, _: Any, rng: Random) -> None:
    place = rng.choice(places(document))
    document.update(changed(document, place))


def _with_other_parameters(document: Any, _: Any, rng: Random) -> None:
    other = rng.choice(
        [{}, {"ranks": 3}, {"microbatches": 9}, {"rank": 2}, {"ranks": 0}]
    )
    document["params"] = other


def _with_other_transports(document: Any, _: Any, rng: Random) -> None:
    document["transports"] = rng.choice(
        [[], ["none"], ["nccl", "nccl"], ["portable", "all"]]
    )


def _at_other_sizes(document: Any, _: Any, rng: Random) -> None:
    for one in document["classes"]:
        one["base"] += rng.choice([-2, -1, 0, 1, 10**12])
        one["period"] = rng.choice([0, -1, 2, 1, 10**9, one["period"]])


def _with_a_part_moved(document: Any, _: Any, rng: Random) -> None:
    one = rng.choice(document["classes"])
    pieces = rng.choice(one["ranks"])
    parts = rng.choice(
        [
            pieces,
            rng.choice(pieces)["batches"],
            one["edges"],
            one["ops"],
            one["ranks"],
            one["units"],
            one["placement"],
            document["classes"],
        ]
    )
    if not parts:
        return
    at = rng.randrange(len(parts))
    match rng.randrange(3):
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, copy.deepcopy(rng.choice(parts)))
        case _:
            rng.shuffle(parts)


def _with_other_costs(document: Any, _: Any, rng: Random) -> None:
    # All times are others, and fit each other.
    for one in document["classes"]:
        for _, _, takes, *_ in one["ops"]:
            takes[:] = [2 * part for part in takes]
        for way in one["ways"]:
            way[-1] = [2 * part for part in way[-1]]
        for batch in _batches(one):
            batch["start"] = [2 * part for part in batch["start"]]
        for name in ("makespan", "work", "span"):
            one["figures"][name] = [2 * part for part in one["figures"][name]]


def _with_other_amounts(document: Any, _: Any, rng: Random) -> None:
    # Nothing is held: so peaks are none.
    amount = rng.choice([0, 2])
    for one in document["classes"]:
        for _, _, _, during, after in one["ops"]:
            during[:] = [amount * part for part in during]
            after[:] = [amount * part for part in after]
        peaks = one["figures"]["peak"]
        one["figures"]["peak"] = [[amount * part for part in peak] for peak in peaks]


def _with_an_op_of_another_kind(document: Any, _: Any, rng: Random) -> None:
    one = rng.choice(document["classes"])
    kind, other = rng.sample(["F", "B", "I", "W", "R", "RESHARD", "U"], 2)
    for batch in _batches(one):
        batch["ops"] = [
            [other if op[0] == kind else op[0], *op[1:]] for op in batch["ops"]
        ]
    one["ops"] = [[other if op[0] == kind else op[0], *op[1:]] for op in one["ops"]]


def _with_ranks_turned(document: Any, _: Any, rng: Random) -> None:
    for one in document["classes"]:
        last = len(one["ranks"]) - 1
        one["ranks"].reverse()
        one["figures"]["peak"].reverse()
        one["placement"] = [last - rank for rank in one["placement"]]


def _with_other_figures(document: Any, _: Any, rng: Random) -> None:
    figures = rng.choice(document["classes"])["figures"]
    figure = figures[rng.choice(["makespan", "work", "span"])]
    figure[rng.randrange(2)] += rng.choice([-1, 1])


def _without_idle_backwards(document: Any, _: Any, rng: Random) -> None:
    document["classes"] = [one for one in document["classes"] if not one["idle"]]
    if rng.random() < 0.5:
        for one in document["classes"]:
            one["idle"] = rng.choice([True, 0, 1, None])


def _batches(one: Any) -> list[Any]:
    return [
        batch
        for pieces in one["ranks"]
        for piece in pieces
        for batch in piece["batches"]
    ]


_FORGERS: list[Callable[[Any, Any, Random], None]] = [
    # Of a text: most of what nobody sees is there.
    *[_another_line] * 6,
    *[_another_microbatch] * 4,
    *[_with_a_mistake] * 3,
    _of_another_text,
    _with_other_classes,
    *[_with_another_field] * 3,
    _with_other_parameters,
    _with_other_transports,
    _at_other_sizes,
    *[_with_a_part_moved] * 3,
    _with_other_costs,
    _with_other_amounts,
    _with_an_op_of_another_kind,
    _with_ranks_turned,
    _with_other_figures,
    _without_idle_backwards,
]
