"""The first use of communicators, at which a rank waits until all ranks of the communicator have
come (`schedlang.proof.first_use`). Each two ranks have a communicator for messages outside batches,
and all ranks together have one for batches.
"""

import islpy as isl

from schedlang.extras.prove.sets.counting import RANK
from schedlang.extras.prove.sets.isl_functions import points, without
from schedlang.extras.prove.sets.obligations import batched
from schedlang.extras.prove.sets.relations import Relations
from schedlang.extras.prove.sets.statements import STAGE


def never_come(relations: Relations) -> isl.Set:
    """The sizes at which some ranks issue a batch and others never do, so that the first wait for
    ever.
    """
    come = relations.ranks.intersect_domain(batched(relations)).range()
    every = points(without(relations.reading.held, [STAGE]), [RANK])
    return come.params() & isl.UnionSet.from_set(every).subtract(come).params()


def in_order(relations: Relations) -> isl.Set:
    """The sizes at which each two ranks use their own communicator before they issue a batch.

    Messages outside batches come first then on all ranks, both sides in the order of one execution,
    and batches follow. So if all ranks issue a batch, none waits for ever.
    """
    some = batched(relations)
    late = relations.before.intersect_domain(some).range()
    alone = relations.messages.subtract_domain(some).subtract_range(some)
    both = alone.union(alone.reverse())
    used = _ranks(relations, both)
    early = _ranks(relations, both.subtract_domain(late))
    return relations.reading.domain - used.subtract(early).params()


def _ranks(relations: Relations, messages: isl.UnionMap) -> isl.UnionMap:
    """From the ranks of one side of messages to those of the other side."""
    return messages.apply_domain(relations.ranks).apply_range(relations.ranks)
