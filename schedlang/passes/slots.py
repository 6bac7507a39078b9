"""Whole slots of time: what ops take of them, and weight gradients put into free ones."""

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from schedlang.schedule.kinds import Kind

#: How many slots an op takes: the unit costs; what takes none comes first in its slot.
WIDTH: dict[int, int] = {
    Kind.F: 1,
    Kind.B: 2,
    Kind.I: 1,
    Kind.W: 1,
    Kind.R: 1,
    Kind.U: 0,
    Kind.OFFLOAD: 0,
    Kind.RELOAD: 0,
}

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
