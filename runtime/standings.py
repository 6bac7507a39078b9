"""Where every rank stands, which each writes to the process group's store, several times a second."""

import json
from typing import Any

from attrs import frozen

from schedlang.plan import Plan

_KEY = "stands"


@frozen
class Standing:
    """Where a rank stands: its `action` by index, None outside of a step, and for how many seconds now.

    `waits_for` is the rank at the other end of the message that it waits for. `ended` says that it will not go on.
    """

    step: int
    action: int | None
    waits_for: int | None
    seconds: float
    ended: bool = False

    def place(self, plan: Plan, rank: int) -> str:
        """As in ` at 1F0 (1f1b.sched:9)`."""
        if self.action is None:
            return " between two steps" if self.step else " at the start"
        return f" at {plan.ranks[rank].word(self.action)} ({plan.where(rank, self.action)})"


class Standings:
    """The standings of all ranks of a plan; RuntimeError when the store is gone."""

    def __init__(self, plan: Plan, store: Any) -> None:
        self._plan, self._store = plan, store

    def post(self, rank: int, standing: Standing) -> None:
        """Write that of this rank."""
        values = standing.step, standing.action, standing.waits_for, standing.seconds, standing.ended
        self._store.set(f"{_KEY}/{rank}", json.dumps(values))

    def of(self, rank: int) -> Standing | None:
        """What a rank has written last."""
        key = f"{_KEY}/{rank}"
        return Standing(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def lines(self) -> list[str]:
        """What each rank did when it ended, and for whom it waited."""
        return [self.line(rank, self.of(rank)) for rank in range(len(self._plan.ranks))]

    def line(self, rank: int, standing: Standing | None) -> str:
        """What a rank did, as far as it has said."""
        if standing is None:
            return f"rank {rank} has built no pipeline"
        place = standing.place(self._plan, rank)
        if not standing.ended:
            return f"rank {rank} was last seen{place}"
        if standing.waits_for is None:
            return f"rank {rank} has been{place} for {standing.seconds:.1f} s"
        return f"rank {rank} has waited {standing.seconds:.1f} s for rank {standing.waits_for}{place}"
