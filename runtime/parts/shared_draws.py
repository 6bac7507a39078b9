"""Random numbers that stages of two ranks both draw.

In one process all stages draw from one sequence, so no two of them leave out the same positions by
dropout. Here each rank has a sequence of its own. Where a script seeds all of them alike, as for
batches that are the same everywhere, their stages draw the same numbers. That computes something,
and no stage sees it: so it is asked about, once.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from itertools import combinations

import torch
import torch.distributed as dist

from schedlang.runtime.door import Rank, Site
from schedlang.runtime.part import Forward, Part, parts_by_stage
from schedlang.runtime.random_state import State, random_state
from schedlang.runtime.wire import Wire
from schedlang.schedule.layout import Layout


class Draws(Part):
    """From where the first forward of a stage draws random numbers, as a number; 0 if it draws
    none.
    """

    def __init__(self, device: torch.device) -> None:
        self.begin = 0
        self._device = device
        self._is_first = True
        self._state: State | None = None

    def before_forward(self, run: Forward) -> None:
        """Keep the state of the random numbers."""
        if self._is_first and not run.is_evaluation:
            self._is_first = False
            self._state = random_state(self._device)

    def after_forward(self, run: Forward) -> None:
        """See whether some were drawn."""
        if self._state is None:
            return
        now = random_state(self._device)
        before = [
            state.numpy().tobytes()
            for generator, state in self._state.items()
            if not torch.equal(state, now[generator])
        ]
        if before:
            digest = hashlib.blake2b(b"".join(before), digest_size=7).digest()
            self.begin = int.from_bytes(digest, "big")
        self._state = None


class SharedDraws(Part):
    """What all ranks say after the first step, about the random numbers of each stage."""

    def __init__(
        self,
        layout: Layout,
        own: Mapping[int, Draws],
        wire: Wire,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._own = own
        self._wire = wire
        self._device = device
        self._is_first = True

    def end_step(self) -> None:
        """Ask, on rank 0, about the first two stages of different ranks that draw the same."""
        if not self._is_first:
            return
        self._is_first = False
        placement = self._layout.placement
        begins = torch.zeros(len(placement), dtype=torch.int64, device=self._device)
        for stage, own in self._own.items():
            begins[stage] = own.begin
        self._wire.reduce(begins, dist.ReduceOp.SUM)
        known = begins.tolist()
        for one, other in combinations(range(len(placement)), 2):
            if known[one] and known[one] == known[other]:
                if self._wire.processes.own == 0:
                    _warn_of(one, other)
                return


def _warn_of(one: int, other: int) -> None:
    warnings.warn(
        f"stages {one} and {other} draw the same random numbers, so that dropout leaves out the "
        "same positions in both: seed each rank otherwise, `torch.manual_seed(seed + rank)`, and "
        "let batches that are alike on all ranks draw from a `torch.Generator` of their own",
        stacklevel=2,
    )


def of_stages(site: Site) -> Iterator[tuple[int, Draws]]:
    """Those of all stages."""
    for stage in site.modules:
        yield stage, Draws(site.device)


def of_rank(rank: Rank) -> Iterator[SharedDraws]:
    """What ranks say of their stages' own."""
    layout = rank.site.plan.layout
    own = parts_by_stage(Draws, rank.site.parts)
    yield SharedDraws(layout, own, rank.wire, rank.site.device)
