"""Runs a program once for all numbers of microbatches. The result is the order of each rank, as
parts, some of which repeat more often the larger n is.

The program's Python (`schedlang.language.codegen`) runs with a number for `microbatches` that
depends on n. A loop whose number of rounds grows with n runs its body once, for a symbolic round.
If the body does not do the same in all rounds, the loop is split or unrolled, and the program runs
again. So the orders follow from the text, and not from sizes that were tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, gcd
from typing import Any, ClassVar

from attrs import define, field, frozen

from schedlang.extras.prove.pieces.linear import (
    ONCE,
    Affine,
    Linear,
    Loop,
    NeedsPeriod,
    NeedsSplit,
    NeedsUnrolling,
    NotLinear,
    Searched,
    holds_from,
    linear,
    listed_for_all,
)
from schedlang.extras.prove.pieces.open_ops import with_next, with_owed
from schedlang.extras.prove.pieces.pieces import Op, Orders, Piece, aligned
from schedlang.language import syntax
from schedlang.language.arithmetic import (
    quotient,
    steps_of,
)
from schedlang.language.codegen import generate
from schedlang.language.declarations import SIZES, Declarations, Price
from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Claim

#: The most runs of one rank's order.
_MOST_RUNS = 400
#: The most rounds of a loop that are taken as one.
_MOST_UNROLLED = 512


@frozen
class Part:
    """Ops that a rank calls in each of `rounds` rounds. Stages and microbatches may be open, as
    None.
    """

    rounds: Affine
    ops: list[Op]


@frozen
class Expansion:
    """A program for microbatches = base + period * n: the orders of its ranks, and its claims."""

    orders: Orders
    sites: Sites
    claims: tuple[Claim, ...]


def expand_for_all(
    tree: syntax.Schedule,
    params: Mapping[str, int],
    base: int,
    period: int,
    budget: Budget,
    unroll: int = 1,
) -> Expansion:
    """Expand a program for microbatches = base + period * n, with `unroll` rounds of every loop
    that grows taken as one.

    NeedsBase or NeedsPeriod where that needs other ones. NotLinear, with the reason, where there is
    no such expansion, or it takes more than the `budget`. Fault if the program is wrong for all n.
    """
    declared = _Declared(
        tree,
        params,
        frozenset(),
        generate(tree, frozenset(), False),
        microbatches=Linear(base, period),
        budget=budget,
    )
    return declared.expansion(unroll)


class Spent(NotLinear):
    """The budget is used up."""


@define
class Budget:
    """The number of ops that a proof has generated so far, and its limit. It counts ops and not
    seconds, so what is proved does not depend on the machine.
    """

    #: The most ops to generate in all orders, symbolic ones included: a few minutes of work.
    MOST: ClassVar[int] = 5_000_000

    spent: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether the limit is reached."""
        return self.spent > self.MOST

    def spend(self, ops: int) -> None:
        """Count ops that are about to be generated; Spent if they exceed the limit."""
        self.spent += ops
        if self.is_spent:
            message = (
                f"it takes more than {self.MOST:,} ops; prove it for fewer ranks, or for any "
                "number of them with `--for ranks=any`"
            )
            raise Spent(message)


class _Chunks(dict[int, int]):
    """The stages of a rank by the numbers of its chunks."""

    def __getitem__(self, number: Any) -> int:
        if isinstance(number, Linear):
            raise NotLinear("`stage` of a number that depends on `microbatches`")
        return super().__getitem__(number)


@define
class _Declared(Declarations):
    """One run of a program under the compiler's own rules, where `microbatches` depends on n."""

    microbatches: Linear = field(kw_only=True)
    budget: Budget = field(kw_only=True)
    #: The order of the rank that runs, so far.
    parts: list[Part] = field(factory=list)
    #: The loops around the current statement, with their rounds.
    path: list[Any] = field(factory=list)
    #: The rounds at which each loop is split, and how many of its rounds are taken as one. The key
    #: is the loop's location and the rounds of the loops around it.
    splits: dict[Any, list[Any]] = field(factory=dict)
    unrolled: dict[Any, int] = field(factory=dict)
    is_within: bool = False

    def expansion(self, unroll: int) -> Expansion:
        """Run the program."""
        self.names |= {
            **ARITHMETIC,
            # Functions are not memoized, since `Linear` has no hash.
            "remembered": lambda function: function,
        }
        self.run_items()
        if self._passes:
            raise Searched(f"its order is that of the pass `{self._passes[0].name}`")
        if self._weights and not self.sites.parts:
            raise NotLinear("it says which versions of weights are read")
        if not isinstance(self.order, syntax.Rank):
            raise Searched("it is a `block`, whose ops stand at slots")
        if "microbatches" not in self.params:
            raise NotLinear("it has no parameter `microbatches`")
        if not isinstance(self.params["ranks"], int):
            raise NotLinear("`ranks` depends on `microbatches`")
        layout = self.layout()
        for price in self.prices:
            self.check_price(price)
        ranks = [self.order_of(rank, layout) for rank in range(self.params["ranks"])]
        stages = range(len(layout.placement))
        units = tuple(linear(layout.units(stage)).parts for stage in stages)
        orders = aligned(ranks, units, layout.placement, unroll)
        return Expansion(orders, self.sites, tuple(self.claims))

    # What stands before the order

    def param(self, name: str, default: Any, location: int) -> Any:
        """A parameter's value, which may depend on n."""
        if name == "microbatches":
            value: Any = self.microbatches
        else:
            value = self.given[name] if name in self.given else default()
        if name in SIZES and value < 1:
            raise Fault(
                "parameter", f"`{name}` is {value}, it must be 1 or more", location
            )
        self.params[name] = value
        return value

    def expect(self, stages: int, microbatches: Any, location: int) -> None:
        """Do not limit the number of ops: the budget does."""

    def check_price(self, price: Price) -> None:
        """NotLinear for a cost that depends on n, or on anything but the stage."""
        if price.word == "capacity":
            raise NotLinear("it has a `capacity`")
        if price.word == "send" and price.is_memory:
            raise NotLinear("it has a `memory send`")
        if price.word in ("sum", "gather") and not price.is_memory:
            raise NotLinear(f"it has costs of `{price.word}`")
        item = f"{'memory' if price.is_memory else 'cost'} {price.word}"
        ranks = range(self.params["ranks"])
        if price.indices == 0:
            values = [price.of()]
        elif price.indices == 1:
            values = [price.of(stage) for stage in range(len(self.placement))]
        elif price.word == "send":
            values = [price.of(one, other) for one in ranks for other in ranks]
        else:
            raise NotLinear(f"`{item}` differs by microbatch")
        # The memory of a gather may depend on n.
        if price.word != "gather" and any(isinstance(of, Linear) for of in values):
            raise NotLinear(f"`{item}` depends on microbatches")

    # The order of a rank

    def order_of(self, rank: int, layout: Layout) -> Sequence[Piece]:
        """The order of a rank. The program runs until all loops are split as needed."""
        self.begin(rank, layout)
        chunks = _Chunks(enumerate(self.held))
        self.splits = {}
        self.unrolled = {}
        claims = len(self.claims)
        # The program runs until nothing in it depends on the round of a loop any more:
        #
        #     for m in 0 .. microbatches {           1st run    `if` has no one value for all rounds
        #         if m < 2 { F(m) } else { B(m) }    split      at round 2
        #     }                                      2nd run    two rounds one by one, then a part
        for _ in range(_MOST_RUNS):
            self.budget.spend(1)
            self.parts = [Part(ONCE, [])]
            self.path = []
            self.is_within = False
            del self.claims[claims:]
            try:
                self.names["program"](rank, self.op, self.held, chunks)
                break
            except NeedsSplit as split:
                self._split(split.loop, split.at)
            except NeedsUnrolling as unrolling:
                key = unrolling.loop.key[0]
                factor = self.unrolled.get(key, 1) * unrolling.factor
                if factor > _MOST_UNROLLED:
                    raise NotLinear(
                        f"a loop repeats itself after {factor} rounds only"
                    ) from None
                self.unrolled[key] = factor
            except KeyError as error:
                raise Fault(
                    "no-such-stage", f"`stage({error})` on rank {rank}", 0
                ) from None
        else:
            raise NotLinear(f"the order of rank {rank} has too many parts")
        pieces = [_piece(part, self.sites) for part in self.parts if part.ops]
        # `next` comes first, since a bare `W` takes the microbatch of an `I`.
        return with_owed(with_next(pieces, self.sites), self.sites)

    def _split(self, loop: Loop, at: Any) -> None:
        key, begin, factor = loop.key
        borders = self.splits.setdefault(key, [])
        # `at` counts rounds of this part of the loop, of which each may stand for several; the
        # border is in rounds of the loop as it is written.
        border = begin + factor * at
        place = 0
        while place < len(borders) and borders[place] < border:
            place += 1
        borders.insert(place, border)

    def op(self, call: tuple[Any, ...]) -> None:
        """Record a call of an op: its location, stage and microbatch, and its slice if it has
        one.
        """
        location, stage, microbatch, *of_slice = call
        if any(isinstance(number, Linear) for number in (stage, *of_slice)):
            raise NotLinear("a stage or a slice depends on `microbatches`", location)
        self.budget.spend(1)
        site = self.sites.ops[location]
        if stage is None and len(self.held) == 1:
            stage = self.held[0]
        if stage is None and not (site.is_bare and site.word == "W"):
            message = f"`{site.word}` does not say which stage"
            raise Fault("which-stage", message, location)
        if stage is not None and stage not in self.held:
            message = f"`{site.word}` of a stage of another rank"
            raise Fault("not-on-this-rank", message, location)
        if microbatch is not None:
            microbatch = self._unit(microbatch, of_slice, location)
        op = Op(self.sites.kinds[location], stage, microbatch, location)
        self.parts[-1].ops.append(op)

    def _unit(self, microbatch: Any, of_slice: Sequence[Any], location: int) -> Affine:
        """The number of a microbatch, or of its slice."""
        word = self.sites.ops[location].word
        slices = self.params.get("slices", 1)
        for number in of_slice:
            if number is None or not 0 <= number < slices:
                raise Fault("no-such-slice", f"`{word}` of slice {number}", location)
            microbatch = microbatch * slices + number
        parts = linear(microbatch).parts
        if not all(isinstance(part, int) for part in parts):
            raise NotLinear(f"`{word}` of a microbatch that is no whole number")
        return parts

    def claim(self, location: int, values: dict[str, Any]) -> None:
        """Record a claim; it must not stand in a loop over microbatches."""
        if self.is_within:
            raise NotLinear(
                "an `assert` stands within a loop over microbatches", location
            )
        super().claim(location, values)

    def count(self, start: Any, stop: Any, weight: int, location: int) -> Any:
        """The rounds of a loop."""
        if self.rank is None:
            # Before the order, nothing repeats a number of times that depends on n.
            if isinstance(start, Linear) or isinstance(stop, Linear):
                raise NotLinear("the stages depend on `microbatches`")
            return super().count(start, stop, weight, location)
        return self._rounds(start, stop, location)

    def _rounds(self, start: Any, stop: Any, location: int) -> Iterator[Any]:
        total = stop - start
        if total < 0:
            return
        if not isinstance(total, Linear):
            yield from self._one_by_one(start, total, location)
            return
        if self.is_within:
            raise NotLinear(
                "a loop over microbatches stands within another one", location
            )
        # A loop is split independently in each round of the loops around it.
        key = (location, tuple(self.path))
        for begin, end in pairwise([0, *self.splits.get(key, ()), total]):
            length = end - begin
            if isinstance(length, Linear):
                yield from self._all_at_once(start, begin, length, key)
            else:
                yield from self._one_by_one(start + begin, length, location)

    def by_steps(
        self,
        start: Any,
        stop: Any,
        weight: int,
        location: int,
        step: Any,
        step_location: int,
    ) -> Any:
        """The numbers of a range with a step."""
        if isinstance(step, Linear):
            raise NotLinear(
                "the step of a range depends on `microbatches`", step_location
            )
        first, rounds = steps_of(start, stop, step, step_location)
        for number in self.count(0, rounds, weight, location):
            yield first + step * number

    def _one_by_one(self, start: Any, rounds: int, location: int) -> Iterator[Any]:
        for number in range(rounds):
            value = start + number
            self.path.append((location, str(value)))
            yield value
            self.path.pop()

    def _all_at_once(
        self, start: Any, begin: Any, length: Linear, key: Any
    ) -> Iterator[Any]:
        """One symbolic round for a number of rounds that grows with n; then the rounds that are
        left over.
        """
        factor = self.unrolled.get(key, 1)
        if length.by_n % factor:
            raise NeedsPeriod(factor // gcd(int(length.by_n), factor))
        # The rounds that are left over run one by one at the end.
        left = int(length.constant) % factor
        rounds = (length - left) // factor
        if rounds.constant < 1:
            holds_from(ceil(Fraction(1 - rounds.constant, rounds.by_n)))
        loop = Loop(rounds, (key, begin, factor))
        self.parts.append(Part(linear(rounds).parts, []))
        self.is_within = True
        # The symbolic round, as a number.
        round_number = Linear(0, 0, 1, loop)
        for number in range(factor):
            self.path.append((key, number))
            yield start + begin + round_number * factor + number
            self.path.pop()
        self.is_within = False
        # Calls after the loop belong to another part.
        self.parts.append(Part(ONCE, []))
        yield from self._one_by_one(start + begin + (length - left), left, key[0])


def divide(left: Any, right: Any, location: int) -> Any:
    """`left / right` in a program with decimals."""
    if isinstance(right, Linear):
        result: Any = left // right
        return result
    if right == 0:
        return quotient(1, 0, location)
    parts = left.parts if isinstance(left, Linear) else (left,)
    if all(isinstance(part, int) for part in (*parts, right)):
        return left // right
    return left * (1 / Fraction(right))


#: The functions of the program's Python for numbers that depend on n.
ARITHMETIC = {
    "divide": divide,
    "multiply": lambda left, right, _: left * right,
    "listed": listed_for_all,
}


# Filling in what calls leave open


def _piece(part: Part, sites: Sites) -> Piece:
    """A part with its ops in batches."""
    batches: list[list[Op]] = []
    for op in part.ops:
        first = sites.batches.get(op.location)
        if first is None or op.location == first or not batches:
            batches.append([])
        batches[-1].append(op)
    return Piece(part.rounds, tuple(map(tuple, batches)))
