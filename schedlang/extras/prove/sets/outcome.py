"""A program whose transfers the compiler places, for all sizes at once.

The compiler places them in the order of one global execution, so that they are right on every
transport wherever the ops themselves are (`schedlang.lowering.co_issue`): what is proved here of
the ops, their order on each rank and what they need, is proved for every transport.
docs/proof.md has the argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import islpy as isl
from attrs import evolve, frozen

from schedlang.extras.prove.sets.cycles import circle_at
from schedlang.extras.prove.sets.evaluator import Mistake
from schedlang.extras.prove.sets.first_batches import in_order, never_come
from schedlang.extras.prove.sets.isl_functions import at_sizes, nowhere
from schedlang.extras.prove.sets.numbers import Unreadable
from schedlang.extras.prove.sets.obligations import (
    check,
    of_program,
    one_sided,
    sizes_only,
)
from schedlang.extras.prove.sets.relations import Edge, Relations
from schedlang.extras.prove.sets.stamps import Frame, Stamps, find_stamps, pairs_of
from schedlang.extras.prove.sets.statements import UPDATES, Reading, with_digits
from schedlang.extras.prove.sets.to_sets import read
from schedlang.language import syntax
from schedlang.schedule.transports import PORTABLE, transports

#: Circles are looked for at sizes up to these.
_MOST_RANKS = 6
_MOST_OTHERS = 8
#: So many kinds of circles are told apart.
_MOST_CIRCLES = 12
#: Stamps are looked for along so many kinds of edges.
_MOST_PAIRS = 1600
#: Sizes are cut into cases so often.
_MOST_CUTS = 4


@frozen(eq=False)
class Case:
    """Some of the sizes, `where`, and stamps that prove for all of them that no ranks wait for each
    other.
    """

    where: isl.Set
    stamps: Stamps


@frozen(eq=False)
class Outcome:
    """What was found out about a program: the sizes for which it is proved, by cases; those at
    which something is wrong, and what; and those of which nothing is known, and why.
    """

    reading: Reading
    relations: Relations
    edges: tuple[Edge, ...]
    cases: tuple[Case, ...]
    mistakes: tuple[Mistake, ...]
    #: Where ranks block: what is wrong there, and maybe not on other transports.
    blocked: tuple[Mistake, ...]
    unknown: isl.Set
    reason: str

    @property
    def domain(self) -> isl.Set:
        """The sizes for which the program is meant."""
        return self.reading.domain

    @property
    def proved(self) -> isl.Set:
        """The sizes for which it is proved."""
        result = nowhere()
        for case in self.cases:
            result = result | case.where
        return result.coalesce()

    @property
    def wrong(self) -> isl.Set:
        """The sizes at which something is wrong on a `portable` transport."""
        return _where([*self.mistakes, *self.blocked])

    def on(self, transport: str) -> tuple[isl.Set, isl.Set, isl.Set, str]:
        """Of a transport, the sizes for which the program is proved, those at which it is wrong,
        and those of which nothing is known, with the reason.

        What the compiler places is right everywhere or nowhere. A program's own transfers that keep
        the order of one global execution run everywhere, but for the first use of communicators;
        where they do not, nothing is said but where ranks block.
        """
        if transport == PORTABLE or not self.relations.writes_transfers:
            return self.proved, self.wrong, self.unknown, self.reason
        wrong = _where(self.mistakes)
        proved = self.proved
        reason = self.reason
        if any(rules.first_use for rules in transports(transport)):
            never = never_come(self.relations)
            wrong = (wrong | (never - _where(self.blocked))).coalesce()
            proved = (proved & in_order(self.relations)) - never
            reason = "ranks may wait for each other at the first use of a communicator"
        unknown = (self.domain - proved - wrong).coalesce()
        if not _where(self.blocked).is_empty():
            reason = "the transfers are not in the order of one global execution"
        return proved.coalesce(), wrong, unknown, reason


def prove(tree: syntax.Schedule, given: Mapping[str, int]) -> Outcome:
    """What holds of a program for all sizes but those that are given, on a `portable` transport;
    Unreadable where it cannot be read as sets.
    """
    reading = read(tree, given)
    relations = Relations(reading)
    found = [*reading.mistakes, *check(relations)]
    mistakes = list(filter(None, (_at_sizes(each, reading) for each in found)))
    # What is wrong only where batches go over communicators of their own.
    in_batch = Mistake(
        "a transfer that only one side issues in a batch", one_sided(relations)
    )
    blocked = list(filter(None, [_at_sizes(in_batch, reading)]))
    wrong = _where([*mistakes, *blocked])
    edges = tuple(relations.edges())
    rest = (reading.domain - wrong).coalesce()
    cases: list[Case] = []
    # Stamps for all sizes that are left, or a circle of waits, which takes away those that have it:
    #
    #     sizes    ├── circle A ──┼── circle B ──┼──── stamps ────┤
    for _ in range(_MOST_CIRCLES):
        stamps = _stamps(edges, reading, rest)
        if stamps is not None:
            cases.append(Case(rest, stamps))
            rest = nowhere()
            break
        circle = next(_circles(edges, reading, rest), None)
        if circle is None:
            break
        (blocked if relations.writes_transfers else mistakes).append(circle)
        rest = (rest - circle.holds).coalesce()
    if not rest.is_empty():
        for part in parts_of(rest, reading):
            stamps = _stamps(edges, reading, part)
            if stamps is not None:
                cases.append(Case(part, stamps))
                rest = rest - part
    # Of a stream it is for any number of updates, or for none.
    rest = (of_program(rest, reading) & reading.domain).coalesce()
    cases = [evolve(case, where=case.where - rest) for case in cases]
    cases = [case for case in cases if not case.where.is_empty()]
    reason = (
        ""
        if rest.is_empty()
        else "no affine time stamps were found, and no circle of waits"
    )
    return Outcome(
        reading,
        relations,
        edges,
        tuple(cases),
        tuple(mistakes),
        tuple(blocked),
        rest.coalesce(),
        reason,
    )


def _at_sizes(mistake: Mistake, reading: Reading) -> Mistake | None:
    """A mistake at the sizes of a program, if it is one at some."""
    sizes = of_program(mistake.holds & reading.domain, reading)
    return None if sizes.is_empty() else Mistake(mistake.message, sizes)


def _where(mistakes: Sequence[Mistake]) -> isl.Set:
    result = nowhere()
    for mistake in mistakes:
        result = result | mistake.holds
    return result.coalesce()


def _stamps(edges: Sequence[Edge], reading: Reading, where: isl.Set) -> Stamps | None:
    """Stamps for some sizes."""
    frame = Frame(reading.sizes, reading.base)
    pairs = pairs_of(edges, frame, where, {})
    if len(pairs) > _MOST_PAIRS:
        raise Unreadable("its event graph has too many kinds of edges")
    return find_stamps(pairs, frame) if pairs else {}


def _circles(
    edges: Sequence[Edge], reading: Reading, rest: isl.Set
) -> Iterator[Mistake]:
    """Circles of waits, found at the smallest of some sizes that have any."""
    for sizes in small_sizes(reading):
        if not contains(rest, sizes):
            continue
        circle = circle_at(edges, with_digits(sizes))
        if circle is not None:
            sizes_of = of_program(circle.holds & reading.domain, reading)
            yield Mistake("ranks wait for each other", sizes_of)


def small_sizes(reading: Reading) -> list[dict[str, int]]:
    """Some sizes of a program, the ones with the smallest product first."""
    sizes = reading.program_sizes
    most = [_MOST_RANKS if size == "ranks" else _MOST_OTHERS for size in sizes[:2]]
    most += [3] * (len(sizes) - 2)
    values = product(*(range(1, limit + 1) for limit in most))

    def order(value: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        total = 1
        for number in value:
            total *= number
        return total, value

    return [dict(zip(sizes, value, strict=True)) for value in sorted(values, key=order)]


def contains(where: isl.Set, sizes: Mapping[str, int]) -> bool:
    """Whether a set has a size of a program."""
    return not at_sizes(where, with_digits(sizes)).is_empty()


def parts_of(where: isl.Set, reading: Reading) -> list[isl.Set]:
    """Some sizes, cut where one of the statements begins to have instances."""
    parts = [where]
    sizes = (*reading.sizes, UPDATES)
    for statement in reading.statements:
        there = sizes_only(statement.domain, sizes)
        if len(parts) >= 1 << _MOST_CUTS:
            break
        parts = [
            part.coalesce()
            for whole in parts
            for part in (whole & there, whole - there)
            if not part.is_empty()
        ]
    return parts
