"""What must hold of a program besides that it does not deadlock: each thing is made once, after
what its own rank makes for it, with the right weights. Each is the question whether a relation is
empty, which isl answers exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import islpy as isl

from schedlang.extras.prove.sets.counting import RANK
from schedlang.extras.prove.sets.evaluator import Mistake
from schedlang.extras.prove.sets.isl_functions import (
    nowhere,
    number,
    points,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import Unreadable
from schedlang.extras.prove.sets.relations import (
    ITEM,
    NEEDED,
    Relations,
    far,
    items_of,
    near,
    relation_of,
)
from schedlang.extras.prove.sets.statements import (
    STAGE,
    UPDATES,
    Reading,
    Weights,
)
from schedlang.schedule.kinds import (
    MAKERS,
    OPS,
    RECEIVES,
    REPEATS,
    SENDS,
    STEPS,
    TRANSFERS,
    USES_WEIGHTS,
    Kind,
)
from schedlang.schedule.schedule import WeightRule

_ANY_TRANSFER = tuple(map(Kind, TRANSFERS))
#: Which ops must read the same version of the weights, by their items.
_SAME_ITEM = "{ [s, u, g, m, k] -> [s, u, g, m, k] }"
_SAME_UPDATE = "{ [s, u, g, m, k] -> [s, u, g2, m2, k2] }"
#: From the items of a stage to those of its updates.
_SAME_STAGE = "{ [s, u, g, m, k] -> [s, u2, 0, 0, 0] }"


def check(relations: Relations) -> list[Mistake]:
    """The mistakes of a program, deadlocks excepted: the message, and where it holds."""
    found = [
        *_coverage(relations),
        *_order(relations),
        *_transfers(relations),
        *_versions(relations),
    ]
    return [
        Mistake(what, where.coalesce()) for what, where in found if not where.is_empty()
    ]


def _coverage(relations: Relations) -> Iterator[tuple[str, isl.Set]]:
    """Items that are missing or made twice."""
    reading = relations.reading
    wanted = isl.UnionSet.from_set(relations.wanted())
    later = [kind for kind in OPS if kind != Kind.F]
    trains = relations.of(*map(Kind, later)).params()
    for made in (Kind.F, Kind.B, Kind.W):
        missing = wanted.subtract(relations.of(*MAKERS[made]).range()).params()
        if made != Kind.F:
            # A program without any backward is an inference.
            missing = missing & trains
        yield f"a {OPS[made].name} never runs", missing
    for made in (Kind.F, Kind.B, Kind.W, *REPEATS, *STEPS):
        what = f"a {OPS[made].name} runs twice"
        yield what, _twice(relations.of(*MAKERS[made]))
    # Each stage has all updates, or no stage has any.
    updates = relations.of(*STEPS).range()
    some = updates.params()
    all_updates = nowhere()
    for line in reading.lines:
        only = items_of(reading, line)
        for digit in ITEM[2:]:
            only = only & symbol(digit).eq_set(number(0))
        all_updates = all_updates | only
    every = isl.UnionSet.from_set(points(all_updates, ITEM))
    lacking = every.subtract(updates).params()
    if reading.is_stream:
        if not reading.domain.is_subset(trains):
            raise Unreadable("forwards without a flush that have no backwards")
        some = some | reading.domain
    for weights in reading.weights:
        # Rules for versions of weights require updates.
        if weights.rule != WeightRule().name:
            some = some | without(reading.held & weights.stages, [STAGE, RANK])
    yield "a stage makes no update", lacking & some


def _twice(items: isl.UnionMap) -> isl.Set:
    """The sizes at which two ops have the same item."""
    if items.is_injective():
        return nowhere()
    alike = items.apply_range(items.reverse())
    return alike.subtract(items.domain().identity()).params()


def _order(relations: Relations) -> Iterator[tuple[str, isl.Set]]:
    """Ops that precede what their own rank makes for them."""
    for rule, pairs in relations.needs:
        late = near(pairs).subtract(relations.before)
        yield (
            f"an op stands before the {OPS[rule.made].name} that it needs",
            late.params(),
        )


def _transfers(relations: Relations) -> Iterator[tuple[str, isl.Set]]:
    """Transfers that are there twice, have no other side, or stand at the wrong place: a send
    before its op, an op before its receive.
    """
    if not relations.writes_transfers:
        return
    for kind in _ANY_TRANSFER:
        yield "a transfer twice", _twice(relations.of(kind))
    met = relations.messages
    alone = relations.of(*_ANY_TRANSFER).domain()
    alone = alone.subtract(met.domain()).subtract(met.range())
    yield "a transfer without its other side", alone.params()
    for made, send in SENDS.items():
        carried = relations.of(*MAKERS[made]).apply_range(relations.of(send).reverse())
        yield "a send before its op", carried.subtract(relations.before).params()
    for rule, pairs in relations.needs:
        if rule.made not in RECEIVES:
            continue
        # A receive is numbered by the stage that uses it.
        users = relations.of(*rule.users)
        receives = relations.of(RECEIVES[rule.made]).apply_range(users.reverse())
        brought = receives.intersect(relations.before).range()
        late = far(pairs).range().subtract(brought)
        yield "an op stands before the receive of what it needs", late.params()


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


def _versions(relations: Relations) -> Iterator[tuple[str, isl.Set]]:
    """Ops that read another version of the weights than they should, or add to another update's
    gradient.
    """
    reading = relations.reading
    updates = [s for s in reading.statements if s.kind in STEPS]
    if not updates:
        return
    gradients = relations.of(*MAKERS[Kind.W])
    if gradients.is_empty():
        raise Unreadable("updates of no gradients", updates[0].span)
    # That a gradient precedes its own update is one of the needs of the update.
    latest = Weights("", reading.domain, number(0))
    yield _late_update(relations, gradients, latest)
    for weights in reading.weights:
        match weights.rule:
            case "latest":
                # Ops after the forward read the version that the forward read.
                for kind in sorted(USES_WEIGHTS - {Kind.F}):
                    yield _between(relations, weights, Kind(kind), _SAME_ITEM)
            case "delay":
                yield _late_update(relations, relations.of(Kind.F), weights)
            case "stash":
                # All forwards of an update read the same version.
                yield _between(relations, weights, Kind.F, _SAME_UPDATE)
            case "unstashed":
                # Only a recomputation must read the version that its forward read.
                for kind in REPEATS:
                    yield _between(relations, weights, kind, _SAME_ITEM)


def _late_update(
    relations: Relations, ops: isl.UnionMap, weights: Weights
) -> tuple[str, isl.Set]:
    """Ops that precede the update that makes the version that they read."""
    made_by = symbol(ITEM[1]).sub(number(1)).sub(weights.delay)
    same = (
        weights.stages
        & symbol(ITEM[0]).eq_set(symbol(NEEDED[0]))
        & symbol(NEEDED[1]).eq_set(made_by)
    )
    reads = relation_of(same, ITEM, NEEDED)
    pairs = relations.pairs(ops, reads, relations.of(*STEPS))
    early = pairs.reverse().subtract(relations.before)
    what = "an op stands before the update that makes the version that it reads"
    return what, early.params()


def _between(
    relations: Relations, weights: Weights, kind: Kind, alike: str
) -> tuple[str, isl.Set]:
    """Updates between a forward and an op of `kind` that must read the same version; `alike`
    relates the items of the two.
    """
    of_stages = isl.UnionSet.from_set(points(weights.stages, ITEM))
    forwards = relations.of(Kind.F).intersect_range(of_stages)
    ops = relations.of(kind)
    updates = relations.pairs(forwards, isl.Map(_SAME_STAGE), relations.of(*STEPS))
    following = relations.before.intersect_range(ops.domain())
    between_both = updates.intersect(relations.before).apply_range(following)
    amiss = between_both.intersect(relations.pairs(forwards, isl.Map(alike), ops))
    return f"`{kind.name}` reads another version of the weights", amiss.params()


def of_program(condition: isl.Set, reading: Reading) -> isl.Set:
    """The sizes at which a condition holds; of a program without a flush, for some number of
    updates.
    """
    return sizes_only(
        condition, [size for size in reading.sizes if size != UPDATES]
    ).coalesce()


def sizes_only(condition: isl.Set, sizes: Sequence[str]) -> isl.Set:
    """The condition, with all symbols but `sizes` projected out."""
    for at in reversed(range(condition.dim(isl.dim_type.param))):
        if condition.get_dim_name(isl.dim_type.param, at) not in sizes:
            condition = condition.project_out(isl.dim_type.param, at, 1)
    return condition
