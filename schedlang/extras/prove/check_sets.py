"""Checks a certificate of `schedc check --for ranks=any`, without trust in who made it: `python -m
schedlang.extras.prove.check_sets FILE`. It shares no code with the prover: the rules of training
are written down once more, and isl answers each question anew.

For all sizes of each case, each op runs once, on the rank that holds its stage, after what it needs
there, with the right weights; and time stamps grow along every edge (a rank's order, a message), so
that the event graph has no cycle.
"""

import json
import sys
from collections.abc import Iterator, Sequence
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
_NEEDS = (
    ("F", "F", "before", _SAME),
    ("F", "F", "own", "[u, g, m, k] -> [u, g, m, k - 1]"),
    ("BI", "B", "after", _SAME),
    ("BI", "B", "own", "[u, g, m, k] -> [u, g, m, k + 1]"),
    ("BIR", "F", "own", _SAME),
    # Activations that were dropped: those that `R` makes again.
    ("BI", "R", "own", _SAME),
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
_MESSAGES = {"F": ("SEND_F", "RECV_F", 1), "B": ("SEND_B", "RECV_B", -1)}


def faults_of(certificate: dict[str, Any]) -> list[str]:
    """The faults of a certificate; empty if it holds."""
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
    """One case of a certificate: the sizes at which the condition `where` holds."""

    def __init__(self, document: dict[str, Any], case: dict[str, Any]) -> None:
        self.document = document
        self.where = isl.Set(case["where"])
        self.held = isl.Map(document["held"])
        self.wanted = isl.UnionSet(document["wanted"]).intersect_params(self.where)
        self.ops = [{**op, "stamp": case["stamps"][op["name"]]} for op in document["statements"]]
        # An op S0[r, m] has an item [s, u, g, m, k], which says what it needs; a place [0, m, 0] in
        # the order of its rank [r]; and a stamp [2m + r], which grows along all edges.
        places = self.of(of="place")
        stamps = self.of(of="stamp")
        self.near = _alike(self.of(of="rank"))
        self.before = _growing(places, int(document["depth"])).intersect(self.near)
        self.together = _alike(places).intersect(self.near)
        self.grows = _growing(stamps, int(document["width"]))
        self.stays = _alike(stamps)

    def of(self, *kinds: str, of: str = "item") -> UnionMap:
        """From ops to their items, ranks, places or stamps: of all ops, or of the `kinds`."""
        result = UnionMap("{ }")
        for op in self.ops:
            part = isl.Map(op[of])
            if part.get_tuple_name(isl.dim_type.in_) != op["name"]:
                raise ValueError("a relation of another statement")
            if not kinds or op["kind"] in kinds:
                result = result.union(UnionMap.from_map(part.intersect_params(self.where)))
        return result

    def facts(self) -> Iterator[tuple[bool, str]]:
        """The facts to check, each with the message for where it does not hold."""
        items = self.of()
        for of in ("item", "rank", "place", "stamp"):
            relation = self.of(of=of)
            is_of_all = relation.domain().is_equal(items.domain())
            yield is_of_all and relation.is_single_valued(), f"an op of no {of}, or two"
        every = self.wanted.union(self.wanted.apply(UnionMap(_OF_UPDATE)))
        yield items.range().is_subset(every), "an op of an item that there is not"
        holders = items.apply_range(_items(self.held, "[u, g, m, k] -> []"))
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
        """Everything is made that must be made, and nothing twice."""
        trains = self.of("B", "I", "W", "R", "U").domain().params()
        for made, kinds in _MAKERS.items():
            yield self.of(*kinds).is_injective(), f"{made} is made twice"
        for made, due in (("F", self.where), ("B", trains), ("W", trains)):
            wanted = self.wanted.intersect_params(due)
            yield wanted.is_subset(self.of(*_MAKERS[made]).range()), f"{made} is not always made"
        updates = self.of("U").range()
        is_due = any(rule != "latest" for rule, _ in self.document["weights"])
        some = self.where if is_due or self.document["stream"] else updates.params()
        every = self.wanted.apply(UnionMap(_OF_UPDATE)).intersect_params(some)
        yield every.is_subset(updates), "a stage that makes no update"

    def needs(self) -> Iterator[tuple[str, str, UnionMap]]:
        """For each rule, the pairs of an op that makes the thing and an op that needs it."""
        after = isl.Map(self.document["after"])
        stages = {"own": isl.Map("{ [s] -> [s] }"), "after": after, "before": after.reverse()}
        stages["replicas"] = isl.Map(self.document["replicas"])
        for user, made, of, rest in _NEEDS:
            needed = self.pairs(user, _items(stages[of], rest), _MAKERS[made])
            yield user, made, needed.reverse()

    def messages(self) -> Iterator[tuple[bool, str]]:
        """Each send that the program writes has one receive, with the same stamp."""
        for made, (send, receive, on) in _MESSAGES.items():
            met = self.pairs([send], _items(isl.Map(f"{{ [s] -> [s + {on}] }}"), _SAME), [receive])
            ends = self.of(send, receive).domain()
            all_meet = met.domain().union(met.range()).is_equal(ends)
            yield all_meet, f"a send of {made} that nobody receives, or a receive that nobody sends"
            yield met.is_bijective() and met.is_subset(self.stays), f"{made} is sent otherwise"
            made_for = self.of(*_MAKERS[made]).apply_range(self.of(send).reverse())
            yield made_for.is_subset(self.before), f"a send before its {made}"

    def versions(self) -> Iterator[tuple[bool, str]]:
        """Every op adds to the gradient of its own update, and reads the version of its rule."""
        behind = [("BW", UnionMap("{ [s, u, g, m, k] -> [s, u - 1, 0, 0, 0] }"))]
        updates = self.pairs("F", UnionMap("{ [s, u, g, m, k] -> [s, u2, 0, 0, 0] }"), "U")
        between = updates.intersect(self.before).apply_range(self.before)
        ruled = isl.UnionSet("{ }")
        for rule, text in self.document["weights"]:
            read = UnionMap(text)
            ruled = ruled.union(read.domain())
            if rule == "delay":
                behind.append(("F", read))
            else:
                kinds, alike = _READ_SAME[rule]
                same = self.pairs("F", UnionMap(alike).intersect_domain(read.domain()), kinds)
                yield between.intersect(same).is_empty(), f"an update between F and {kinds}"
        yield self.wanted.is_subset(ruled), "a stage whose weights have no rule"
        for kinds, read in behind:
            is_behind = self.pairs("U", read.reverse(), kinds).is_subset(self.before)
            yield is_behind, f"{kinds} before the update that makes what it reads"

    def pairs(self, ones: Sequence[str], items: UnionMap, others: Sequence[str]) -> UnionMap:
        """The pairs of ops of the kinds `ones` and `others` whose items are related by `items`."""
        return self.of(*ones).apply_range(items).apply_range(self.of(*others).reverse())


def _items(stages: isl.Map, rest: str) -> UnionMap:
    """A relation of items from a relation of stages and a relation of the rest."""
    return UnionMap.from_map(stages.flat_product(isl.Map(f"{{ {rest} }}")))


def _alike(by: UnionMap) -> UnionMap:
    """The pairs of ops that a map sends to the same value."""
    return by.apply_range(by.reverse())


def _growing(by: UnionMap, width: int) -> UnionMap:
    """The pairs of ops of which the second has a later list of `width` numbers."""
    later = isl.Map.lex_lt(isl.Space.set_alloc(DEFAULT_CONTEXT, 0, width))
    return by.apply_range(UnionMap.from_map(later)).apply_range(by.reverse())


if __name__ == "__main__":
    amiss = faults_of(json.loads(Path(sys.argv[1]).read_text()))
    print("\n".join(amiss) or "the certificate proves what it says")
    sys.exit(1 if amiss else 0)
