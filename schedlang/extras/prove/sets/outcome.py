"""Proves a program for all sizes at once.

If the compiler places the transfers, it does so in the order of one global execution, which is
right on every transport wherever the ops themselves are (`schedlang.lowering.co_issue`). So what is
proved here of the ops, their order and their needs holds on every transport (docs/proof.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import islpy as isl
from attrs import evolve, frozen

from schedlang.extras.prove.sets.cycles import cycle_at
from schedlang.extras.prove.sets.evaluator import Mistake
from schedlang.extras.prove.sets.isl_functions import at_sizes, nowhere
from schedlang.extras.prove.sets.numbers import Unreadable
from schedlang.extras.prove.sets.relations import Edge, Relations
from schedlang.extras.prove.sets.stamps import Frame, Stamps, find_stamps, pairs_of
from schedlang.extras.prove.sets.statements import (
    UPDATES,
    Reading,
    of_program,
    sizes_only,
    with_digits,
)
from schedlang.extras.prove.sets.to_sets import read
from schedlang.extras.prove.sets.written_batches import in_order, never_come, one_sided
from schedlang.language import syntax
from schedlang.schedule.kinds import MAKERS, OPS, STEPS, Kind
from schedlang.schedule.transports import PORTABLE, transports

#: Cycles are looked for at sizes up to these.
_MOST_RANKS = 6
_MOST_OTHERS = 8
#: The most cycles that are looked for.
_MOST_CYCLES = 12
#: The most convex parts of all edges for which stamps are looked for.
_MOST_PAIRS = 1600
#: The sizes are cut at the domains of statements into at most two to the power of this many parts.
_MOST_CUTS = 4


@frozen(eq=False)
class Case:
    """A part of the sizes, and time stamps that prove for all of them that nothing deadlocks."""

    where: isl.Set
    stamps: Stamps


@frozen(eq=False)
class Outcome:
    """The result of a proof: the sizes at which the program is proved, as cases; its mistakes, each
    with the sizes at which it occurs; and the sizes of which nothing is known, with the reason.
    """

    reading: Reading
    relations: Relations
    edges: tuple[Edge, ...]
    cases: tuple[Case, ...]
    mistakes: tuple[Mistake, ...]
    #: Mistakes on transports on which ranks block; they may be none on others.
    blocked: tuple[Mistake, ...]
    unknown: isl.Set
    reason: str

    @property
    def domain(self) -> isl.Set:
        """The sizes that the program does not refuse."""
        return self.reading.domain

    @property
    def proved(self) -> isl.Set:
        """The sizes at which it is proved."""
        result = nowhere()
        for case in self.cases:
            result = result | case.where
        return result.coalesce()

    @property
    def wrong(self) -> isl.Set:
        """The sizes at which it is wrong on `portable`."""
        return _where([*self.mistakes, *self.blocked])

    def on(self, transport: str) -> tuple[isl.Set, isl.Set, isl.Set, str]:
        """The sizes at which the program is proved on a transport, those at which it is wrong,
        those of which nothing is known, and the reason for the last.

        Transfers that the compiler places are right on all transports or on none. Transfers that
        the program writes, in the order of one global execution, are right on all transports,
        except for the first use of communicators. If they are in no such order, only transports on
        which ranks block are decided.
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
    """Prove a program on `portable`, for all sizes that are not `given`; Unreadable if it cannot be
    read as sets.
    """
    reading = read(tree, given)
    relations = Relations(reading)
    found = (_at_sizes(each, reading) for each in _mistakes(relations))
    mistakes = list(filter(None, found))
    # Wrong only on transports where batches have a communicator of their own.
    in_batch = Mistake(
        "a transfer that only one side issues in a batch", one_sided(relations)
    )
    blocked = list(filter(None, [_at_sizes(in_batch, reading)]))
    wrong = _where([*mistakes, *blocked])
    edges = tuple(relations.edges())
    rest = (reading.domain - wrong).coalesce()
    cases: list[Case] = []
    # Look for stamps for all remaining sizes, or for a cycle, whose sizes are taken away:
    #
    #     sizes    ├── cycle A ──┼── cycle B ──┼──── stamps ────┤
    for _ in range(_MOST_CYCLES):
        stamps = _stamps(edges, reading, rest)
        if stamps is not None:
            cases.append(Case(rest, stamps))
            rest = nowhere()
            break
        cycle = next(_cycles(edges, reading, rest), None)
        if cycle is None:
            break
        (blocked if relations.writes_transfers else mistakes).append(cycle)
        rest = (rest - cycle.holds).coalesce()
    if not rest.is_empty():
        for part in parts_of(rest, reading):
            stamps = _stamps(edges, reading, part)
            if stamps is not None:
                cases.append(Case(part, stamps))
                rest = rest - part
    # A program without a flush is proved for any number of updates, or not at all.
    rest = (of_program(rest, reading) & reading.domain).coalesce()
    cases = [evolve(case, where=case.where - rest) for case in cases]
    cases = [case for case in cases if not case.where.is_empty()]
    reason = (
        ""
        if rest.is_empty()
        else "no affine time stamps were found, and no cycle of waits"
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


def _mistakes(relations: Relations) -> list[Mistake]:
    """The mistakes of a program, deadlocks excepted: those of its text, and what a checker of
    certificates says of its orders.
    """
    reading = relations.reading
    more = relations.of(*(Kind(kind) for kind in OPS if kind != Kind.F)).params()
    if reading.is_stream and not reading.domain.is_subset(more):
        raise Unreadable("forwards without a flush that have no backwards")
    updates = [s for s in reading.statements if s.kind in STEPS]
    if updates and relations.of(*MAKERS[Kind.W]).is_empty():
        raise Unreadable("updates of no gradients", updates[0].span)
    facts = relations.orders.facts()
    found = [Mistake(what, amiss.params()) for what, amiss in facts]
    return [*reading.mistakes, *(each for each in found if not each.holds.is_empty())]


def _at_sizes(mistake: Mistake, reading: Reading) -> Mistake | None:
    """The mistake with the sizes at which it occurs; None if there are none."""
    sizes = of_program(mistake.holds & reading.domain, reading)
    return None if sizes.is_empty() else Mistake(mistake.message, sizes)


def _where(mistakes: Sequence[Mistake]) -> isl.Set:
    result = nowhere()
    for mistake in mistakes:
        result = result | mistake.holds
    return result.coalesce()


def _stamps(edges: Sequence[Edge], reading: Reading, where: isl.Set) -> Stamps | None:
    """Time stamps for some sizes."""
    frame = Frame(reading.sizes, reading.base)
    pairs = pairs_of(edges, frame, where, {})
    if len(pairs) > _MOST_PAIRS:
        raise Unreadable("its event graph has too many kinds of edges")
    return find_stamps(pairs, frame) if pairs else {}


def _cycles(
    edges: Sequence[Edge], reading: Reading, rest: isl.Set
) -> Iterator[Mistake]:
    """Deadlocks, found at the smallest of some sizes that have any."""
    for sizes in small_sizes(reading):
        if not contains(rest, sizes):
            continue
        cycle = cycle_at(edges, with_digits(sizes))
        if cycle is not None:
            sizes_of = of_program(cycle.holds & reading.domain, reading)
            yield Mistake("ranks wait for each other", sizes_of)


def small_sizes(reading: Reading) -> list[dict[str, int]]:
    """Small sizes of the program, in the order of their product."""
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
    """Whether a set contains a size of the program."""
    return not at_sizes(where, with_digits(sizes)).is_empty()


def parts_of(where: isl.Set, reading: Reading) -> list[isl.Set]:
    """The sizes, cut where a statement begins to have instances."""
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
