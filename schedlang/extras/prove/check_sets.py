"""Checks a certificate for any ranks: `python -m schedlang.extras.prove.check_sets FILE`. It trusts
nobody, imports nothing of schedlang, and asks isl each question anew. For all sizes of each case,
each op runs once, on the rank that holds its stage, after what it needs there, with the right
weights; time stamps grow along every edge (a rank's order, a message), so there is no cycle.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import islpy as isl
from islpy import DEFAULT_CONTEXT, UnionMap

#: The kinds of op that make each thing.
_MAKERS = {"F": "F", "B": "BI", "W": "BW", "R": "R", "U": "U"}
#: An item is a stage, an update, the two digits of a microbatch, a slice; of an update, zeros.
_OF_UPDATE = "{ [s, u, g, m, k] -> [s, u, 0, 0, 0] }"
_SAME = "[u, g, m, k] -> [u, g, m, k]"
#: Which kinds need what, of which stages, and of which other numbers of the item.
NEEDS = (
    ("F", "F", "before", _SAME),
    ("F", "F", "own", "[u, g, m, k] -> [u, g, m, k - 1]"),
    ("BI", "B", "after", _SAME),
    ("BI", "B", "own", "[u, g, m, k] -> [u, g, m, k + 1]"),
    ("BIR", "F", "own", _SAME),
    ("BI", "R", "own", _SAME),  # activations that were dropped, made again
    ("W", "B", "own", _SAME),
    ("U", "W", "replicas", "[u, g, m, k] -> [u, g2, m2, k2]"),
)
#: By the rule of weights: which kinds read the version of a forward, of which of its items.
_READ_SAME = {
    "latest": ("BIWR", "{ [s, u, g, m, k] -> [s, u, g, m, k] }"),
    "stash": ("F", "{ [s, u, g, m, k] -> [s, u, g2, m2, k2] }"),
    "unstashed": ("R", "{ [s, u, g, m, k] -> [s, u, g, m, k] }"),
}
#: The send and the receive of each message, and the distance of their stages.
MESSAGES = {"F": ("SEND_F", "RECV_F", 1), "B": ("SEND_B", "RECV_B", -1)}
_TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_read = lru_cache(4096)(isl.Map)


def faults_of(certificate: dict[str, Any]) -> list[str]:
    """The faults of a certificate; empty if it holds."""
    try:
        names = [op["name"] for op in certificate["statements"]]
        faults = ["two statements of one name"] if len(set(names)) < len(names) else []
        cases = isl.Set("{ : 1 = 0 }")
        for case in certificate["cases"]:
            cases = cases | isl.Set(case["where"])
            ops = [{**op, "stamp": case["stamps"][op["name"]]} for op in certificate["statements"]]
            orders = Orders({**certificate, "statements": ops}, isl.Set(case["where"]))
            facts = [*orders.facts("stamp"), *orders.waits()]
            faults += [what for what, amiss in facts if not amiss.is_empty()]
        if not isl.Set(certificate["proved"]).is_subset(cases):
            faults.append("the cases are not all of the sizes")
        return faults
    except (KeyError, TypeError, ValueError, isl.Error) as error:
        return [f"not a certificate: {type(error).__name__}: {error}"]


class Orders:
    """The orders in a certificate, at the sizes at which `where` holds."""

    def __init__(self, document: dict[str, Any], where: isl.Set) -> None:
        self.document = document
        self.where = where
        self.wanted = isl.UnionSet(document["wanted"]).intersect_params(where)
        # An op S0[r, m] has an item [s, u, g, m, k], which says what it needs; a place [0, m, 0] in
        # the order of its rank [r]; and a stamp [2m + r], which grows along all edges.
        self.near = _alike(self.of(of="rank"))
        self.before = _growing(self.of(of="place"), int(document["depth"])).intersect(self.near)

    def of(self, *kinds: str, of: str = "item") -> UnionMap:
        """From ops to their items, ranks, places or stamps: of all ops, or of the `kinds`."""
        result = UnionMap("{ }")
        for op in self.document["statements"]:
            part = _read(op[of])
            if part.get_tuple_name(isl.dim_type.in_) != op["name"]:
                raise ValueError("a relation of another statement")
            if not kinds or op["kind"] in kinds:
                result = result.union(UnionMap.from_map(part.intersect_params(self.where)))
        return result

    def facts(self, *more: str) -> Iterator[tuple[str, Any]]:
        """What must hold, each with the ops or pairs of ops of which it does not."""
        items = self.of()
        for of in ("item", "rank", "place", *more):
            named = self.of(of=of)
            yield f"an op of no {of}", items.domain().subtract(named.domain())
            yield f"an op of two {of}s", _twice(named.reverse())
        every = self.wanted.union(self.wanted.apply(UnionMap(_OF_UPDATE)))
        yield "an op of an item that there is not", items.range().subtract(every)
        held = isl.Map(self.document["held"]).intersect_params(self.where)
        yield "a stage on two ranks", _twice(UnionMap.from_map(held.reverse()))
        holders = items.apply_range(_items(held, "[u, g, m, k] -> []"))
        yield "an op on another rank than its stage", self.of(of="rank").subtract(holders)
        for kinds in (*_MAKERS.values(), *([kind] for kind in _TRANSFERS)):
            yield f"two of {' and '.join(kinds)} for one item", _twice(self.of(*kinds))
        trains = self.of("B", "I", "W", "R", "U").domain().params()
        for made, due in (("F", self.where), ("B", trains), ("W", trains)):
            missing = self.wanted.subtract(self.of(*_MAKERS[made]).range())
            yield f"{made} is not always made", missing.intersect_params(due)
        for user, made, pairs in self.needs():
            what = f"{user}, which needs {made}, stands before it"
            yield what, pairs.intersect(self.near).subtract(self.before)
            if made in MESSAGES and not self.of(*_TRANSFERS).is_empty():
                receives = self.of(MESSAGES[made][1]).apply_range(self.of(*user).reverse())
                there = receives.intersect(self.before).range()
                yield f"{what}, or its receive", pairs.subtract(self.near).range().subtract(there)
        for made, (send, receive, _) in MESSAGES.items():
            met = self.met(made)
            alone = self.of(send, receive).domain().subtract(met.domain()).subtract(met.range())
            yield f"{made} is only sent, or only received", alone
            sent = self.of(*_MAKERS[made]).apply_range(self.of(send).reverse())
            yield f"a send before its {made}", sent.subtract(self.before)
        yield from self.versions()

    def waits(self) -> Iterator[tuple[str, Any]]:
        """Stamps grow along all that an op waits for, and are alike where ops happen at once."""
        grows = _growing(self.of(of="stamp"), int(self.document["width"]))
        yield "a stamp does not grow along the order of a rank", self.before.subtract(grows)
        for user, made, pairs in self.needs():
            yield f"no stamp grows from {made} to {user}", pairs.subtract(self.near).subtract(grows)
        stays = _alike(self.of(of="stamp"))
        for each in (_alike(self.of(of="place")).intersect(self.near), *map(self.met, MESSAGES)):
            yield "two ops that happen at once, at two stamps", each.subtract(stays)

    def needs(self) -> Iterator[tuple[str, str, UnionMap]]:
        """For each rule, the pairs of an op that makes the thing and an op that needs it."""
        after = isl.Map(self.document["after"])
        stages = {"own": isl.Map("{ [s] -> [s] }"), "after": after, "before": after.reverse()}
        stages["replicas"] = isl.Map(self.document["replicas"])
        for user, made, of, rest in NEEDS:
            needed = self.pairs(user, _items(stages[of], rest), _MAKERS[made])
            yield user, made, needed.reverse()

    def met(self, made: str) -> UnionMap:
        """The pairs of a send of something and its receive."""
        send, receive, on = MESSAGES[made]
        return self.pairs([send], _items(isl.Map(f"{{ [s] -> [s + {on}] }}"), _SAME), [receive])

    def versions(self) -> Iterator[tuple[str, Any]]:
        """Every op adds to the gradient of its own update, and reads the version of its rule."""
        behind = [("BW", UnionMap("{ [s, u, g, m, k] -> [s, u - 1, 0, 0, 0] }"))]
        updates = self.pairs("F", UnionMap("{ [s, u, g, m, k] -> [s, u2, 0, 0, 0] }"), "U")
        between = updates.intersect(self.before).apply_range(self.before)
        due = self.where if self.document["stream"] else self.of("U").domain().params()
        ruled = isl.UnionSet("{ }")
        for rule, text in self.document["weights"]:
            read = UnionMap(text)
            ruled = ruled.union(read.domain())
            due = due if rule == "latest" else due | read.domain().params()
            if rule == "delay":
                behind.append(("F", read))
            else:
                kinds, alike = _READ_SAME[rule]
                same = self.pairs("F", UnionMap(alike).intersect_domain(read.domain()), kinds)
                yield f"an update between F and {kinds}", between.intersect(same)
        yield "a stage whose weights have no rule", self.wanted.subtract(ruled)
        every = self.wanted.apply(UnionMap(_OF_UPDATE)).intersect_params(due)
        yield "a stage that makes no update", every.subtract(self.of("U").range())
        for kinds, read in behind:
            late = self.pairs("U", read.reverse(), kinds).subtract(self.before)
            yield f"{kinds} before the update that makes what it reads", late

    def pairs(self, ones: Sequence[str], items: UnionMap, others: Sequence[str]) -> UnionMap:
        """The pairs of ops of the kinds `ones` and `others` whose items are related by `items`."""
        return self.of(*ones).apply_range(items).apply_range(self.of(*others).reverse())


def _items(stages: isl.Map, rest: str) -> UnionMap:
    """A relation of items from a relation of stages and a relation of the rest."""
    return UnionMap.from_map(stages.flat_product(isl.Map(f"{{ {rest} }}")))


def _alike(by: UnionMap) -> UnionMap:
    """The pairs of ops that a map sends to the same value."""
    return by.apply_range(by.reverse())


def _twice(relation: UnionMap) -> UnionMap:
    """The pairs of different elements that a relation sends to the same value."""
    alike = relation.domain().identity() if relation.is_injective() else _alike(relation)
    return alike.subtract(relation.domain().identity())


def _growing(by: UnionMap, width: int) -> UnionMap:
    """The pairs of ops of which the second has a later list of `width` numbers."""
    later = isl.Map.lex_lt(isl.Space.set_alloc(DEFAULT_CONTEXT, 0, width))
    return by.apply_range(UnionMap.from_map(later)).apply_range(by.reverse())


if __name__ == "__main__":
    amiss = faults_of(json.loads(Path(sys.argv[1]).read_text()))
    print("\n".join(amiss) or "the certificate proves what it says")
    sys.exit(1 if amiss else 0)
