"""The heartbeats of ranks: each rank writes what it does to the process group's store, several
times a second.
"""

import json
from math import inf
from typing import Any

from attrs import astuple, field, frozen

_KEY = "heartbeat"

#: What a rank does: its step, the index of its action, and the processes for which it waits.
Doing = tuple[int, int | None, tuple[int, ...]]


@frozen
class Heartbeat:
    """What a rank does: the index of its `action`, None outside a step; for how many seconds it has
    been there; and for how many of the last ones it has made no progress (`idle`).

    `place` is the action in words, such as ` at 1F0 (1f1b.sched:9)`. `waits_for` are the ranks for
    which it waits. `ended` says that it has stopped for good.
    """

    step: int
    action: int | None
    waits_for: tuple[int, ...] = field(converter=tuple[int, ...])
    seconds: float
    idle: float
    place: str
    ended: bool = False

    @property
    def is_in_op(self) -> bool:
        """Whether the rank is in an op of a step, and not waiting for another rank."""
        return self.action is not None and not self.waits_for

    @property
    def progress(self) -> tuple[int, float]:
        """The rank's position in its actions, for comparison with replicas, which have the same."""
        # Outside a step, all of its actions are done.
        return self.step, inf if self.action is None else self.action


class Heartbeats:
    """The heartbeats of all ranks; RuntimeError when the store is gone."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, rank: int, heartbeat: Heartbeat) -> None:
        """Write the heartbeat of this rank."""
        self._store.set(f"{_KEY}/{rank}", json.dumps(astuple(heartbeat)))

    def of(self, rank: int) -> Heartbeat | None:
        """The last heartbeat of a rank."""
        key = f"{_KEY}/{rank}"
        return (
            Heartbeat(*json.loads(self._store.get(key)))
            if self._store.check([key])
            else None
        )
