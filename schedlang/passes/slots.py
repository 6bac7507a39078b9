"""Weight gradients put into free slots of time."""

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def fill_slots(placed: Iterable[tuple[int, int, Item, Iterable[Item]]]) -> list[tuple[int, Item]]:
    """Items with their slots, and in free slots the oldest weight gradient owed; those left over
    come at the end.

    `placed` has each item's slot, its width, itself, and the weight gradients that it leaves owed,
    in order of slots.
    """
    filled: list[tuple[int, Item]] = []
    owed: deque[Item] = deque()
    now = 0
    for slot, width, item, leaves in placed:
        while owed and now < slot:
            filled.append((now, owed.popleft()))
            now += 1
        filled.append((slot, item))
        owed.extend(leaves)
        now = max(now, slot + width)
    return filled + list(enumerate(owed, now))
