"""Checks a certificate of `schedc prove --any-ranks`, without trust in who made it:
`python -m schedlang.parametric.ranks.check_certificate FILE`.

It shares no code with the prover: the rules of pipeline training are written down once more, and
each question is asked of isl anew. For all sizes of each case, every op is on the rank that holds
its stage; each stage runs each microbatch's forward, backward and weight gradient once; what an op
needs of its own rank stands before it; and along every edge (a rank's order, a message) time stamps
grow, so that no ranks wait for each other in a circle.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import islpy as isl
from islpy import DEFAULT_CONTEXT, UnionMap

#: What is made by which kinds of op.
_MAKERS = {"F": ("F",), "B": ("B", "I"), "W": ("B", "W"), "R": ("R",), "U": ("U",)}
#: An item is a stage, an update, the two digits of a microbatch, and a slice; of an update no more.
_OF_UPDATE = "{ [s, u, g, m, k] -> [s, u, 0, 0, 0] }"
_SAME = "[u, g, m, k] -> [u, g, m, k]"
#: Which kinds need what of which stages; and of these the rest of the item.
_NEEDS = (
    ("F", "F", "before", _SAME),
    ("F", "F", "own", "[u, g, m, k] -> [u, g, m, k - 1]"),
    ("BI", "B", "after", _SAME),
    ("BI", "B", "own", "[u, g, m, k] -> [u, g, m, k + 1]"),
    ("BI", "F", "own", _SAME),
    # Activations that were dropped, as those are that `R` makes again.
    ("BI", "R", "own", _SAME),
    ("W", "B", "own", _SAME),
    ("R", "F", "own", _SAME),
    ("U", "W", "replicas", "[u, g, m, k] -> [u, g2, m2, k2]"),
)
#: Of messages, the send and the receive, which is of so many stages on.
_MESSAGES = {"F": ("SEND_F", "RECV_F", 1), "B": ("SEND_B", "RECV_B", -1)}


def faults_of(certificate: dict[str, Any]) -> list[str]:
    """What does not hold in a certificate; nothing, if it proves what it says."""
    try:
        names = [op["name"] for op in certificate["statements"]]
        faults = ["two statements of one name"] if len(set(names)) < len(names) else []
        cases = isl.Set("{ : 1 = 0 }")
        for case in certificate["cases"]:
            cases = cases | isl.Set(case["where"])
            faults += [what for holds, what in _Case(certificate, case).facts() if not holds]
        if not isl.Set(certificate["proved"]).is_subset(cases):
            faults.append("the cases are not all of the sizes")
        return faults
    except (KeyError, TypeError, ValueError, isl.Error) as error:
        return [f"not a certificate: {type(error).__name__}: {error}"]


class _Case:
    """Some of the sizes, `where` they are."""

    def __init__(self, document: dict[str, Any], case: dict[str, Any]) -> None:
        self.document = document
        self.where = isl.Set(case["where"])
        self.held = isl.Map(document["held"])
        self.wanted = isl.UnionSet(document["wanted"]).intersect_params(self.where)
        self.ops = [{**op, "stamp": case["stamps"][op["name"]]} for op in document["statements"]]
        # The relations that all is asked of; each is from instances of statements:
        #
        #     item       S0[r, m] -> [s, u, g, m, k]     what it is about: all that is needed
        #     rank       S0[r, m] -> [r]                 where it runs
        #     place      S0[r, m] -> [0, m, 0]           where it stands in the order of its rank
        #     stamp      S0[r, m] -> [2m + r]            when: must grow along every edge
        places = self.of(of="place")
        stamps = self.of(of="stamp")
        depth = int(document["depth"])
        width = int(document["width"])
        self.near = _related(self.of(of="rank"), _same(1))
        self.before = _related(places, _later(depth)).intersect(self.near)
        self.together = _related(places, _same(depth)).intersect(self.near)
        self.grows = _related(stamps, _later(width))
        self.stays = _related(stamps, _same(width))

    def of(self, *kinds: str, of: str = "item") -> UnionMap:
        """The items of all ops, or of those of some kinds; or their ranks, places, or stamps."""
        result = UnionMap("{ }")
        for op in self.ops:
            part = isl.Map(op[of])
            if part.get_tuple_name(isl.dim_type.in_) != op["name"]:
                raise ValueError("a relation of another statement")
            if not kinds or op["kind"] in kinds:
                result = result.union(UnionMap.from_map(part.intersect_params(self.where)))
        return result

    def facts(self) -> Iterator[tuple[bool, str]]:
        """What must hold, each with what to say if it does not."""
        items = self.of()
        for of in ("item", "rank", "place", "stamp"):
            relation = self.of(of=of)
            is_of_all = relation.domain().is_equal(items.domain())
            yield is_of_all and relation.is_single_valued(), f"an op of no {of}, or two"
        every = self.wanted.union(self.wanted.apply(UnionMap(_OF_UPDATE)))
        yield items.range().is_subset(every), "an op of an item that there is not"
        stages = items.apply_range(UnionMap("{ [s, u, g, m, k] -> [s] }"))
        holders = stages.apply_range(UnionMap.from_map(self.held))
        yield self.held.is_single_valued(), "a stage on two ranks"
        yield self.of(of="rank").is_subset(holders), "an op on another rank than its stage"
        others = self.together.subtract(items.domain().identity())
        yield others.is_subset(self.stays), "two ops at one place, and not at one stamp"
        yield self.before.is_subset(self.grows), "a stamp does not grow along the order of a rank"
        writes = not self.of(*(kind for ends in _MESSAGES.values() for kind in ends[:2])).is_empty()
        for user, made, pairs in self.needs():
            what = f"{user}, which needs {made}"
            far = pairs.subtract(self.near)
            yield pairs.intersect(self.near).is_subset(self.before), f"{what}, stands before it"
            yield far.is_subset(self.grows), f"{what}: a stamp does not grow along the message"
            if writes and made in _MESSAGES:
                receives = self.of(_MESSAGES[made][1]).apply_range(self.of(*user).reverse())
                there = receives.intersect(self.before).range()
                yield far.range().is_subset(there), f"{what}, stands before the receive"
        yield from self.once()
        yield from self.messages()
        yield from self.versions()

    def once(self) -> Iterator[tuple[bool, str]]:
        """All is made that must be, and nothing twice."""
        trains = self.of("B", "I", "W", "R", "U").domain().params()
        for made, kinds in _MAKERS.items():
            yield self.of(*kinds).is_injective(), f"{made} is made twice"
        for made, due in (("F", self.where), ("B", trains), ("W", trains)):
            wanted = self.wanted.intersect_params(due)
            yield wanted.is_subset(self.of(*_MAKERS[made]).range()), f"{made} is not always made"
        updates = self.of("U").range()
        some = self.where if self.document["delay"] is not None else updates.params()
        every = self.wanted.apply(UnionMap(_OF_UPDATE)).intersect_params(some)
        yield every.is_subset(updates), "a stage that makes no update"

    def needs(self) -> Iterator[tuple[str, str, UnionMap]]:
        """For each rule the pairs of an op that makes something and one that needs it."""
        stages = {"own": isl.Map("{ [s] -> [s] }"), "replicas": isl.Map(self.document["replicas"])}
        stages["after"] = isl.Map(self.document["after"])
        stages["before"] = stages["after"].reverse()
        for user, made, of, rest in _NEEDS:
            needed = self.of(*user).apply_range(_items(stages[of], rest))
            yield user, made, self.of(*_MAKERS[made]).apply_range(needed.reverse())

    def messages(self) -> Iterator[tuple[bool, str]]:
        """Transfers that a program writes meet: each send one receive, at one stamp."""
        for made, (send, receive, on) in _MESSAGES.items():
            sends = self.of(send)
            receives = self.of(receive)
            sent = sends.apply_range(_items(isl.Map(f"{{ [s] -> [s + {on}] }}"), _SAME))
            met = sent.apply_range(receives.reverse())
            all_meet = met.domain().union(met.range()).is_equal(sends.union(receives).domain())
            yield all_meet, f"a send of {made} that nobody receives, or a receive that nobody sends"
            yield met.is_bijective() and met.is_subset(self.stays), f"{made} is sent otherwise"
            made_for = self.of(*_MAKERS[made]).apply_range(sends.reverse())
            yield made_for.is_subset(self.before), f"a send before its {made}"

    def versions(self) -> Iterator[tuple[bool, str]]:
        """Every op adds to the gradient of its own update, and reads the version that it should."""
        updates = self.of("U")
        stream = self.document["stream"]
        delay = self.document["delay"]
        yield not (stream and delay is None) or updates.is_empty(), "a stream, and no delay"
        rules = [("BW", 0, self.before)]
        if stream:
            late = self.before.reverse()
            rules += [("BW", -1, late), ("F", -1 - int(delay or 0), late)]
        elif delay is None:
            rules.append(("FBIWR", 0, self.before))
        for kinds, on, side in rules:
            of = UnionMap(f"{{ [s, u, g, m, k] -> [s, u + {on}, 0, 0, 0] }}")
            pairs = self.of(*kinds).apply_range(of).apply_range(updates.reverse())
            yield pairs.is_subset(side), f"{kinds} on the wrong side of an update"


def _items(stages: isl.Map, rest: str) -> UnionMap:
    """A relation of items by one of stages, and one of the rest."""
    return UnionMap.from_map(stages.flat_product(isl.Map(f"{{ {rest} }}")))


def _related(by: UnionMap, relation: UnionMap) -> UnionMap:
    """The pairs of ops of which what they are mapped to is related."""
    return by.apply_range(relation).apply_range(by.reverse())


def _later(width: int) -> UnionMap:
    """From lists of so many numbers to those that come later."""
    return UnionMap.from_map(isl.Map.lex_lt(isl.Space.set_alloc(DEFAULT_CONTEXT, 0, width)))


def _same(width: int) -> UnionMap:
    return UnionMap.from_map(isl.Map.identity(isl.Space.alloc(DEFAULT_CONTEXT, 0, width, width)))


if __name__ == "__main__":
    amiss = faults_of(json.loads(Path(sys.argv[1]).read_text()))
    print("\n".join(amiss) or "the certificate proves what it says")
    sys.exit(1 if amiss else 0)
