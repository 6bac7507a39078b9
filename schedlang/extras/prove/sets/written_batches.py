"""Batches of transfers that a program writes: where only one side of a message is in a batch, and
where ranks wait at the first use of a communicator (`schedlang.proof.first_use`). Each two ranks
have a communicator for messages outside batches, and all ranks together have one for batches.
"""

from itertools import combinations_with_replacement

import islpy as isl

from schedlang.extras.prove.sets.counting import RANK
from schedlang.extras.prove.sets.isl_functions import points, without
from schedlang.extras.prove.sets.numbers import Unreadable
from schedlang.extras.prove.sets.relations import Relations
from schedlang.extras.prove.sets.statements import STAGE
from schedlang.schedule.kinds import TRANSFERS


def one_sided(relations: Relations) -> isl.Set:
    """The sizes at which one side of a message is issued in a batch and the other is not; on some
    transports these never meet. Unreadable if a batch has several messages from one rank to
    another.
    """
    transfers = [s for s in relations.reading.statements if s.kind in TRANSFERS]
    for one, other in combinations_with_replacement(transfers, 2):
        are_mates = one.batch and one.batch == other.batch and one is not other
        if are_mates and one.kind == other.kind:
            raise Unreadable("a batch of several transfers of one kind", one.span)
    some = batched(relations)
    sent_so = relations.messages.intersect_domain(some).subtract_range(some)
    received_so = relations.messages.subtract_domain(some).intersect_range(some)
    return sent_so.union(received_so).params()


def batched(relations: Relations) -> isl.UnionSet:
    """The transfers that are issued together with others."""
    result = isl.UnionSet("{ }")
    for edge in relations.batches:
        if edge.source.kind in TRANSFERS and edge.target.kind in TRANSFERS:
            result = result.union(isl.UnionSet.from_set(edge.pairs.domain()))
    return result


def never_come(relations: Relations) -> isl.Set:
    """The sizes at which some ranks issue a batch and others never do, so that the first wait for
    ever.
    """
    come = relations.orders.of(of="rank").intersect_domain(batched(relations)).range()
    every = points(without(relations.reading.held, [STAGE]), [RANK])
    return come.params() & isl.UnionSet.from_set(every).subtract(come).params()


def in_order(relations: Relations) -> isl.Set:
    """The sizes at which each two ranks use their own communicator before they issue a batch.

    Messages outside batches come first then on all ranks, both sides in the order of one execution,
    and batches follow. So if all ranks issue a batch, none waits for ever.
    """
    some = batched(relations)
    late = relations.orders.before.intersect_domain(some).range()
    alone = relations.messages.subtract_domain(some).subtract_range(some)
    both = alone.union(alone.reverse())
    used = _ranks(relations, both)
    early = _ranks(relations, both.subtract_domain(late))
    return relations.reading.domain - used.subtract(early).params()


def _ranks(relations: Relations, messages: isl.UnionMap) -> isl.UnionMap:
    """From the ranks of one side of messages to those of the other side."""
    ranks = relations.orders.of(of="rank")
    return messages.apply_domain(ranks).apply_range(ranks)
