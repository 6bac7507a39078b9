"""A warning if stages on two ranks draw the same random numbers.

In one process all stages draw from one sequence, so their dropout masks differ. Here each rank has
its own generator. If a script seeds all ranks alike, for example to make the same batches
everywhere, their stages draw the same numbers. No stage can see that, so ranks compare their
states once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch

from schedlang.runtime.door import Rank, Site
from schedlang.runtime.part import Forward, Part, parts_by_stage
from schedlang.runtime.parts.compared import Compared
from schedlang.runtime.random_state import State, random_state


class Draws(Part):
    """A hash of the random state from which the first forward of a stage draws; 0 if it draws
    nothing.
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
        """Compute the hash if the forward has drawn random numbers."""
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


def _wrong(states: Sequence[Sequence[int]]) -> str | None:
    """The first two stages that draw the same random numbers."""
    for (one, (state,)), (other, (same,)) in combinations(enumerate(states), 2):
        if state and state == same:
            return (
                f"stages {one} and {other} draw the same random numbers, so that dropout leaves "
                "out the same positions in both: seed each rank otherwise, "
                "`torch.manual_seed(seed + rank)`, and let batches that are alike on all ranks "
                "draw from a `torch.Generator` of their own"
            )
    return None


def of_stages(site: Site) -> Iterator[tuple[int, Draws]]:
    """Make the part for every stage."""
    for stage in site.modules:
        yield stage, Draws(site.device)


def of_rank(rank: Rank) -> Iterator[Compared]:
    """Make the part that compares all ranks."""
    own = parts_by_stage(Draws, rank.site.parts)
    yield Compared(
        rank, lambda: {stage: [draws.begin] for stage, draws in own.items()}, _wrong
    )
