"""Do all messages meet, on every transport where transfers are issued alone? See
`schedlang.proof.network`.

The strictest of these has ranks that block: a rank goes on when the other one is at the other end
of the same message. What runs there runs on all; see docs/transports.md.
"""

from collections.abc import Iterator

import numpy as np

from schedlang.proof.columnwise.columns import Columns, Ints
from schedlang.proof.columnwise.order import At
from schedlang.proof.columnwise.stages import neighbours
from schedlang.schedule.kinds import Kind


def all_meet(columns: Columns, at: At) -> bool:
    """Whether it is known that all transfers run; it is not if some are issued together."""
    transfers = columns.where(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    return (
        not columns.group[transfers].any()
        and _are_paired(columns, at)
        and _rendezvous(columns, transfers)
    )


def _are_paired(columns: Columns, at: At) -> bool:
    """Whether there is one receive for each send, and one send for each receive, on another
    rank.
    """
    near = neighbours(columns.schedule.layout)
    for send, receive, far, step in (
        (Kind.SEND_F, Kind.RECV_F, near.far_after, columns.stride),
        (Kind.SEND_B, Kind.RECV_B, near.far_before, -columns.stride),
    ):
        sends = columns.where(send)
        receives = columns.where(receive)
        if not far[columns.stage[sends]].all():
            return False
        if not np.array_equal(np.sort(columns.slot[sends] + step), np.sort(columns.slot[receives])):
            return False
        if np.count_nonzero(at[send] >= 0) != len(sends):
            return False
    return True


def _rendezvous(columns: Columns, transfers: Ints) -> bool:
    """Whether ranks that block at each transfer come to their ends.

    A message has the slot of its receive, gradients behind all activations.
    """
    kind = columns.kind[transfers]
    slot = columns.slot[transfers]
    message = slot + columns.stride * (
        (kind == Kind.SEND_F).astype(np.int32) - (kind == Kind.SEND_B)
    )
    message = message + np.int64(columns.slots) * (kind >= Kind.SEND_B)
    ranks = list(_of_ranks(columns, transfers, message))
    standing: dict[int, int] = {}
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        for each in ranks[rank]:
            other = standing.pop(each, None)
            if other is None:
                standing[each] = rank
                break
            ready.append(other)
    return not standing


def _of_ranks(columns: Columns, transfers: Ints, message: Ints) -> Iterator[Iterator[int]]:
    """The messages of each rank in its order."""
    ranks = len(columns.schedule.ranks)
    ends = np.searchsorted(columns.rank[transfers], np.arange(ranks), "right").tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        yield iter(memoryview(message[begin:end].tobytes()).cast("q"))
