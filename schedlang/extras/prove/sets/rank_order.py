"""The order of ranks with symbolic sizes: the calls of ops, with the conditions under which each is
made. The `rank` block of the program runs once, for the symbol of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import islpy as isl
from attrs import define, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.check_sets import NEEDS
from schedlang.extras.prove.sets.counting import RANK, Order
from schedlang.extras.prove.sets.declared import Declared
from schedlang.extras.prove.sets.evaluator import Evaluator, Symbolic
from schedlang.extras.prove.sets.isl_functions import (
    between,
    constant,
    number,
    points,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    BASE,
    Number,
    Unreadable,
    digits,
    folded,
    known,
    of_number,
    of_symbol,
    plain,
    row_of,
    under,
)
from schedlang.extras.prove.sets.numbers import between as are_between
from schedlang.extras.prove.sets.statements import UPDATE, UPDATES
from schedlang.language import syntax
from schedlang.language.arithmetic import steps_of
from schedlang.language.sites import CallSite, Sites
from schedlang.schedule.actions import is_collective, is_copy, is_update
from schedlang.schedule.kinds import TRANSFERS, Kind

#: The kinds of which the checker of certificates knows what they need.
_CHECKED = {*TRANSFERS, *(Kind[name] for names, *_ in NEEDS for name in names)}
#: A loop of at most this many rounds, the same at all sizes, is read round by round.
_FEW_ROUNDS = 16


@frozen(eq=False)
class Call:
    """A call of an op; what it leaves open is None."""

    site: CallSite
    location: int
    kind: Kind
    span: Span
    indices: tuple[str, ...]
    where: isl.Set
    stage: isl.PwAff | None
    microbatch: Number | None
    slice: isl.PwAff | None
    order: Order
    batch: int


@define
class _Block:
    """A block that runs: the order vector of the block, the symbols of the loops around it, and how
    many of its statements have run.
    """

    order: Order = ()
    indices: tuple[str, ...] = (RANK,)
    count: int = 0

    def next(self) -> Order:
        """The order vector of the next statement."""
        self.count += 1
        return (*self.order, self.count - 1)


@define
class Orders:
    """Runs the `rank` block of a program. Its own `require` may leave less of the `domain`."""

    declared: Declared
    domain: isl.Set
    calls: list[Call] = field(factory=list)
    _block: _Block = field(factory=_Block)
    #: The order vector of the exchange or overlap that runs, and how many there were.
    _batch: Order = ()
    _batches: int = 0
    _loops: int = 0

    @property
    def evaluator(self) -> Evaluator:
        """What evaluates the program's arithmetic."""
        return self.declared.evaluator

    @property
    def sites(self) -> Sites:
        """The ops and claims of the program."""
        return self.declared.sites

    def read(self, order: syntax.Rank) -> None:
        """Run the block."""
        names = self.declared.names
        names |= {
            "count": lambda start, stop, _, at: self.loop(start, stop, at),
            "by_steps": self.by_steps,
            "repeat": self.repeat,
            "part": self.part,
            "require": self.require,
            "claim": self.claim,
        }
        ranks = self.declared.count_of("ranks")
        held = [
            Symbolic(self.evaluator, Number(of)) for of in self.evaluator.own_stages
        ]
        rank = Symbolic(self.evaluator, of_symbol(RANK))
        where = self.domain & between(number(0), symbol(RANK), ranks)
        with self.evaluator.within(where):
            names["program"](rank, self.op, held, None)
        if self.sites.parts and "steady" not in self.sites.parts:
            raise Unreadable("there is no `steady`", order.span)

    @contextmanager
    def within(
        self, where: isl.Set, order: Order, indices: tuple[str, ...]
    ) -> Iterator[None]:
        """Run a block under a condition."""
        outside = self._block
        self._block = _Block(order, indices)
        with self.evaluator.within(where):
            yield
        self._block = outside

    def require(self, holds: Any, _: str | None, __: int) -> None:
        """Refuse the sizes at which a requirement fails on some rank, in some round."""
        where = self.evaluator.where
        failing = where - self.evaluator.truth(holds)
        self.domain = self.domain - without(failing, self._block.indices)

    def claim(self, location: int, values: dict[str, Any]) -> None:
        """Keep a claim `for all` sizes."""
        self.declared.claim_where(location, values, self.evaluator.where)

    def part(self, name: str) -> Iterator[None]:
        """Run `warmup`, or `steady`, which is done for each update."""
        where = self.evaluator.where
        indices = self._block.indices
        if name == "warmup":
            with self.within(where, (0,), indices):
                yield
            return
        where = where & between(number(0), symbol(UPDATE), symbol(UPDATES))
        with self.within(where, (1, UPDATE), (*indices, UPDATE)):
            yield

    # Loops

    def repeat(self, rounds: Any, _: int, location: int) -> Iterator[Any]:
        """The rounds of a `repeat`."""
        where = self.evaluator.where
        negative = under(self.evaluator.number(rounds), of_number(0), where)
        self.evaluator.mistaken("`repeat` counts down", negative)
        return self.loop(0, rounds, location, is_named=False)

    def by_steps(
        self, start: Any, stop: Any, _: int, location: int, step: Any, at: int
    ) -> Iterator[Any]:
        """The numbers of a range with a step, which must be the same at all sizes."""
        by = known(self.evaluator.number(step), self.evaluator.where)
        if by is None:
            what = "a range by a step that depends on sizes"
            raise Unreadable(what, self.evaluator.span(at))
        if by == 0:
            self.evaluator.mistaken("a range by steps of 0", self.evaluator.where)
        return self.loop(start, stop, location, by or 1)

    def loop(
        self, start: Any, stop: Any, location: int, step: int = 1, is_named: bool = True
    ) -> Iterator[Any]:
        """The numbers of a loop: few ones one by one, many as one symbol."""
        where = self.evaluator.where
        begin, end = (self.evaluator.number(value) for value in (start, stop))
        first, last = (known(value, where) for value in (begin, end))
        order = self._block.next()
        indices = self._block.indices
        if (
            is_named
            and first is not None
            and last is not None
            and last - first <= _FEW_ROUNDS
        ):
            lowest, rounds = steps_of(first, last, step, 0)
            for value in range(lowest, lowest + step * max(rounds, 0), step):
                with self.within(where, order, indices):
                    yield value
                order = self._block.next()
            return
        self._loops += 1
        index = f"_i{self._loops}"
        begin, end = (folded(value, where) for value in (begin, end))
        if begin.high is not None or end.high is not None:
            if step != 1:
                what = "a range by a step, up to a product of sizes"
                raise Unreadable(what, self.evaluator.span(location))
            yield from self._by_rows(begin, end, index, order)
            return
        at = of_symbol(index)
        if step != 1:
            # The symbol counts rounds from 0, so that it grows also where the range counts down.
            where = where & symbol(index).ge_set(number(0))
            lowest = begin if step > 0 else end.minus(of_number(1))
            at = lowest.plus(at.times(step))
        rounds = are_between(begin, at, end, where)
        with self.within(rounds, (*order, index), (*indices, index)):
            yield Symbolic(self.evaluator, at)

    def _by_rows(
        self, start: Number, stop: Number, index: str, order: Order
    ) -> Iterator[Any]:
        """The number of a loop up to a product of sizes, as two symbols."""
        # The rounds form rows of `ranks`:
        #
        #     for i in 0 .. microbatches        i = high * ranks + low
        #     ranks = 4      0  1  2  3         high 0
        #                    4  5  6            high 1        microbatches = 7
        high = row_of(index)
        indices = (*self._block.indices, high, index)
        where = self.evaluator.where & between(number(0), symbol(index), symbol(BASE))
        value = Number(symbol(index), symbol(high))
        within = are_between(start, value, stop, where)
        begin = len(self.calls)
        with self.within(within, (*order, high, index), indices):
            yield Symbolic(self.evaluator, value)
        for call in self._taken(begin):
            # Rows are best counted from the first round that does something: they are whole then.
            first = (
                points(call.where, [high, index]).lexmin_pw_multi_aff().get_pw_aff(1)
            )
            if constant(first, call.where) == 0:
                self.calls.append(call)
                continue
            # The body runs once more for each case of that round, for the sake of this call.
            for case, function in first.coalesce().get_pieces():
                low = symbol(index).add(isl.PwAff.from_aff(function))
                value = Number(low, symbol(high))
                within = are_between(start, value, stop, where & case)
                begin = len(self.calls)
                with self.within(within, (*order, *digits(value, within)), indices):
                    yield Symbolic(self.evaluator, value)
                again = self._taken(begin)
                self.calls += [of for of in again if of.location == call.location]

    def _taken(self, begin: int) -> list[Call]:
        """The calls from a number on, which are taken away."""
        taken = self.calls[begin:]
        del self.calls[begin:]
        return taken

    # Ops

    def op(self, call: tuple[Any, ...]) -> None:
        """Record a call of an op."""
        location, stage, microbatch, *slices = call
        site = self.sites.ops[location]
        kind = self.sites.kinds[location]
        span = self.evaluator.spans[location]
        if is_copy(kind):
            raise Unreadable("copies to the host", span)
        if is_collective(kind):
            raise Unreadable("gathers, sums and hops of stages", span)
        if kind not in _CHECKED:
            raise Unreadable(f"`{site.word}` cannot be read for all sizes yet", span)
        if is_update(kind) and site.batch:
            raise Unreadable("an update that overlaps with other ops", span)
        if not site.batch:
            order = self._block.next()
        elif site.batch == location:
            order = self._batch = self._block.next()
            self._batches += 1
        else:
            order = self._batch
        where = self.evaluator.where
        if where.is_empty():
            return
        if isinstance(stage, Symbolic):
            where = where & stage.number.domain()
        of_slice = slices[0] if slices else 0
        numbers = [
            None if value is None else self.evaluator.number(value)
            for value in (stage, microbatch, of_slice)
        ]
        of_stage, of_slices = (
            None if value is None else plain(value, where) for value in numbers[::2]
        )
        self.calls.append(
            Call(
                site, location, kind, span, self._block.indices, where, of_stage,
                numbers[1], of_slices, order, self._batches if site.batch else 0,
            )
        )  # fmt: skip
