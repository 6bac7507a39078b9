"""A program as statements over sets of instances, with its sizes as symbols.

A statement is an op as it is written. Its instances are one for each rank and round of the loops
around it, as an integer set; what an instance does (stage, update, microbatch, slice) is an affine
function of these; and so is where it stands in the order of its rank: a vector in which the places
of statements and the variables of loops take turns, compared by its first entries that differ
(Feautrier 1992, "Some efficient solutions to the affine scheduling problem", part II).

    rank r {
        for m in 0 .. warmup { F(m) }            S0[r, m]    order (0, m, 0)
        for m in warmup .. microbatches {
            F(m)                                 S1[r, m]    order (1, m, 0)
            B(m - warmup)                        S2[r, m]    order (1, m, 1)
        }
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import islpy as isl
from attrs import frozen

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.sets.counting import RANK, Order
from schedlang.extras.prove.sets.evaluator import Mistake, Scope
from schedlang.extras.prove.sets.isl_functions import (
    between,
    nowhere,
    number,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import BASE, Number, of_number
from schedlang.extras.prove.sets.numbers import between as are_between
from schedlang.language.syntax import Node
from schedlang.schedule.kinds import Kind

#: The sizes of a program that are symbols, unless they are given.
SIZES = ("ranks", "microbatches", "slices")
#: The symbols that no program names: how many updates of a stream, of which update a round is, a
#: stage; and a rank, RANK.
UPDATES = "updates"
UPDATE = "_u"
STAGE = "_s"
#: A stage that takes what another one makes.
LATER = "_later"
#: In base `ranks`, the digits of the number of microbatches: groups of as many as there are ranks,
#: and how many more there are. They are sizes then, in its place.
GROUPS = "groups"
REST = "rest"

#: An update, a microbatch of it as two digits, and a slice of that. Without a base the first digit
#: is 0, and the second one the microbatch.
Unit = tuple[isl.PwAff, isl.PwAff, isl.PwAff, isl.PwAff]


@frozen(eq=False)
class Statement:
    """An op as it is written, and all that it does: for each point of its `domain`, a condition of
    sizes and of the symbols `indices` (the rank, then the loops around it).

    `batch` is a number of its own for the ops that are issued together, or 0.
    """

    number: int
    kind: Kind
    span: Span
    indices: tuple[str, ...]
    domain: isl.Set
    stage: isl.PwAff
    unit: Unit
    order: Order
    batch: int = 0

    @property
    def name(self) -> str:
        """Its name among sets."""
        return f"S{self.number}"


@frozen(eq=False)
class Line:
    """The stages of a pipeline, `first` and the `stages` from it on: `rank` holds the one that the
    symbol STAGE counts from the pipeline's first.
    """

    name: str
    first: isl.PwAff
    stages: isl.PwAff
    microbatches: Number
    rank: isl.PwAff

    def holds(self) -> isl.Set:
        """Which stage (STAGE, counted through all pipelines) is on which rank (RANK)."""
        own = between(number(0), symbol(STAGE), self.stages)
        there = own & symbol(RANK).eq_set(self.rank)
        return shifted(there, self.first)


def shifted(condition: isl.Set, by: isl.PwAff) -> isl.Set:
    """A condition of STAGE for a stage that is so many further on."""
    at = condition.find_dim_by_name(isl.dim_type.param, STAGE)
    moved = condition.set_dim_name(isl.dim_type.param, at, "_before")
    moved = moved & symbol(STAGE).eq_set(symbol("_before").add(by))
    return without(moved, ["_before"])


@frozen(eq=False)
class Claim:
    """What a program claims `for all`: a `condition`, in a `scope`, where it stands."""

    condition: Node
    scope: Scope
    where: isl.Set


@frozen(eq=False)
class Weights:
    """The rule by which some `stages`, a condition of STAGE, read their weights: its name, as a
    program has it, and by how many updates they are delayed, which is 0 by other rules.
    """

    rule: str
    stages: isl.Set
    delay: isl.PwAff


@frozen(eq=False)
class Reading:
    """A program as sets: its symbolic `sizes`, the `domain` of them for which it is meant, and what
    is wrong with it where. `in_base`: its microbatches are numbers of two digits, in base `ranks`.
    """

    name: str
    sizes: tuple[str, ...]
    in_base: bool
    domain: isl.Set
    lines: tuple[Line, ...]
    #: From which stage (STAGE) to which (LATER) what it makes goes, within a pipeline.
    onward: isl.Set
    slices: isl.PwAff
    #: The stages of a rank (RANK), by their numbers, where it has as many.
    own_stages: tuple[isl.PwAff, ...]
    statements: tuple[Statement, ...]
    mistakes: tuple[Mistake, ...]
    claims: tuple[Claim, ...]
    is_stream: bool
    #: Every stage is among those of one rule.
    weights: tuple[Weights, ...]

    @property
    def base(self) -> str | None:
        """The base of its numbers, where these have two digits."""
        return BASE if self.in_base else None

    @property
    def held(self) -> isl.Set:
        """Which stage (STAGE) is on which rank (RANK)."""
        parts = [line.holds() for line in self.lines]
        return any_of(parts) & self.domain

    @property
    def program_sizes(self) -> tuple[str, ...]:
        """The sizes as the program has them."""
        names = [
            "microbatches" if size == GROUPS else size
            for size in self.sizes
            if size != REST
        ]
        return tuple(names)

    def are_microbatches(self, line: Line, group: str, microbatch: str) -> isl.Set:
        """Where two symbols are the digits of a microbatch of a pipeline."""
        low = symbol(microbatch)
        high = symbol(group)
        if self.in_base:
            where = self.domain & between(number(0), low, symbol(BASE))
        else:
            where = self.domain & high.eq_set(number(0))
        value = Number(low, high if self.in_base else None)
        return are_between(of_number(0), value, line.microbatches, where)


def with_digits(sizes: Mapping[str, int]) -> dict[str, int]:
    """Some sizes, with the digits of their number of microbatches in base `ranks`."""
    if not {"ranks", "microbatches"} <= sizes.keys():
        return dict(sizes)
    groups, rest = divmod(sizes["microbatches"], sizes["ranks"])
    return {**sizes, GROUPS: groups, REST: rest}


def any_of(parts: Sequence[isl.Set]) -> isl.Set:
    """Where one of some conditions holds."""
    result = nowhere()
    for part in parts:
        result = result | part
    return result.coalesce()
