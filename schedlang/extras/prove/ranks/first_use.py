"""The first use of communicators, where a rank's host waits until all ranks of it have come
(`schedlang.proof.first_use`): those of two ranks for what they send each other alone, and one of
all ranks for batches.
"""

import islpy as isl

from schedlang.extras.prove.ranks.checks import Relations, batched
from schedlang.extras.prove.ranks.counting import RANK
from schedlang.extras.prove.ranks.statements import STAGE, Statement
from schedlang.extras.prove.ranks.symbols import points, without
from schedlang.schedule.kinds import TRANSFERS, Kind


def never_come(relations: Relations) -> isl.Set:
    """The sizes at which some ranks make a batch, and others never do: the first wait for these."""
    come = isl.Set("{ [r] : 1 = 0 }")
    for transfer in _transfers(relations):
        come = come | _ranks(batched(relations, transfer))
    every = points(without(relations.reading.held, [STAGE]), [RANK])
    return come.params() & (every - come).params()


def in_order(relations: Relations) -> isl.Set:
    """The sizes at which each two ranks use their own communicator before they make a batch.

    Messages that are alone come first then on all ranks, both sides in the order of one execution,
    and batches after them: so if all ranks make a batch, nobody waits for ever.
    """
    used = isl.Set("{ [r, q] : 1 = 0 }")
    early = used
    late = {
        transfer.number: _behind_batches(relations, transfer)
        for transfer in _transfers(relations)
    }
    for send, receive, pairs in relations.messages():
        alone = pairs.subtract_domain(batched(relations, send))
        alone = alone.subtract_range(batched(relations, receive))
        used = used | _pairs(alone) | _pairs(alone.reverse())
        early = early | _pairs(alone.subtract_domain(late[send.number]))
        early = early | _pairs(alone.subtract_range(late[receive.number]).reverse())
    return relations.reading.domain - (used - early).params()


def _transfers(relations: Relations) -> list[Statement]:
    return relations.of(*map(Kind, TRANSFERS))


def _behind_batches(relations: Relations, transfer: Statement) -> isl.Set:
    """The instances of a transfer that stand behind a batch of their rank."""
    result = isl.Set.empty(relations.items[transfer.number].domain().get_space())
    for other in _transfers(relations):
        behind = relations.before(other, transfer).intersect_domain(
            batched(relations, other)
        )
        result = result | behind.range()
    return result


def _ranks(instances: isl.Set) -> isl.Set:
    """The ranks of instances: the first of their indices."""
    width = instances.dim(isl.dim_type.set)
    return (
        instances.reset_tuple_id()
        .project_out(isl.dim_type.set, 1, width - 1)
        .reset_tuple_id()
    )


def _pairs(messages: isl.Map) -> isl.Set:
    """The ranks of both sides of messages: first that of the one, then that of the other."""
    ones = messages.dim(isl.dim_type.in_)
    flat = messages.wrap().flatten().reset_tuple_id()
    width = flat.dim(isl.dim_type.set)
    flat = flat.project_out(isl.dim_type.set, ones + 1, width - ones - 1)
    return flat.project_out(isl.dim_type.set, 1, ones - 1).reset_tuple_id()
