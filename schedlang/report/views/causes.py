"""What idle time in a picture is due to, and the chain of ops and waits that makes it as long as it
is: the answers of `schedc simulate --why`, in terms of the picture's boxes.
"""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from schedlang.report.bubbles.attribution import IdleTime
from schedlang.report.bubbles.critical_path import Segment
from schedlang.report.bubbles.op_waits import NOTHING, Waits
from schedlang.report.views.picture import Picture
from schedlang.schedule.arrays import Floats, Ints

#: What a part of the critical path may be (`Segment.kind`).
PARTS = ("op", "copy", "transfer", "transport", "collective")


@frozen(eq=False)
class Causes:
    """Why the ranks of a picture are idle, by the indices of its boxes.

    The op in box b waited last for the one in box `maker[b]`, or for none, which is -1, and had its
    result `delay[b]` after its end. For the end of all, every rank waits for box `last`. The parts
    of `idle` each have one cause, and behind it an op in the box `behind`; `path` is the critical
    path, each part with its box.
    """

    idle: IdleTime
    maker: Ints
    delay: Floats
    last: int
    behind: Ints
    path: Sequence[tuple[Segment, int]]


def causes_of(picture: Picture) -> Causes:
    """Why the ranks of a picture are idle.

    Of ops that run as one, only the first waits, and is waited for.
    """
    all_waits = picture.account.waits
    boxes = _boxes(all_waits)
    count = len(picture.boxes)
    maker = np.full(count, NOTHING)
    delay = np.zeros(count)
    is_made = all_waits.maker != NOTHING
    makers = all_waits.maker[is_made]
    users = boxes[is_made]
    maker[users] = boxes[makers]
    delay[users] = all_waits.arrival[is_made] - all_waits.ends[makers]
    idle = picture.account.idle
    rows = all_waits.schedule.columns.first
    box_of = dict(zip(all_waits.head.tolist(), boxes.tolist(), strict=True))
    path = [
        (part, box_of[int(rows[part.step.rank]) + part.step.rows.start])
        for part in picture.account.path
    ]
    return Causes(
        idle, maker, delay, int(boxes[all_waits.last]), boxes[idle.behind], path
    )


def _boxes(all_waits: Waits) -> Ints:
    """The box of each step: a picture has the ops of all ranks first, then their copies."""
    columns = all_waits.schedule.columns
    ops = np.flatnonzero(columns.is_computed)
    # The n-th op of the plan has box n; the first action of a step says which op it is.
    boxes = np.searchsorted(ops, all_waits.head)
    first_copy = int(all_waits.first[-1])
    boxes[first_copy:] = len(ops) + np.arange(len(boxes) - first_copy)
    return boxes
