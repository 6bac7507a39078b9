"""A program's sets at one size: the ops of each rank, in order. They are compared with the
compiler's own order at small sizes, since the two are read separately.
"""

from __future__ import annotations

from collections.abc import Mapping

from schedlang.compiler import ops_of
from schedlang.extras.prove.open_program import Program
from schedlang.extras.prove.sets.isl_functions import all_points, at_sizes
from schedlang.extras.prove.sets.relations import ITEM, Relations
from schedlang.extras.prove.sets.statements import UPDATES, with_digits
from schedlang.lowering import lower
from schedlang.schedule.actions import is_update
from schedlang.schedule.stream import unroll

#: An op: its kind, its stage, and its microbatch or slice, numbered as in a plan.
Op = tuple[int, int, int]


def ops_at(relations: Relations, sizes: Mapping[str, int]) -> list[list[Op]]:
    """The ops of each rank at a size, in order, according to the sets."""
    placed: list[tuple[tuple[int, ...], Op]] = []
    slices = sizes.get("slices", 1)
    for statement in relations.reading.statements:
        both = relations.items[statement.number].flat_range_product(
            relations.places[statement.number]
        )
        for values in all_points(at_sizes(both.range(), with_digits(sizes))):
            stage, update, group, index, piece = values[: len(ITEM)]
            microbatch = update * sizes["microbatches"] + group * sizes["ranks"] + index
            unit = microbatch * slices + piece
            if is_update(statement.kind):
                unit = update
            placed.append((values[len(ITEM) :], (statement.kind, stage, unit)))
    ranks: list[list[Op]] = [[] for _ in range(sizes["ranks"])]
    for place, op in sorted(placed):
        ranks[place[0]].append(op)
    return ranks


def compiled_ops(
    program: Program, params: Mapping[str, int], updates: int
) -> list[list[Op]]:
    """The ops of each rank, in order, according to the compiler: with the transfers that the
    program writes, and of a program without a flush, for `updates` updates. Ops that are issued
    together are sorted. CompileError if the compiler refuses the program.
    """
    schedule = ops_of(program.whole, program.tree, params)
    if schedule.stream:
        schedule = unroll(schedule, updates)
    elif schedule.columns.is_transfer.any():
        schedule = lower(schedule)
    ranks = []
    for actions in schedule.ranks:
        ops: list[Op] = []
        for batch in actions.batches():
            ops += sorted(
                (actions.kind[at], actions.stage[at], max(actions.microbatch[at], 0))
                for at in batch
            )
        ranks.append(ops)
    return ranks


def differs(relations: Relations, program: Program, sizes: Mapping[str, int]) -> bool:
    """Whether sets and compiler disagree at a size; CompileError if the compiler refuses the
    program.
    """
    updates = sizes.get(UPDATES, 1)
    of_size = {size: value for size, value in sizes.items() if size != UPDATES}
    params = {**program.params, **of_size}
    compiled = compiled_ops(program, params, updates)
    return compiled != ops_at(relations, {**params, UPDATES: updates})
