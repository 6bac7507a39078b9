"""Weight gradients put into free slots of time."""

import numpy as np

from schedlang.schedule.columns import Ints, repeated


def fill_slots(slot: Ints, width: Ints, owes: Ints) -> tuple[Ints, Ints]:
    """In which order items and the weight gradients that they leave owed come, and at which slots:
    in each free slot the oldest one that is owed, and those left over at the end.

    Items are given in order, by their first slots, their widths, and how many weight gradients each
    leaves owed. The order has an item by its index; the weight gradients are numbered on behind the
    items, in the order in which they come to be owed.
    """
    # Items A and B with a free slot before and two after B; A leaves a and b owed, B leaves c:
    #
    #     slot                  0   1   2   3   4   5   6
    #     item                  A       B               …
    #     number of free slot       0       1   2   3   …
    #     weight gradient           a       b   c
    #
    # One server serves them in free slots, in order: the i-th one, which comes to be owed when
    # there have been come[i] free slots, gets the free slot served[i] = max(come[i], served[i - 1]
    # + 1).
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
