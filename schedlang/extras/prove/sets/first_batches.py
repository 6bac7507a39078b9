"""The first use of communicators, where a rank's host waits until all ranks of it have come
(`schedlang.proof.first_use`): those of two ranks for what they send each other alone, and one of
all ranks for batches.
"""

import islpy as isl

from schedlang.extras.prove.sets.counting import RANK
from schedlang.extras.prove.sets.isl_functions import points, without
from schedlang.extras.prove.sets.obligations import batched
from schedlang.extras.prove.sets.relations import Relations
from schedlang.extras.prove.sets.statements import STAGE


def never_come(relations: Relations) -> isl.Set:
    """The sizes at which some ranks make a batch, and others never do: the first wait for these."""
    come = relations.ranks.intersect_domain(batched(relations)).range()
    every = points(without(relations.reading.held, [STAGE]), [RANK])
    return come.params() & isl.UnionSet.from_set(every).subtract(come).params()


def in_order(relations: Relations) -> isl.Set:
    """The sizes at which each two ranks use their own communicator before they make a batch.

    Messages that are alone come first then on all ranks, both sides in the order of one execution,
    and batches after them: so if all ranks make a batch, nobody waits for ever.
    """
    some = batched(relations)
    late = relations.before.intersect_domain(some).range()
    alone = relations.messages.subtract_domain(some).subtract_range(some)
    both = alone.union(alone.reverse())
    used = _ranks(relations, both)
    early = _ranks(relations, both.subtract_domain(late))
    return relations.reading.domain - used.subtract(early).params()


def _ranks(relations: Relations, messages: isl.UnionMap) -> isl.UnionMap:
    """From the ranks of the one side of messages to those of the other."""
    return messages.apply_domain(relations.ranks).apply_range(relations.ranks)
