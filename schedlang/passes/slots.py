"""Put the weight gradients that a rank owes into its empty time slots."""

import numpy as np

from schedlang.schedule.arrays import Ints, repeated


def fill_slots(slot: Ints, width: Ints, owes: Ints) -> tuple[Ints, Ints]:
    """The order of a rank's items and weight gradients, and their slots. An empty slot gets the
    oldest weight gradient that is ready; the rest come at the end.

    Items are given in order, by their first slots, their widths, and how many weight gradients are
    ready after each (`owes`). The order names items by their index, and weight gradients by the
    numbers behind these, in the order in which they become ready.
    """
    # Items A and B, a free slot between them and three after B; a and b are ready after A, c after
    # B:
    #
    #     slot                  0   1   2   3   4   5   6
    #     item                  A       B               …
    #     number of free slot       0       1   2   3   …
    #     weight gradient           a       b   c
    #
    # It is a queue with one server, the empty slots: weight gradient i becomes ready after come[i]
    # empty slots, and gets the empty slot served[i] = max(come[i], served[i - 1] + 1).
    work = np.append(0, np.cumsum(width))
    free_before = slot - work[:-1]
    turn = np.arange(owes.sum())
    come = repeated(free_before, owes)
    served = np.maximum.accumulate(come - turn) + turn if len(turn) else turn
    items_before = np.searchsorted(free_before, served, "right")
    order = np.empty(len(slot) + len(turn), np.int64)
    slots = np.empty_like(order)
    is_item = np.ones(len(order), bool)
    places = items_before + turn
    is_item[places] = False
    order[places] = len(slot) + turn
    slots[places] = served + work[items_before]
    order[is_item] = np.arange(len(slot))
    slots[is_item] = slot
    return order, slots
