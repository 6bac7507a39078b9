"""The order of ranks → calls of ops: where each runs, what it says of its stage and microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import islpy as isl
from attrs import define, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.sets.counting import RANK, Order
from schedlang.extras.prove.sets.evaluator import Evaluator, Scope
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
from schedlang.extras.prove.sets.statements import UPDATE, UPDATES, Claim
from schedlang.language import expressions, syntax
from schedlang.language.arithmetic import steps_of
from schedlang.language.sites import CallSite, Sites
from schedlang.schedule.actions import is_background, is_collective, is_update
from schedlang.schedule.kinds import Kind

#: A loop of at most so many rounds, whatever the sizes, is read round by round.
_FEW_ROUNDS = 16


@frozen(eq=False)
class Call:
    """An op where it is read: what it leaves open is None."""

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
class _Place:
    """Where in the order the reader stands: the entries before, and how many statements came."""

    before: Order = ()
    indices: tuple[str, ...] = (RANK,)
    count: int = 0

    def next(self) -> Order:
        """The order of the next statement here."""
        self.count += 1
        return (*self.before, self.count - 1)


@define
class Orders:
    """Reads the order of ranks, of which there are `ranks`; the program's own `require` may leave
    less of the sizes `where` it is meant for.
    """

    sites: Sites
    at: dict[Span, int]
    evaluator: Evaluator
    where: isl.Set
    ranks: isl.PwAff
    calls: list[Call] = field(factory=list)
    claims: list[Claim] = field(factory=list)
    batches: int = 0
    rounds: int = 0

    def read(self, order: syntax.Rank, scope: Scope) -> None:
        """Read what ranks do."""
        scope = scope.inner()
        scope.values[order.name.text] = of_symbol(RANK)
        where = self.where & between(number(0), symbol(RANK), self.ranks)
        self.block(order.body, scope, where, _Place())
        if self.sites.parts and "steady" not in self.sites.parts:
            raise Unreadable("there is no `steady`", order.span)

    def new_loop(self) -> str:
        """The symbol of a loop."""
        self.rounds += 1
        return f"_i{self.rounds}"

    def block(
        self, block: syntax.Block, scope: Scope, where: isl.Set, place: _Place
    ) -> None:
        """Read a block where a condition holds; what it brings into scope ends with it."""
        scope = scope.inner()
        for statement in block.statements:
            self.statement(statement, scope, where, place)

    def statement(
        self, node: syntax.Node, scope: Scope, where: isl.Set, place: _Place
    ) -> None:
        """Read one statement."""
        match node:
            case syntax.Let():
                self.evaluator.bind(node, scope, where)
            case syntax.Fn(name):
                scope.functions[name.text] = (node, scope)
            case syntax.Require(condition):
                holds = self.evaluator.truth(condition, scope, where)
                refused = without(where - holds, place.indices)
                self.where = self.where - refused
            case syntax.For(name, range, step, body):
                start = self.evaluator.value(range.start, scope, where)
                stop = self.evaluator.value(range.stop, scope, where)
                by = 1 if step is None else self.step(step, scope, where)
                self.loop(name.text, start, stop, body, scope, where, place, by)
            case syntax.Repeat(times, body):
                rounds = self.evaluator.value(times, scope, where)
                negative = under(rounds, of_number(0), where)
                self.evaluator.mistaken("`repeat` counts down", negative)
                self.loop("", of_number(0), rounds, body, scope, where, place)
            case syntax.If(condition, then, otherwise):
                holds = self.evaluator.truth(condition, scope, where)
                self.block(then, scope, holds, place)
                if isinstance(otherwise, syntax.If):
                    self.statement(otherwise, scope, where - holds, place)
                elif otherwise is not None:
                    self.block(otherwise, scope, where - holds, place)
            case syntax.Run(name, args):
                sequence, around = scope.sequences[name.text]
                inside = around.inner()
                for param, arg in zip(sequence.params, args, strict=True):
                    inside.values[param.text] = self.evaluator.value(arg, scope, where)
                self.block(
                    sequence.body, inside, where, _Place(place.next(), place.indices)
                )
            case syntax.Part(name, body):
                self.part(name, body, scope, where, place)
            case syntax.Exchange(parts) | syntax.Overlap(parts):
                self.batches += 1
                order = place.next()
                for part in parts:
                    self.op(part, scope, where, place, order, self.batches)
            case syntax.Op() | syntax.Transfer():
                self.op(node, scope, where, place, place.next(), 0)
            case syntax.Assert(condition, for_all):
                if for_all:
                    self.claims.append(Claim(condition, scope, where))
            case _:
                raise Unreadable("this cannot be read", node.span)

    def part(
        self, name: str, body: syntax.Block, scope: Scope, where: isl.Set, place: _Place
    ) -> None:
        """Read `warmup`, or `steady`, which is done for each update."""
        if name == "warmup":
            self.block(body, scope, where, _Place((0,), place.indices))
            return
        within = where & between(number(0), symbol(UPDATE), symbol(UPDATES))
        self.block(body, scope, within, _Place((1, UPDATE), (*place.indices, UPDATE)))

    def step(self, node: syntax.Node, scope: Scope, where: isl.Set) -> int:
        """The step of a range, which must be the same wherever the loop runs."""
        step = known(self.evaluator.value(node, scope, where), where)
        if step is None:
            raise Unreadable("a range by a step that depends on sizes", node.span)
        if step == 0:
            self.evaluator.mistaken("a range by steps of 0", where)
        return step or 1

    def loop(
        self,
        name: str,
        start: Number,
        stop: Number,
        body: syntax.Block,
        scope: Scope,
        where: isl.Set,
        place: _Place,
        step: int = 1,
    ) -> None:
        """Read a loop: few rounds one by one, many as one statement with a symbol."""
        first = known(start, where)
        last = known(stop, where)
        if (
            name
            and first is not None
            and last is not None
            and last - first <= _FEW_ROUNDS
        ):
            begin, rounds = steps_of(first, last, step, 0)
            for round in range(begin, begin + step * max(rounds, 0), step):
                inside = scope.inner()
                inside.values[name] = of_number(round)
                order = place.next()
                self.block(body, inside, where, _Place(order, place.indices))
            return
        index = self.new_loop()
        inside = scope.inner()
        start = folded(start, where)
        stop = folded(stop, where)
        entries = place.next()
        if start.high is None and stop.high is None:
            at = of_symbol(index)
            if step != 1:
                # The symbol counts the rounds from 0: what is later must be larger, also where a
                # range is gone through from its last number down.
                where = where & symbol(index).ge_set(number(0))
                at = (start if step > 0 else stop.minus(of_number(1))).plus(
                    at.times(step)
                )
            if name:
                inside.values[name] = at
            within = are_between(start, at, stop, where)
            self.block(
                body, inside, within, _Place((*entries, index), (*place.indices, index))
            )
            return
        if step != 1:
            raise Unreadable("a range by a step, up to a product of sizes", body.span)
        # A loop up to a product of sizes, with its rounds in rows of `ranks`, by two symbols:
        #
        #     for i in 0 .. microbatches        i = high * ranks + low
        #     ranks = 4      0  1  2  3         high 0
        #                    4  5  6            high 1        microbatches = 7
        high = row_of(index)
        where = where & between(number(0), symbol(index), symbol(BASE))

        def calls(value: Number, order: Order, rounds: isl.Set) -> list[Call]:
            if name:
                inside.values[name] = value
            begin = len(self.calls)
            self.block(
                body, inside, rounds, _Place(order, (*place.indices, high, index))
            )
            made = self.calls[begin:]
            del self.calls[begin:]
            return made

        value = Number(symbol(index), symbol(high))
        within = are_between(start, value, stop, where)
        for call in calls(value, (*entries, high, index), within):
            # Rows are best counted from the first round that does something: they are whole then.
            begin = (
                points(call.where, [high, index]).lexmin_pw_multi_aff().get_pw_aff(1)
            )
            if constant(begin, call.where) == 0:
                self.calls.append(call)
                continue
            for case, function in begin.coalesce().get_pieces():
                value = Number(
                    symbol(index).add(isl.PwAff.from_aff(function)), symbol(high)
                )
                within = are_between(start, value, stop, where & case)
                again = calls(value, (*entries, *digits(value, within)), within)
                self.calls += [
                    other for other in again if other.location == call.location
                ]

    def op(
        self,
        node: syntax.Node,
        scope: Scope,
        where: isl.Set,
        place: _Place,
        order: Order,
        batch: int,
    ) -> None:
        """Read an op."""
        assert isinstance(node, syntax.Op | syntax.Transfer)
        location = self.at[node.span]
        site = self.sites.ops[location]
        kind = self.sites.kinds[location]
        if is_background(kind):
            raise Unreadable("copies to the host", node.span)
        if is_collective(kind):
            raise Unreadable("gathers, sums and hops of stages", node.span)
        if is_update(kind) and batch:
            raise Unreadable("an update that overlaps with other ops", node.span)
        args: list[Number | None] = [
            None
            if isinstance(arg, expressions.Next)
            else self.evaluator.value(arg, scope, where)
            for arg in node.args
        ]
        if where.is_empty():
            return
        slices = 1 if self.sites.has_slices else 0
        stages: Sequence[Number | None]
        if is_update(kind):
            stages = args if args else list(map(Number, self.evaluator.own_stages))
            args = [None, of_number(0), *[of_number(0)] * slices]
        else:
            missing = 2 + slices - len(args)
            args = [*[None] * missing, *args]
            stages = args[:1]
        piece = args[2] if slices else of_number(0)
        for part, stage in enumerate(stages):
            # A bare `U` is one for each stage of its rank, in order.
            part_order = (*order, part) if len(stages) > 1 else order
            there = where if stage is None else where & stage.domain()
            call = Call(
                site, location, kind, node.span, place.indices, there,
                None if stage is None else plain(stage, there), args[1],
                None if piece is None else plain(piece, there), part_order, batch,
            )  # fmt: skip
            self.calls.append(call)
