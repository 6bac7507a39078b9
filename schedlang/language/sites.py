"""What is known of a program's ops and claims before it runs, by where they stand in its text."""

from collections.abc import Callable
from functools import cached_property

from attrs import frozen

from schedlang.language import syntax
from schedlang.schedule.kinds import Kind

#: The kinds of ops by their words in a program.
_KINDS = {
    "F": Kind.F,
    "B": Kind.B,
    "BW": Kind.B,
    "I": Kind.I,
    "W": Kind.W,
    "R": Kind.R,
    "U": Kind.U,
    "offload": Kind.OFFLOAD,
    "reload": Kind.RELOAD,
    "send F": Kind.SEND_F,
    "recv F": Kind.RECV_F,
    "send B": Kind.SEND_B,
    "recv B": Kind.RECV_B,
}
_BACKWARDS = ("B", "BW", "I")


@frozen
class CallSite:
    """A place in a program where an op is written.

    It may name its stage; where it `is_next`, it does not name its microbatch; and where it
    `is_bare`, nothing at all. `part` is `warmup` or `steady`. `batch` is the place of the first of
    the ops that are issued together with it, or 0. `loops` are the variables of the loops around.
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
    """A place in a program where something is claimed of `figures`, with the functions it calls."""

    condition: syntax.Node
    reason: str | None
    functions: tuple[syntax.Fn, ...]
    figures: frozenset[str]


@frozen
class Sites:
    """All ops and claims of a program.

    Where the program `splits_backward` and does not write `I`, its `B` is the input half.
    """

    ops: dict[int, CallSite]
    claims: dict[int, ClaimSite]
    parts: frozenset[str]
    has_slices: bool
    splits_backward: bool
    writes_halves: bool
    #: The places of the `rank` or `block`, and of a block's interval.
    order: int
    interval: int

    @cached_property
    def width(self) -> int:
        """How many numbers the program gives of a call: place, stage, microbatch, slice."""
        return 4 if self.has_slices else 3

    @cached_property
    def kinds(self) -> dict[int, Kind]:
        """The kind of the op at each place."""
        kinds = _KINDS
        if self.splits_backward and not self.writes_halves:
            kinds = _KINDS | {"B": Kind.I}
        return {place: kinds[site.word] for place, site in self.ops.items()}

    @cached_property
    def families(self) -> dict[int, str]:
        """What `next` counts together at each place: a backward is one thing however written."""
        return {
            place: "B" if site.word in _BACKWARDS else site.word for place, site in self.ops.items()
        }

    @cached_property
    def nameless(self) -> frozenset[int]:
        """The places of ops that mean the only stage of their rank."""
        return self._where(lambda site: not site.names_stage and not site.is_bare)

    @cached_property
    def owing(self) -> frozenset[int]:
        """The places of weight gradients that are the oldest ones owed."""
        return self._where(lambda site: site.word == "W" and site.is_next)

    @cached_property
    def halves(self) -> frozenset[int]:
        """The places of halves of backwards."""
        return frozenset(place for place, kind in self.kinds.items() if kind in (Kind.I, Kind.W))

    @cached_property
    def counted(self) -> frozenset[int]:
        """The places of ops whose microbatch is the next one that their rank has not done yet."""
        return self._where(lambda site: site.is_next and site.word not in ("W", "U"))

    @cached_property
    def is_mixed(self) -> bool:
        """Whether some ops take the next microbatch after others that name theirs."""
        families = self.families
        counted = {families[place] for place in self.counted}
        named = {families[place] for place in self.ops.keys() - self.counted}
        return bool(counted & named)

    @cached_property
    def unnumbered(self) -> frozenset[int]:
        """The places of ops in a stream that do not name their microbatch, as they must."""
        return self._where(lambda site: bool(site.part) and site.is_next and " " not in site.word)

    @cached_property
    def batched_copies(self) -> frozenset[int]:
        """The places of copies to the host that are issued together with others, as they cannot."""
        return self._where(lambda site: site.batch > 0 and site.word in ("offload", "reload"))

    @cached_property
    def batches(self) -> dict[int, int]:
        """For the place of each op that is issued together with others, that of the first one."""
        return {place: site.batch for place, site in self.ops.items() if site.batch}

    @cached_property
    def updates(self) -> frozenset[int]:
        """The places of optimizer steps outside of a stream, which are of no microbatch."""
        return self._where(lambda site: site.word == "U" and not site.part)

    @cached_property
    def streamed(self) -> frozenset[int]:
        """The places of ops whose microbatches run on into later updates."""
        return self._where(lambda site: bool(site.part))

    def _where(self, holds: Callable[[CallSite], bool]) -> frozenset[int]:
        return frozenset(place for place, site in self.ops.items() if holds(site))
