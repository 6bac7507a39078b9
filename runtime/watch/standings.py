"""Where every rank stands, which each writes to the process group's store, several times a
second.
"""

import json
from collections.abc import Callable
from math import inf
from typing import Any

from attrs import astuple, field, frozen

_KEY = "stands"


@frozen
class Standing:
    """Where a rank stands: its `action` by index, None outside of a step, and for how many seconds
    now.

    `place` has it in words, as in ` at 1F0 (1f1b.sched:9)`. `waits_for` are the ranks at the other
    ends of what it waits for. `ended` says that it will not go on.
    """

    step: int
    action: int | None
    waits_for: tuple[int, ...] = field(converter=tuple[int, ...])
    seconds: float
    place: str
    ended: bool = False

    @property
    def progress(self) -> tuple[int, float]:
        """How far it is, for comparison with ranks that do the same."""
        return self.step, inf if self.action is None else self.action


class Standings:
    """The standings of some ranks, which have a `name`; RuntimeError when the store is gone."""

    def __init__(self, ranks: int, name: Callable[[int], str], store: Any) -> None:
        self._ranks = ranks
        self._name = name
        self._store = store

    def post(self, rank: int, standing: Standing) -> None:
        """Write that of this rank."""
        self._store.set(f"{_KEY}/{rank}", json.dumps(astuple(standing)))

    def of(self, rank: int) -> Standing | None:
        """What a rank has written last."""
        key = f"{_KEY}/{rank}"
        return Standing(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def lines(self) -> list[str]:
        """What each rank did when it ended, and for whom it waited."""
        return [self.line(rank, self.of(rank)) for rank in range(self._ranks)]

    def line(self, rank: int, standing: Standing | None) -> str:
        """What a rank did, as far as it has said."""
        name = self._name(rank)
        if standing is None:
            return f"{name} has built no pipeline"
        if not standing.ended:
            return f"{name} was last seen{standing.place}"
        if not standing.waits_for:
            return f"{name} has been{standing.place} for {standing.seconds:.1f} s"
        others = " or ".join(map(self._name, standing.waits_for))
        return f"{name} has waited {standing.seconds:.1f} s for {others}{standing.place}"
