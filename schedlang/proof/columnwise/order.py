"""Does every op run after what it needs, on every rank? See `schedlang.schedule.needs` and
`schedlang.proof.machine`.

Here and in the other modules, `at[kind]` has the action of a kind for each slot, and an input half
counts as `B`.
"""

from collections.abc import Iterator

import numpy as np

from schedlang.proof.columnwise.columns import Columns, Ints
from schedlang.proof.columnwise.stages import Neighbours, neighbours
from schedlang.schedule.kinds import Kind

At = dict[Kind, Ints]


def places(columns: Columns) -> At:
    """For each kind and slot the action there, or -1."""
    kinds = Kind.F, Kind.W, Kind.R, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B
    return {kind: columns.at(kind) for kind in kinds} | {Kind.B: columns.at(Kind.B, Kind.I)}


def is_in_order(columns: Columns, at: At, received: bool) -> bool:
    """Whether each op runs after those of its rank that it needs, and if they are to be `received`,
    after receives.
    """
    near = neighbours(columns.schedule.layout)
    needs = [
        *_forward_needs(columns, at, near, received),
        *_backward_needs(columns, at, near, received),
    ]
    for kind, made in (
        (Kind.W, Kind.B),
        (Kind.R, Kind.F),
        (Kind.SEND_F, Kind.F),
        (Kind.SEND_B, Kind.B),
    ):
        ops = columns.where(kind)
        needs.append((ops, at[made][columns.slot[ops]]))
    return all(_is_before(columns, ops, needed) for ops, needed in needs) and _updates_are_last(
        columns, at
    )


def _is_before(columns: Columns, ops: Ints, needed: Ints) -> bool:
    """Whether what ops need is there, and before all that they are issued with."""
    return bool(((needed >= 0) & (needed < columns.batch[ops])).all())


def _forward_needs(
    columns: Columns, at: At, near: Neighbours, received: bool
) -> Iterator[tuple[Ints, Ints]]:
    ops = columns.where(Kind.F)
    stage = columns.stage[ops]
    slot = columns.slot[ops]
    here = (near.before & ~near.far_before)[stage]
    yield ops[here], at[Kind.F][slot[here] - columns.stride]
    if received:
        there = near.far_before[stage]
        yield ops[there], at[Kind.RECV_F][slot[there]]
    later = columns.microbatch[ops] % columns.schedule.layout.slices > 0
    yield ops[later], at[Kind.F][slot[later] - 1]


def _backward_needs(
    columns: Columns, at: At, near: Neighbours, received: bool
) -> Iterator[tuple[Ints, Ints]]:
    ops = columns.where(Kind.B, Kind.I)
    stage = columns.stage[ops]
    slot = columns.slot[ops]
    again = at[Kind.R][slot]
    yield ops, np.where(again >= 0, again, at[Kind.F][slot])
    here = (near.after & ~near.far_after)[stage]
    yield ops[here], at[Kind.B][slot[here] + columns.stride]
    if received:
        there = near.far_after[stage]
        yield ops[there], at[Kind.RECV_B][slot[there]]
    earlier = (columns.microbatch[ops] + 1) % columns.schedule.layout.slices > 0
    yield ops[earlier], at[Kind.B][slot[earlier] + 1]


def _updates_are_last(columns: Columns, at: At) -> bool:
    """Whether each optimizer step follows all gradients of its stage and update."""
    layout = columns.schedule.layout
    last = np.maximum(at[Kind.W], at[Kind.B])
    for step in columns.where(Kind.U).tolist():
        stage = int(columns.stage[step])
        update = max(int(columns.microbatch[step]), 0)
        units = layout.units(stage) // layout.updates
        first = stage * columns.stride + update * units
        if last[first : first + units].max() >= columns.batch[step]:
            return False
    return True
