"""A program as statements over sets of instances; its sizes are symbols.

A statement is an op of the text. It has an instance for each rank and round of the loops around it:
an integer set. The stage, update, microbatch and slice of an instance are affine functions of rank,
loop variables and sizes. So is its place in the order of its rank: a vector in which positions of
statements and variables of loops alternate, compared lexicographically (Feautrier 1992, "Some
efficient solutions to the affine scheduling problem", part II).

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
from typing import Any

import islpy as isl
from attrs import frozen

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.sets.counting import RANK, Order
from schedlang.extras.prove.sets.evaluator import Evaluator, Mistake
from schedlang.extras.prove.sets.isl_functions import (
    between,
    nowhere,
    number,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import BASE, Number, of_number
from schedlang.extras.prove.sets.numbers import between as are_between
from schedlang.language.sites import ClaimSite
from schedlang.schedule.kinds import Kind

#: The parameters that are symbols, unless they are given.
SIZES = ("ranks", "microbatches", "slices")
#: Symbols that no program names: the number of updates of a program without a flush, the update of
#: a round of `steady`, a stage. (The rank's is `counting.RANK`.)
UPDATES = "updates"
UPDATE = "_u"
STAGE = "_s"
#: The symbol of a stage that takes what STAGE makes.
LATER = "_later"
#: The two digits of `microbatches` in base `ranks`. They are sizes in its place.
GROUPS = "groups"
REST = "rest"

#: What an op is about besides its stage: an update, the two digits of a microbatch, and a slice.
#: Without a base the first digit is 0 and the second one is the microbatch.
Unit = tuple[isl.PwAff, isl.PwAff, isl.PwAff, isl.PwAff]


@frozen(eq=False)
class Statement:
    """An op of the text with all its instances: the points of `domain`, a condition on the sizes
    and on the symbols `indices` (the rank, then the variables of loops).

    `batch` is the number of its exchange or overlap, or 0.
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
        """Its name in isl's sets."""
        return f"S{self.number}"


@frozen(eq=False)
class Line:
    """The stages of a pipeline: `stages` of them, counted from `first`. `rank` is the rank that
    holds the stage STAGE, counted within the pipeline.
    """

    name: str
    first: isl.PwAff
    stages: isl.PwAff
    microbatches: Number
    rank: isl.PwAff

    def holds(self) -> isl.Set:
        """The condition that the stage STAGE, counted through all pipelines, is on the rank
        RANK.
        """
        own = between(number(0), symbol(STAGE), self.stages)
        there = own & symbol(RANK).eq_set(self.rank)
        return shifted(there, self.first)


def shifted(condition: isl.Set, by: isl.PwAff) -> isl.Set:
    """The condition with `STAGE - by` in place of STAGE."""
    at = condition.find_dim_by_name(isl.dim_type.param, STAGE)
    moved = condition.set_dim_name(isl.dim_type.param, at, "_before")
    moved = moved & symbol(STAGE).eq_set(symbol("_before").add(by))
    return without(moved, ["_before"])


@frozen(eq=False)
class Claim:
    """A claim `for all` of the program, the values of its names with what evaluates them, and the
    condition under which the program comes to it.
    """

    site: ClaimSite
    evaluator: Evaluator
    values: Mapping[str, Any]
    where: isl.Set


@frozen(eq=False)
class Weights:
    """The rule for which version of their weights the `stages` read (a condition on STAGE): the
    name of the rule, and its delay in updates, 0 for other rules than `delay`.
    """

    rule: str
    stages: isl.Set
    delay: isl.PwAff


@frozen(eq=False)
class Reading:
    """A program as sets: its symbolic `sizes`, the `domain` of sizes that it does not refuse, and
    its mistakes. With `in_base`, microbatches are numbers of two digits in base `ranks`.
    """

    name: str
    sizes: tuple[str, ...]
    in_base: bool
    domain: isl.Set
    lines: tuple[Line, ...]
    #: The condition that what the stage STAGE makes goes to the stage LATER, within a pipeline.
    onward: isl.Set
    slices: isl.PwAff
    #: The stages of the rank RANK by the numbers of its chunks; each is defined where the rank has
    #: that chunk.
    own_stages: tuple[isl.PwAff, ...]
    statements: tuple[Statement, ...]
    mistakes: tuple[Mistake, ...]
    claims: tuple[Claim, ...]
    is_stream: bool
    #: Each stage has exactly one of these rules.
    weights: tuple[Weights, ...]

    @property
    def base(self) -> str | None:
        """The base of its numbers, if they have two digits."""
        return BASE if self.in_base else None

    @property
    def held(self) -> isl.Set:
        """The condition that the stage STAGE is on the rank RANK."""
        parts = [line.holds() for line in self.lines]
        return any_of(parts) & self.domain

    @property
    def program_sizes(self) -> tuple[str, ...]:
        """The sizes by their names in the program."""
        names = [
            "microbatches" if size == GROUPS else size
            for size in self.sizes
            if size != REST
        ]
        return tuple(names)

    def are_microbatches(self, line: Line, group: str, microbatch: str) -> isl.Set:
        """The condition that two symbols are the digits of a microbatch of a pipeline."""
        low = symbol(microbatch)
        high = symbol(group)
        if self.in_base:
            where = self.domain & between(number(0), low, symbol(BASE))
        else:
            where = self.domain & high.eq_set(number(0))
        value = Number(low, high if self.in_base else None)
        return are_between(of_number(0), value, line.microbatches, where)


def with_digits(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes, with the digits of `microbatches` in base `ranks` added."""
    if not {"ranks", "microbatches"} <= sizes.keys():
        return dict(sizes)
    groups, rest = divmod(sizes["microbatches"], sizes["ranks"])
    return {**sizes, GROUPS: groups, REST: rest}


def any_of(parts: Sequence[isl.Set]) -> isl.Set:
    """The disjunction of some conditions."""
    result = nowhere()
    for part in parts:
        result = result | part
    return result.coalesce()


def of_program(condition: isl.Set, reading: Reading) -> isl.Set:
    """The sizes at which a condition holds; of a program without a flush, for some number of
    updates.
    """
    return sizes_only(
        condition, [size for size in reading.sizes if size != UPDATES]
    ).coalesce()


def sizes_only(condition: isl.Set, sizes: Sequence[str]) -> isl.Set:
    """The condition, with all symbols but `sizes` projected out."""
    for at in reversed(range(condition.dim(isl.dim_type.param))):
        if condition.get_dim_name(isl.dim_type.param, at) not in sizes:
            condition = condition.project_out(isl.dim_type.param, at, 1)
    return condition
