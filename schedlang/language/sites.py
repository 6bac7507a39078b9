"""What is known of a program's ops and claims before it runs.

They are told apart by their locations: indices into the program's spans.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from attrs import frozen

from schedlang.language import syntax
from schedlang.schedule.actions import is_beside, is_collective
from schedlang.schedule.kinds import MAKERS, OF_STAGE, OPS, TRANSFERS, Kind, op_of

#: The kinds of action by their words in a program; `BW` is the older word for a whole backward.
KINDS = {OPS[kind].word: Kind(kind) for kind in OPS}
KINDS |= {TRANSFERS[kind].word: Kind(kind) for kind in TRANSFERS}
KINDS |= {"BW": Kind.B}
#: The words of ops that are of a whole stage, and name no microbatch.
WORDS_OF_STAGE = frozenset(OPS[kind].word for kind in OF_STAGE)


@frozen
class CallSite:
    """An op as it is written in the program.

    `is_next`: it does not name its microbatch. `is_bare`: it has no arguments. `part` is the
    `warmup` or `steady` that it stands in, and `loops` are the variables of the loops around it.
    Ops that are issued together have the location of the first of them as their `batch`.
    """

    word: str
    names_stage: bool
    is_next: bool
    is_bare: bool
    part: str
    loops: tuple[str, ...]
    batch: int = 0


@frozen
class ClaimSite:
    """An `assert` as it is written in the program, with the figures it is about and the functions
    it calls.

    If the program `has_decimals`, figures of time and memory are decimals. A claim `for_all` is
    about every size.
    """

    condition: syntax.Node
    reason: str | None
    functions: tuple[syntax.Fn | syntax.List, ...]
    figures: frozenset[str]
    has_decimals: bool
    for_all: bool


class Figures(Protocol):
    """The figures of a schedule: an attribute for each name of `schedlang.language.scopes.FIGURES`.
    Figures of ranks are sequences.

    If sums of times or of memory are rounded, `rounded_makespan` and `rounded_peak` are upper
    bounds of them; else they are None.
    """

    @property
    def rounded_makespan(self) -> float | None:
        """The makespan, if times are rounded."""

    @property
    def rounded_peak(self) -> float | None:
        """The highest peak, if amounts are rounded."""


@frozen
class Sites:
    """All ops and claims of a program.

    `b_is_half`: weight gradients stand apart, and `B` is the input half of a backward.
    """

    ops: dict[int, CallSite]
    claims: dict[int, ClaimSite]
    parts: frozenset[str]
    has_slices: bool
    b_is_half: bool
    #: Where the `rank` or `block` stands, and a block's interval.
    order: int
    interval: int

    @cached_property
    def width(self) -> int:
        """The length of a call: location, stage, microbatch, and with slices the slice."""
        return 4 if self.has_slices else 3

    @cached_property
    def kinds(self) -> dict[int, Kind]:
        """The kind of the op at each location."""
        kinds = KINDS
        if self.b_is_half:
            kinds = KINDS | {"B": KINDS["I"]}
        return {location: kinds[site.word] for location, site in self.ops.items()}

    @cached_property
    def counted_as(self) -> dict[int, str]:
        """The word under which `next` counts each op: both kinds of backward count together."""
        return {
            location: "B" if KINDS[site.word] in MAKERS[Kind.B] else site.word
            for location, site in self.ops.items()
        }

    @cached_property
    def on_only_stage(self) -> frozenset[int]:
        """The ops without a stage: they mean the only stage of their rank."""
        return self._where(lambda site: not site.names_stage and not site.is_bare)

    @cached_property
    def takes_oldest(self) -> frozenset[int]:
        """Each `W` that takes the oldest weight gradient that is owed."""
        return self._where(lambda site: site.word == "W" and site.is_next)

    @cached_property
    def halves(self) -> frozenset[int]:
        """Halves of backwards."""
        return frozenset(
            location
            for location, kind in self.kinds.items()
            if op_of(kind).owes or kind == Kind.W
        )

    @cached_property
    def takes_next(self) -> frozenset[int]:
        """Ops with `next` for their microbatch."""
        return self._where(
            lambda site: site.is_next and site.word not in ("W", *WORDS_OF_STAGE)
        )

    @cached_property
    def is_mixed(self) -> bool:
        """Whether `next` counts ops that elsewhere name their microbatch."""
        counted_as = self.counted_as
        counted = {counted_as[location] for location in self.takes_next}
        named = {counted_as[location] for location in self.ops.keys() - self.takes_next}
        return bool(counted & named)

    @cached_property
    def unnumbered(self) -> frozenset[int]:
        """The ops of a stream that do not name their microbatch, which they must."""
        return self._where(
            lambda site: bool(site.part) and site.is_next and " " not in site.word
        )

    @cached_property
    def beside_in_batch(self) -> frozenset[int]:
        """Copies and collectives within an `overlap`, where they cannot be."""
        return self._where(lambda site: site.batch > 0 and is_beside(KINDS[site.word]))

    @cached_property
    def streamed_collectives(self) -> frozenset[int]:
        """Collectives in `warmup` or `steady`, where they cannot be."""
        return self._where(
            lambda site: bool(site.part) and is_collective(KINDS[site.word])
        )

    @cached_property
    def batches(self) -> dict[int, int]:
        """The ops that are issued together with others, each with the first of them."""
        return {
            location: site.batch for location, site in self.ops.items() if site.batch
        }

    @cached_property
    def of_stage(self) -> frozenset[int]:
        """The ops of a whole stage outside of a stream; they have no microbatch."""
        return self._where(lambda site: site.word in WORDS_OF_STAGE and not site.part)

    @cached_property
    def streamed(self) -> frozenset[int]:
        """The ops of a stream: their microbatches run on into later updates."""
        return self._where(lambda site: bool(site.part))

    def _where(self, holds: Callable[[CallSite], bool]) -> frozenset[int]:
        return frozenset(location for location, site in self.ops.items() if holds(site))
