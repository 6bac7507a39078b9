"""What no stage can see alone: ranks compare numbers of all stages once, after the first step."""

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from schedlang.runtime.door import Rank
from schedlang.runtime.part import Part


class Compared(Part):
    """Gathers the numbers of this rank's stages on all ranks, after the first step. `wrong` says of
    those of all stages what is wrong with them, which rank 0 warns of.
    """

    def __init__(
        self,
        rank: Rank,
        numbers: Callable[[], Mapping[int, Sequence[int]]],
        wrong: Callable[[Sequence[Sequence[int]]], str | None],
    ) -> None:
        self._rank = rank
        self._numbers = numbers
        self._wrong = wrong
        self._is_first = True

    def end_step(self) -> None:
        """Compare the stages, once."""
        if not self._is_first:
            return
        self._is_first = False
        own = self._numbers()
        width = max(map(len, own.values()))
        site = self._rank.site
        stages = len(site.plan.placement)
        table = torch.zeros(stages, width, dtype=torch.int64, device=site.device)
        for stage, numbers in own.items():
            table[stage] = torch.tensor(numbers)
        self._rank.wire.reduce(table, dist.ReduceOp.SUM)
        wrong = self._wrong(table.tolist())
        if wrong is not None and site.rank == 0:
            warnings.warn(wrong, stacklevel=2)
