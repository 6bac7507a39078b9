"""What must hold of a program besides that it comes to an end: all that must be made is made once,
and stands behind what its own rank makes for it. Each is a question whether an integer set is
empty, which isl answers exactly.

From the same relations come the edges of the event graph, as relations between statements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import islpy as isl
from attrs import field, frozen

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.ranks.counting import RANK, entry
from schedlang.extras.prove.ranks.numbers import Unreadable
from schedlang.extras.prove.ranks.statements import (
    LATER,
    STAGE,
    UPDATES,
    Line,
    Reading,
    Statement,
    Weights,
)
from schedlang.extras.prove.ranks.symbols import (
    between,
    function_map,
    nowhere,
    number,
    points,
    symbol,
    without,
)
from schedlang.extras.prove.ranks.values import Mistake
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
from schedlang.schedule.needs import RULES, Rule
from schedlang.schedule.schedule import WeightRule

#: The symbols of an item, which is what an op makes: a stage, an update, the two digits of a
#: microbatch, a slice.
ITEM = (STAGE, "_u", "_g", "_m", "_k")
#: Those of another item, that it needs.
NEEDED = tuple(f"{name}2" for name in ITEM)


@frozen(eq=False)
class Edge:
    """What waits for what: pairs of instances of two statements. `why` is its rank's "order", a
    "need", or that both are one: ops and transfers of one batch, and the two sides of a message,
    come "together".
    """

    source: Statement
    target: Statement
    pairs: isl.Map
    why: str


@frozen(eq=False)
class Relations:
    """A program's statements as relations: from their instances to the items that they are about,
    and to their places in the orders of the ranks.
    """

    reading: Reading
    #: How many entries the longest order has.
    depth: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        depth = max((len(s.order) for s in self.reading.statements), default=0)
        object.__setattr__(self, "depth", depth)

    @cached_property
    def items(self) -> dict[int, isl.Map]:
        """From each statement's instances to their items."""
        return {
            s.number: function_map(
                s.domain & self.reading.domain, s.indices, s.name, [s.stage, *s.unit]
            )
            for s in self.reading.statements
        }

    @cached_property
    def places(self) -> dict[int, isl.Map]:
        """From each statement's instances to their rank, and their place in its order."""
        result = {}
        for s in self.reading.statements:
            entries = [entry(each, {}) for each in s.order]
            # Filled up, so that all orders are vectors of one length, which isl can compare.
            entries += [number(0)] * (self.depth - len(entries))
            values = [symbol(RANK), *entries]
            result[s.number] = function_map(
                s.domain & self.reading.domain, s.indices, s.name, values
            )
        return result

    @cached_property
    def earlier(self) -> isl.Map:
        """From places to later places of the same rank."""
        width = self.depth + 1
        space = isl.Space.set_alloc(isl.DEFAULT_CONTEXT, 0, width)
        order = isl.Map.lex_lt(space)
        return order.equate(isl.dim_type.in_, 0, isl.dim_type.out, 0)

    def of(self, *kinds: Kind) -> list[Statement]:
        """The statements of some kinds."""
        return [s for s in self.reading.statements if s.kind in kinds]

    def made(self, *kinds: Kind) -> isl.Set:
        """The items that ops of some kinds are about."""
        result = points(nowhere(), ITEM)
        for s in self.of(*kinds):
            result = result | self.items[s.number].range()
        return result.coalesce()

    def wanted(self) -> isl.Set:
        """All items of a program."""
        result = points(nowhere(), ITEM)
        for line in self.reading.lines:
            result = result | points(_items_of(self.reading, line), ITEM)
        return result.coalesce()

    def before(self, one: Statement, other: Statement) -> isl.Map:
        """The pairs of instances of which the first comes before the second on its rank."""
        # From an instance to its place, to all later places, and from these back to instances.
        there = self.places[one.number].apply_range(self.earlier)
        return there.apply_range(self.places[other.number].reverse())

    @cached_property
    def writes_transfers(self) -> bool:
        """Whether the program has sends and receives of its own."""
        return any(s.kind in TRANSFERS for s in self.reading.statements)

    def messages(self) -> Iterator[tuple[Statement, Statement, isl.Map]]:
        """For statements that send and receive, from the instances of sends to those of the
        receives of their messages.
        """
        for send in self.of(*SENDS.values()):
            on = TRANSFERS[send.kind].distance
            text = f"{{ [s, u, g, m, k] -> [s + {on}, u, g, m, k] }}"
            sent = self.items[send.number].apply_range(isl.Map(text))
            for receive in self.of(TRANSFERS[send.kind].other_end):
                pairs = sent.apply_range(self.items[receive.number].reverse())
                if not pairs.is_empty():
                    yield send, receive, pairs

    def together(self, one: Statement, other: Statement) -> isl.Map:
        """The pairs of instances that are issued together."""
        return self.places[one.number].apply_range(self.places[other.number].reverse())

    def needs(self) -> Iterator[tuple[Rule, Statement, Statement, isl.Map]]:
        """For each rule, and statements of which one makes what the other needs, from the maker's
        instances to the user's.
        """
        dropped = self.made(*REPEATS)
        for rule in RULES:
            needed = _needed(self.reading, rule)
            if needed is None:
                continue
            for user in self.of(*rule.users):
                wants = self.items[user.number]
                if rule.activation:
                    # A backward needs what `R` makes, or where there is none, the forward's own
                    # activations.
                    if rule.made in REPEATS:
                        wants = wants.intersect_range(dropped)
                    else:
                        wants = wants.subtract_range(dropped)
                wants = wants.apply_range(needed)
                for maker in self.of(*MAKERS[rule.made]):
                    pairs = self.items[maker.number].apply_range(wants.reverse())
                    if not pairs.is_empty():
                        yield rule, maker, user, pairs

    def edges(self) -> list[Edge]:
        """All that waits for what."""
        result = []
        statements = self.reading.statements
        for one in statements:
            for other in statements:
                pairs = self.before(one, other)
                if not pairs.is_empty():
                    result.append(Edge(one, other, pairs, "order"))
                if one.batch and one.batch == other.batch and one is not other:
                    result.append(
                        Edge(one, other, self.together(one, other), "together")
                    )
        # Messages are then the only way from rank to rank: both sides of one come together, and the
        # order of each rank does the rest.
        if self.writes_transfers:
            for send, receive, pairs in self.messages():
                result.append(Edge(send, receive, pairs, "together"))
                result.append(Edge(receive, send, pairs.reverse(), "together"))
            return result
        for _, maker, user, pairs in self.needs():
            far = pairs - self.same_rank(maker, user)
            if not far.is_empty():
                result.append(Edge(maker, user, far, "need"))
        return result

    def same_rank(self, one: Statement, other: Statement) -> isl.Map:
        """The pairs of instances that are of one rank: it is the first of their indices."""
        space = isl.Space.alloc(
            isl.DEFAULT_CONTEXT, 0, len(one.indices), len(other.indices)
        )
        pairs = isl.Map.universe(space).equate(isl.dim_type.in_, 0, isl.dim_type.out, 0)
        pairs = pairs.set_tuple_name(isl.dim_type.in_, one.name)
        return pairs.set_tuple_name(isl.dim_type.out, other.name)


def _items_of(reading: Reading, line: Line) -> isl.Set:
    """The items of a pipeline's stages."""
    stage, update, _, _, piece = map(symbol, ITEM)
    updates = symbol(UPDATES) if reading.is_stream else number(1)
    return (
        reading.domain
        & between(line.first, stage, line.first.add(line.stages))
        & between(number(0), update, updates)
        & reading.are_microbatches(line, *ITEM[2:4])
        & between(number(0), piece, reading.slices)
    )


def stage_relation(reading: Reading, of: str) -> isl.Map:
    """From each stage to those that are "before" or "after" it, its "own", or its "replicas"."""
    names = (ITEM[0], NEEDED[0])
    both = isl.Map.from_domain(points(_stages(reading, of) & reading.domain, names))
    return both.move_dims(isl.dim_type.out, 0, isl.dim_type.in_, 1, 1)


def _stages(reading: Reading, of: str) -> isl.Set:
    """A condition of a stage, and of another one that is before it, after it, or the like."""
    stage = symbol(ITEM[0])
    other = symbol(NEEDED[0])
    result = nowhere()
    for line in reading.lines:
        own = between(line.first, stage, line.first.add(line.stages))
        there = between(line.first, other, line.first.add(line.stages))
        match of:
            case "own":
                result = result | (own & stage.eq_set(other))
            case "before":
                result = result | (own & there & _onward(reading, False))
            case "after":
                result = result | (own & there & _onward(reading, True))
            case "replicas":
                for replica in reading.lines:
                    same = stage.sub(line.first).add(replica.first).eq_set(other)
                    result = result | (own & same)
    return result


def _needed(reading: Reading, rule: Rule) -> isl.Map | None:
    """From the items of ops to those that they need by a rule."""
    _, update, group, microbatch, piece = map(symbol, ITEM)
    _, update2, group2, microbatch2, piece2 = map(symbol, NEEDED)
    pairs = _stages(reading, rule.of) & update.eq_set(update2)
    if rule.of != "replicas":
        same_piece = piece2.eq_set(piece.add(number(rule.slices)))
        pairs = (
            pairs & group.eq_set(group2) & microbatch.eq_set(microbatch2) & same_piece
        )
    needed = isl.Map.from_domain(points(pairs & reading.domain, [*ITEM, *NEEDED]))
    width = len(ITEM)
    needed = needed.move_dims(isl.dim_type.out, 0, isl.dim_type.in_, width, width)
    return None if needed.is_empty() else needed


def _onward(reading: Reading, is_forward: bool) -> isl.Set:
    """Where what stages make goes, as a condition of the stage of an item and the one of another
    that it needs.
    """
    names = (STAGE, NEEDED[0]) if is_forward else (NEEDED[0], STAGE)
    ends = reading.onward
    renamed = []
    # In two steps, by names that nothing else has: the two symbols may change places.
    for name, other in zip((STAGE, LATER), names, strict=True):
        at = ends.find_dim_by_name(isl.dim_type.param, name)
        if at >= 0:
            ends = ends.set_dim_name(isl.dim_type.param, at, f"{other}+")
            renamed.append(other)
    for other in renamed:
        at = ends.find_dim_by_name(isl.dim_type.param, f"{other}+")
        ends = ends.set_dim_name(isl.dim_type.param, at, other)
    return ends


def check(relations: Relations) -> list[Mistake]:
    """What is wrong with a program besides that ranks may wait for each other, and where; its
    statements are right as far as each goes.
    """
    return [
        *_coverage(relations),
        *_order(relations),
        *_transfers(relations),
        *_versions(relations),
    ]


def _coverage(relations: Relations) -> Iterator[Mistake]:
    """Items that are not made, or twice."""
    reading = relations.reading
    wanted = relations.wanted()
    later = [s for s in reading.statements if s.kind not in (Kind.F, *TRANSFERS)]
    trains = nowhere()
    for s in later:
        trains = trains | relations.items[s.number].params()
    for made in (Kind.F, Kind.B, Kind.W):
        missing = (wanted - relations.made(*MAKERS[made])).params()
        if made != Kind.F:
            # Where there is no backward at all, it is an inference.
            missing = missing & trains
        name = OPS[made].name
        yield from _mistake("missing-op", f"a {name} never runs", None, missing)
    for kind in (Kind.F, Kind.B, Kind.W, *REPEATS, *STEPS):
        for one, other in _pairs(relations.of(*MAKERS[kind])):
            pairs = relations.items[one.number].apply_range(
                relations.items[other.number].reverse()
            )
            if one is other:
                pairs = pairs - isl.Map.identity(pairs.get_space())
            what = f"a {OPS[kind].name} runs twice"
            yield from _mistake("repeated-op", what, other.span, pairs.params())
    # Of updates, each stage has all, or no stage has any.
    updates = relations.made(*STEPS)
    some = updates.params()
    all_updates = nowhere()
    for line in reading.lines:
        only = nowhere().complement()
        for digit in ITEM[2:]:
            only = only & symbol(digit).eq_set(number(0))
        all_updates = all_updates | (_items_of(reading, line) & only)
    lacking = (points(all_updates, ITEM) - updates).params()
    if reading.is_stream:
        if not reading.domain.is_subset(trains):
            raise Unreadable("forwards without a flush that have no backwards")
        some = some | reading.domain
    for weights in reading.weights:
        # There are several versions of weights only where there are updates.
        if weights.rule != WeightRule().name:
            some = some | without(reading.held & weights.stages, [STAGE, RANK])
    yield from _mistake("missing-op", "a stage makes no update", None, lacking & some)


def _mistake(
    code: str, message: str, span: Span | None, where: isl.Set
) -> Iterator[Mistake]:
    if not where.is_empty():
        yield Mistake(code, message, span, where.coalesce())


def _order(relations: Relations) -> Iterator[Mistake]:
    """Ops that stand before what their own rank makes for them."""
    for rule, maker, user, pairs in relations.needs():
        late = pairs & relations.same_rank(maker, user)
        late = late - relations.before(maker, user)
        what = (
            f"`{user.kind.name}` stands before the {OPS[rule.made].name} that it needs"
        )
        yield from _mistake("order", what, user.span, late.params())


def _transfers(relations: Relations) -> Iterator[Mistake]:
    """Messages that are sent or received twice, or by one side alone; sends before what they carry,
    and ops before the receive of what they need.
    """
    if not relations.writes_transfers:
        return
    for kind in map(Kind, TRANSFERS):
        for one, other in _pairs(relations.of(kind)):
            twice = relations.items[one.number].apply_range(
                relations.items[other.number].reverse()
            )
            if one is other:
                twice = twice - isl.Map.identity(twice.get_space())
            yield from _mistake(
                "repeated-send", "a transfer twice", other.span, twice.params()
            )
    met = list(relations.messages())
    for statement in relations.of(*map(Kind, TRANSFERS)):
        alone = relations.items[statement.number].domain()
        for send, receive, pairs in met:
            if statement is send:
                alone = alone - pairs.domain()
            if statement is receive:
                alone = alone - pairs.range()
        what = "a transfer without its other side"
        yield from _mistake("deadlock", what, statement.span, alone.params())
    for made, send_kind in SENDS.items():
        for send in relations.of(Kind(send_kind)):
            for maker in relations.of(*MAKERS[made]):
                pairs = relations.items[maker.number].apply_range(
                    relations.items[send.number].reverse()
                )
                late = pairs - relations.before(maker, send)
                yield from _mistake(
                    "order", "a send before its op", send.span, late.params()
                )
    for rule, maker, user, pairs in relations.needs():
        if rule.made not in RECEIVES:
            continue
        far = pairs - relations.same_rank(maker, user)
        brought = _no_points(far)
        for receive in relations.of(RECEIVES[rule.made]):
            # Of neighbours, the receive has the number of its own stage: that of the user.
            of_user = relations.items[receive.number].apply_range(
                relations.items[user.number].reverse()
            )
            brought = brought | (of_user & relations.before(receive, user)).range()
        late_users = far.range() - brought
        what = f"`{user.kind.name}` stands before the receive of what it needs"
        yield from _mistake("order", what, user.span, late_users.params())


def check_batches(relations: Relations) -> Iterator[Mistake]:
    """Transfers that one side issues alone and the other one in a batch: on some transports, these
    never meet. Unreadable where a batch has several messages from one rank to another.
    """
    in_batch = {
        s.number: batched(relations, s) for s in relations.of(*map(Kind, TRANSFERS))
    }
    for send, receive, pairs in relations.messages():
        one = pairs.intersect_domain(in_batch[send.number]).subtract_range(
            in_batch[receive.number]
        )
        other = pairs.subtract_domain(in_batch[send.number])
        other = other.intersect_range(in_batch[receive.number])
        what = "a transfer that only one side issues in a batch"
        yield from _mistake("asymmetric-batch", what, send.span, (one | other).params())
    for one_side, other_side in _pairs(relations.of(*map(Kind, TRANSFERS))):
        if one_side.batch and one_side.batch == other_side.batch:
            alike = one_side.kind == other_side.kind
            if one_side is not other_side and alike:
                raise Unreadable(
                    "a batch of several transfers of one kind", one_side.span
                )


def batched(relations: Relations, transfer: Statement) -> isl.Set:
    """The instances of a transfer that are issued together with others."""
    result = isl.Set.empty(relations.items[transfer.number].domain().get_space())
    for other in relations.of(*map(Kind, TRANSFERS)):
        if other.batch and other.batch == transfer.batch and other is not transfer:
            result = result | relations.together(transfer, other).domain()
    return result


def _no_points(pairs: isl.Map) -> isl.Set:
    """No points, of the range of a relation."""
    return isl.Set.empty(pairs.range().get_space())


def _pairs(statements: Sequence[Statement]) -> Iterator[tuple[Statement, Statement]]:
    """Each two of some statements, and each with itself."""
    for place, one in enumerate(statements):
        for other in statements[place:]:
            yield one, other


#: What ops read the same version of the weights, by their items.
_SAME_ITEM = "{ [s, u, g, m, k] -> [s, u, g, m, k] }"
_SAME_UPDATE = "{ [s, u, g, m, k] -> [s, u, g2, m2, k2] }"


def _versions(relations: Relations) -> Iterator[Mistake]:
    """Ops that read other weights than they should: each adds to its own update's gradient, and
    reads the version that the rule of its stage gives.
    """
    reading = relations.reading
    updates = relations.of(*STEPS)
    if not updates:
        return
    if not relations.of(*MAKERS[Kind.W]):
        raise Unreadable("updates of no gradients", updates[0].span)
    for update in updates:
        for op in relations.of(*MAKERS[Kind.W]):
            # That it stands before its own update is among the needs of that.
            latest = Weights("", reading.domain, number(0))
            yield from _late_update(relations, op, update, latest, "update")
        for weights in reading.weights:
            match weights.rule:
                case "latest":
                    # What reads the weights after the forward reads the same as that.
                    for kind in sorted(USES_WEIGHTS - {Kind.F}):
                        yield from _between(
                            relations, update, weights, Kind(kind), _SAME_ITEM
                        )
                case "delay":
                    for op in relations.of(Kind.F):
                        yield from _late_update(
                            relations, op, update, weights, "weight-version"
                        )
                case "stash":
                    # So do all forwards of an update.
                    yield from _between(
                        relations, update, weights, Kind.F, _SAME_UPDATE
                    )
                case "unstashed":
                    # Only a recomputation must make the same as its forward.
                    for kind in REPEATS:
                        yield from _between(
                            relations, update, weights, kind, _SAME_ITEM
                        )


def _late_update(
    relations: Relations, op: Statement, update: Statement, weights: Weights, code: str
) -> Iterator[Mistake]:
    """Ops of some stages before the update that makes the version that they read."""
    on = number(-1).sub(weights.delay)
    pairs = _of_update(relations, op, update, weights.stages, on)
    early = pairs - relations.before(update, op).reverse()
    what = f"`{op.kind.name}` stands before the update that makes the version that it reads"
    yield from _mistake(code, what, op.span, early.params())


def _between(
    relations: Relations, update: Statement, weights: Weights, kind: Kind, alike: str
) -> Iterator[Mistake]:
    """Updates between a forward of some stages, and an op of a kind that must read the same: of an
    item that is `alike`.
    """
    stages = points(weights.stages, ITEM)
    same_stage = isl.Map("{ [s, u, g, m, k] -> [s, u2, g2, m2, k2] }").intersect_domain(
        stages
    )
    same = isl.Map(alike)
    of_update = relations.items[update.number].reverse()
    for one in relations.of(Kind.F):
        first = relations.items[one.number]
        earlier = first.apply_range(same_stage).apply_range(of_update)
        earlier = earlier & relations.before(one, update)
        for other in relations.of(kind):
            between_both = earlier.apply_range(relations.before(update, other))
            pairs = first.apply_range(same).apply_range(
                relations.items[other.number].reverse()
            )
            amiss = (between_both & pairs).params()
            what = f"`{kind.name}` reads another version of the weights"
            yield from _mistake("weight-version", what, other.span, amiss)


def _of_update(
    relations: Relations,
    op: Statement,
    update: Statement,
    stages: isl.Set,
    on: isl.PwAff,
) -> isl.Map:
    """From an op's instances, of some stages, to those of an update of its stage, so many updates
    on.
    """
    stage = symbol(ITEM[0])
    number_of = symbol(ITEM[1])
    stage2 = symbol(NEEDED[0])
    number_of2 = symbol(NEEDED[1])
    same = stages & stage.eq_set(stage2) & number_of2.eq_set(number_of.add(on))
    both = isl.Map.from_domain(points(same, [*ITEM, *NEEDED]))
    width = len(ITEM)
    both = both.move_dims(isl.dim_type.out, 0, isl.dim_type.in_, width, width)
    wants = relations.items[op.number].apply_range(both)
    return wants.apply_range(relations.items[update.number].reverse())


def all_mistakes(reading: Reading, more: Sequence[Mistake] = ()) -> isl.Set:
    """The sizes at which anything is wrong."""
    result = nowhere()
    for mistake in [*reading.mistakes, *more]:
        result = result | sizes_only(mistake.holds, reading.sizes)
    return (result & reading.domain).coalesce()


def of_program(condition: isl.Set, reading: Reading) -> isl.Set:
    """The sizes at which a condition holds; of a stream, for some number of updates."""
    return sizes_only(
        condition, [size for size in reading.sizes if size != UPDATES]
    ).coalesce()


def sizes_only(condition: isl.Set, sizes: Sequence[str]) -> isl.Set:
    """The sizes at which a condition holds for some values of all other symbols."""
    for at in reversed(range(condition.dim(isl.dim_type.param))):
        if condition.get_dim_name(isl.dim_type.param, at) not in sizes:
            condition = condition.project_out(isl.dim_type.param, at, 1)
    return condition
