"""Does every action stand after what it needs, in the order of its rank?"""

from collections.abc import Iterator

import numpy as np

from schedlang.schedule.columns import Ints
from schedlang.schedule.findings import Finding
from schedlang.schedule.schedule import Schedule


def check_order(schedule: Schedule) -> Iterator[tuple[int, Finding]]:
    """The actions that stand before what their rank makes for them, or receives, by their rows;
    each with what to say of it.
    """
    for need in needs_too_late(schedule).tolist():
        yield int(schedule.needs.user[need]), _too_early(schedule, need)


def needs_too_late(schedule: Schedule) -> Ints:
    """The needs, in the order of their actions, that nothing meets before these on their own rank.

    A sum is different: what other ranks add to it comes from them, whenever it is there.
    """
    needs = schedule.needs
    is_received = needs.is_message & ~schedule.columns.is_transfer[needs.user]
    provider = np.where(is_received, needs.receive, needs.maker)
    is_before = (provider >= 0) & (provider < schedule.columns.batch[needs.user])
    late = np.flatnonzero(~is_before & ~needs.is_sum)
    return late[np.argsort(needs.user[late], kind="stable")]


def _too_early(schedule: Schedule, need: int) -> Finding:
    needs = schedule.needs
    row = int(needs.user[need])
    rank, index = schedule.columns.place(row)
    action = schedule.name_of(rank, index)
    needed = schedule.names.action(*needs.action(need))
    message = f"`{action}` on rank {rank} runs before `{needed}`"
    help = None
    if needs.is_message[need]:
        help = "a program that writes any `send` or `recv` must write all of them"
    numbers = (int(schedule.columns.stage[row]), int(needs.number[need]))
    place = int(schedule.columns.source[row])
    return Finding("order", message, rank, place, help=help, numbers=numbers)
