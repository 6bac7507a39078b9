"""Checks a certificate of `schedlang.parametric.ranks` without trust in who made it.

This shares no code with the prover: the rules of pipeline training are written down once more, and
each question is asked of isl anew. A certificate has a program as integer sets. What is checked,
for all sizes of each case: every op is on the rank that holds its stage; each stage runs each
microbatch's forward once, its backward once, and makes the gradient of its weights once; what an op
needs of its own rank stands before it; the two sides of a message have one time stamp; and along
every edge (the order of a rank, what comes from another rank) the stamps grow. So no ranks wait for
each other in a circle.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import islpy as isl

#: What is made by which kinds of op.
_MAKERS = {"F": ("F",), "B": ("B", "I"), "W": ("B", "W"), "R": ("R",), "U": ("U",)}
#: Who needs what: of the same stage, or of the one before or after; how many slices on.
_NEEDS = (
    ("F", "F", "before", 0),
    ("F", "F", "own", -1),
    ("B", "B", "after", 0),
    ("I", "B", "after", 0),
    ("B", "B", "own", 1),
    ("I", "B", "own", 1),
    ("W", "B", "own", 0),
    ("R", "F", "own", 0),
)
#: Of messages, the send and the receive, which is of so many stages on.
_MESSAGES = {"F": ("SEND_F", "RECV_F", 1), "B": ("SEND_B", "RECV_B", -1)}
_TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


def faults_of(certificate: Mapping[str, Any]) -> list[str]:
    """What does not hold in a certificate; nothing, if it proves what it says."""
    try:
        return list(_Checker(certificate).faults())
    except (KeyError, TypeError, ValueError, isl.Error) as error:
        return [f"not a certificate: {type(error).__name__}: {error}"]


class _Checker:
    def __init__(self, certificate: Mapping[str, Any]) -> None:
        self.certificate = certificate
        self.statements = {each["name"]: each for each in certificate["statements"]}
        if len(self.statements) < len(certificate["statements"]):
            raise ValueError("two statements of one name")
        self.held = isl.Map(certificate["held"])
        self.after = isl.Map(certificate["after"])
        self.replicas = isl.Map(certificate["replicas"])

    def faults(self) -> Iterator[str]:
        proved = isl.Set(self.certificate["proved"])
        cases = isl.Set("{ : 1 = 0 }")
        for case in self.certificate["cases"]:
            where = isl.Set(case["where"])
            cases = cases | where
            yield from self.of_case(where, case["stamps"])
        if not proved.is_subset(cases):
            yield "the cases are not all of the sizes"

    def union(self, field: str, where: isl.Set, *kinds: str) -> isl.UnionMap:
        """A relation of all statements, or of those of some kinds, at some sizes."""
        result = isl.UnionMap("{ }")
        for statement in self.statements.values():
            if not kinds or statement["kind"] in kinds:
                part = isl.Map(statement[field]).intersect_params(where)
                if part.get_tuple_name(isl.dim_type.in_) != statement["name"]:
                    raise ValueError("a relation of another statement")
                result = result.union(isl.UnionMap.from_map(part))
        return result

    def of_case(self, where: isl.Set, stamps: Mapping[str, Any]) -> Iterator[str]:
        items, places = self.union("item", where), self.union("place", where)
        if not items.is_single_valued() or not places.is_single_valued():
            yield "an op of two items, or at two places"
        if not items.domain().is_equal(places.domain()):
            yield "an op without an item, or without a place"
        wanted = isl.UnionSet(self.certificate["wanted"]).intersect_params(where)
        if not items.range().is_subset(self.padded(wanted)):
            yield "an op of an item that there is not"
        yield from self.on_their_ranks(items, places)
        yield from self.once(where, wanted)
        depth = int(self.certificate["depth"])
        before = self.related(places, _earlier_on_rank(depth))
        together = self.related(places, isl.UnionMap(f"{{ {_same(depth + 1)} }}"))
        together = together.subtract(isl.UnionMap("{ }").union(_identity(items)))
        grows, stays = self.of_stamps(where, stamps)
        if not together.is_subset(stays):
            yield "two ops at one place, and not together"
        if not before.is_subset(grows):
            yield "a stamp does not grow along the order of a rank"
        for what, pairs in self.needs(where, items):
            near = pairs.intersect(self.related(places, isl.UnionMap(f"{{ {_rank(depth)} }}")))
            if not near.is_subset(before):
                yield f"{what}: it stands before what it needs"
            if not pairs.subtract(near).is_subset(grows):
                yield f"{what}: a stamp does not grow along the message"
            if what[-1] in _MESSAGES and not self.union("item", where, *_TRANSFERS).is_empty():
                yield from self.brought(where, what, pairs.subtract(near), before)
        yield from self.messages(where, before, stays)
        yield from self.versions(where, before)

    def padded(self, wanted: isl.UnionSet) -> isl.UnionSet:
        """All items, and those of the updates of their stages."""
        of_update = isl.UnionMap("{ [s, u, m, k] -> [s, u, 0, 0] }")
        return wanted.union(wanted.apply(of_update))

    def related(self, by: isl.UnionMap, relation: isl.UnionMap) -> isl.UnionMap:
        """The pairs of ops of which what they are mapped to is related."""
        return by.apply_range(relation).apply_range(by.reverse())

    def on_their_ranks(self, items: isl.UnionMap, places: isl.UnionMap) -> Iterator[str]:
        depth = int(self.certificate["depth"])
        entries = ", ".join(f"p{at}" for at in range(depth))
        ranks = places.apply_range(isl.UnionMap(f"{{ [r, {entries}] -> [r] }}"))
        stages = items.apply_range(isl.UnionMap("{ [s, u, m, k] -> [s] }"))
        if not self.held.is_single_valued():
            yield "a stage on two ranks"
        if not ranks.is_subset(stages.apply_range(isl.UnionMap.from_map(self.held))):
            yield "an op on another rank than its stage"

    def once(self, where: isl.Set, wanted: isl.UnionSet) -> Iterator[str]:
        """Whether all is made that must be, and nothing twice."""
        others = self.union("item", where, "B", "I", "W", "R", "U").domain().params()
        for made, kinds in _MAKERS.items():
            makers = self.union("item", where, *kinds)
            if not makers.is_injective():
                yield f"{made} is made twice"
            due = {"F": where, "B": others, "W": others}.get(made, isl.Set("{ : 1 = 0 }"))
            if not wanted.intersect_params(due).is_subset(makers.range()):
                yield f"{made} is not made everywhere"
        updates = self.union("item", where, "U").range()
        some = where if self.certificate["delay"] is not None else updates.params()
        every = wanted.apply(isl.UnionMap("{ [s, u, m, k] -> [s, u, 0, 0] }"))
        if not every.intersect_params(some).is_subset(updates):
            yield "a stage that makes no update"

    def of_stamps(
        self, where: isl.Set, stamps: Mapping[str, Any]
    ) -> tuple[isl.UnionMap, isl.UnionMap]:
        """The pairs of ops of which the second has a later stamp, and those that have the same."""
        count = int(self.certificate["functions"])
        function = isl.UnionMap("{ }")
        for name, statement in self.statements.items():
            domain = isl.Map(statement["place"]).domain().intersect_params(where)
            rows = stamps.get(name) or [[0] * (1 + len(self.sizes()) + domain.dim(_SET))] * count
            if len(rows) != count:
                raise ValueError("stamps of several lengths")
            names = [f"x{at}" for at in range(domain.dim(_SET))]
            terms = ["1", *self.sizes(), *names]
            values = []
            for row in rows:
                pairs = zip(row, terms, strict=True)
                values.append(" + ".join(f"{int(value)} * {term}" for value, term in pairs))
            stamp = f"{name}[{', '.join(names)}] -> [{', '.join(values)}]"
            text = f"[{', '.join(self.sizes())}] -> {{ {stamp} }}"
            function = function.union(isl.UnionMap(text).intersect_domain(domain))
        later = isl.Map.lex_lt(isl.Space.set_alloc(isl.DEFAULT_CONTEXT, 0, count))
        grows = self.related(function, isl.UnionMap.from_map(later))
        return grows, self.related(function, isl.UnionMap(f"{{ {_same(count)} }}"))

    def sizes(self) -> list[str]:
        return list(self.certificate["sizes"])

    def needs(self, where: isl.Set, items: isl.UnionMap) -> Iterator[tuple[str, isl.UnionMap]]:
        """For each rule the pairs of an op that makes something and one that needs it."""
        after = self.after
        dropped = self.union("item", where, "R").range()
        relations = {"own": isl.Map("{ [s] -> [s] }"), "after": after, "before": after.reverse()}
        for user, made, of, slices in _NEEDS:
            stages = relations[of]
            rest = isl.Map(f"{{ [u, m, k] -> [u, m, k + {slices}] }}")
            needed = isl.UnionMap.from_map(stages.flat_product(rest))
            yield self.pairs(where, user, made, needed)
        same = isl.UnionMap("{ [s, u, m, k] -> [s, u, m, k] }")
        for user in ("B", "I"):
            yield self.pairs(where, user, "R", same.intersect_domain(dropped))
            yield self.pairs(where, user, "F", same.subtract_domain(dropped))
        every = isl.Map("{ [u, m, k] -> [u, m2, k2] }")
        yield self.pairs(where, "U", "W", isl.UnionMap.from_map(self.replicas.flat_product(every)))

    def pairs(
        self, where: isl.Set, user: str, made: str, needed: isl.UnionMap
    ) -> tuple[str, isl.UnionMap]:
        makers = self.union("item", where, *_MAKERS[made])
        users = self.union("item", where, user)
        return f"{user} needs {made}", makers.apply_range(users.apply_range(needed).reverse())

    def messages(self, where: isl.Set, before: isl.UnionMap, stays: isl.UnionMap) -> Iterator[str]:
        """Whether transfers that a program writes meet: each send one receive, at one stamp."""
        for made, (send, receive, on) in _MESSAGES.items():
            sends, receives = self.union("item", where, send), self.union("item", where, receive)
            sent = sends.apply_range(isl.UnionMap(f"{{ [s, u, m, k] -> [s + {on}, u, m, k] }}"))
            met = sent.apply_range(receives.reverse())
            is_whole = met.domain().is_equal(sends.domain())
            is_whole = is_whole and met.range().is_equal(receives.domain())
            if not (is_whole and met.is_bijective() and met.is_subset(stays)):
                yield f"sends and receives of {made} do not meet"
            makers = self.union("item", where, *_MAKERS[made])
            if not makers.apply_range(sends.reverse()).is_subset(before):
                yield f"a send before its {made}"

    def brought(
        self, where: isl.Set, what: str, far: isl.UnionMap, before: isl.UnionMap
    ) -> Iterator[str]:
        """Whether what ops need from other ranks is received before them."""
        receives = self.union("item", where, _MESSAGES[what[-1]][1])
        users = self.union("item", where, what[0])
        there = receives.apply_range(users.reverse()).intersect(before).range()
        if not far.range().is_subset(there):
            yield f"{what}: it stands before the receive"

    def versions(self, where: isl.Set, before: isl.UnionMap) -> Iterator[str]:
        """Whether every op adds to the gradient of its own update, and reads what it should."""
        updates = self.union("item", where, "U")
        if updates.is_empty():
            return
        is_stream, delay = self.certificate["stream"], self.certificate["delay"]
        if is_stream and delay is None:
            yield "a stream whose ops read the latest weights"
            return
        behind: list[tuple[tuple[str, ...], int, bool]] = [(("B", "W"), 0, True)]
        if is_stream:
            behind += [(("B", "W"), -1, False), (("F",), -1 - int(delay), False)]
        elif delay is None:
            behind.append((("F", "B", "I", "W", "R"), 0, True))
        for kinds, on, is_first in behind:
            ops = self.union("item", where, *kinds)
            of = ops.apply_range(isl.UnionMap(f"{{ [s, u, m, k] -> [s, u + {on}, 0, 0] }}"))
            pairs = of.apply_range(updates.reverse())
            if not pairs.is_subset(before if is_first else before.reverse()):
                yield f"{'/'.join(kinds)} on the wrong side of an update"


_SET = isl.dim_type.set


def _same(width: int) -> str:
    names = ", ".join(f"x{at}" for at in range(width))
    return f"[{names}] -> [{names}]"


def _rank(depth: int) -> str:
    one, other = (", ".join(f"{name}{at}" for at in range(depth)) for name in "pq")
    return f"[r, {one}] -> [r, {other}]"


def _earlier_on_rank(depth: int) -> isl.UnionMap:
    space = isl.Space.set_alloc(isl.DEFAULT_CONTEXT, 0, depth + 1)
    earlier = isl.Map.lex_lt(space).equate(isl.dim_type.in_, 0, isl.dim_type.out, 0)
    return isl.UnionMap.from_map(earlier)


def _identity(items: isl.UnionMap) -> isl.UnionMap:
    return items.domain().identity()
