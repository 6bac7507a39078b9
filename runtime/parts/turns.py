"""Says once which stages have forwards and backwards that the plan overlaps, and run them one after
the other.
"""

import logging
from collections.abc import Iterator, Mapping

from schedlang.plan.plan import Plan
from schedlang.ranks.overlaps import overlapped_pairs
from schedlang.runtime.door import Rank
from schedlang.runtime.part import Part
from schedlang.runtime.stage import Stage

_LOG = logging.getLogger("schedlang.runtime")


class Turns(Part):
    """Looks after the first training step whether stages have taken turns; rank 0 says it for
    all.
    """

    def __init__(self, plan: Plan, stages: Mapping[int, Stage]) -> None:
        actions = plan.ranks[0]
        numbers = {actions.stage[index] for index in overlapped_pairs(actions)}
        self._stages = [stages[number] for number in sorted(numbers)]

    def end_step(self) -> None:
        """Say it, once."""
        others = [str(stage.number) for stage in self._stages if not stage.takes_turns]
        self._stages = []
        if others:
            _LOG.warning(
                "%s %s on rank 0: forwards and backwards that the plan overlaps run one after the "
                "other, since the module neither says where its components end (end_component) nor "
                "has a method `overlapped`",
                "stage" if len(others) == 1 else "stages",
                ", ".join(others),
            )


def of_rank(rank: Rank) -> Iterator[Turns]:
    """Rank 0 prints the notice, once for the job."""
    if rank.site.rank == 0:
        yield Turns(rank.site.plan, rank.stages)
