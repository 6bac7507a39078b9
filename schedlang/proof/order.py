"""Does every action stand after what it needs, in the order of its rank?"""

from collections.abc import Iterator

import numpy as np

from schedlang.schedule.findings import Finding
from schedlang.schedule.needed_gradients import sums_of
from schedlang.schedule.needs import Needs, all_needs_of, needs_of
from schedlang.schedule.schedule import Schedule


def check_order(schedule: Schedule) -> Iterator[tuple[int, Finding]]:
    """The actions that stand before what their rank makes for them, or receives, by their rows;
    each with what to say of it.
    """
    is_step_late = len(sums_of(schedule).late(schedule.columns)) > 0
    needs = all_needs_of(schedule) if is_step_late else needs_of(schedule)
    # What provides must stand before the batch of what needs it, since ops that overlap begin
    # together and hand nothing to each other. A provider is on the same rank: the op itself, or the
    # receive of what another rank has made.
    is_received = needs.is_message & ~schedule.columns.is_transfer[needs.user]
    provider = np.where(is_received, needs.receive, needs.maker)
    is_before = (provider >= 0) & (provider < schedule.columns.batch[needs.user])
    # What other ranks add to a sum comes from them, whenever it is there.
    late = np.flatnonzero(~is_before & ~needs.is_sum)
    for need in late[np.argsort(needs.user[late], kind="stable")].tolist():
        yield (
            int(needs.user[need]),
            _too_early(schedule, needs, need, int(provider[need])),
        )


def _too_early(schedule: Schedule, needs: Needs, need: int, provider: int) -> Finding:
    row = int(needs.user[need])
    rank, index = schedule.columns.place(row)
    action = schedule.name_of(rank, index)
    # What makes a gradient of weights may be a whole backward: it is told as it stands there.
    needed = schedule.names.action(*needs.action(need))
    if provider >= 0:
        needed = schedule.name_of(*schedule.columns.place(provider))
    message = f"`{action}` on rank {rank} runs before `{needed}`"
    help = None
    if needs.is_message[need]:
        help = "a program that writes any `send` or `recv` must write all of them"
    numbers = (int(schedule.columns.stage[row]), int(needs.number[need]))
    place = int(schedule.columns.source[row])
    return Finding("order", message, rank, place, help=help, numbers=numbers)
