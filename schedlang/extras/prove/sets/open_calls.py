"""Fills in what calls leave open (their stage, their microbatch), and makes statements of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import islpy as isl
from attrs import define, evolve

from schedlang.extras.prove.sets.counting import RANK, Many, how_many_before, renamed
from schedlang.extras.prove.sets.counting import renamed_number as with_names
from schedlang.extras.prove.sets.evaluator import Evaluator
from schedlang.extras.prove.sets.isl_functions import (
    between,
    floor_by,
    nowhere,
    number,
    points,
    simplified,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    Number,
    Unreadable,
    digits,
    known,
    of_number,
    plain,
    same,
    under,
)
from schedlang.extras.prove.sets.numbers import (
    between as are_between,
)
from schedlang.extras.prove.sets.rank_order import Call
from schedlang.extras.prove.sets.statements import (
    STAGE,
    UPDATE,
    UPDATES,
    Line,
    Statement,
    any_of,
)
from schedlang.language.sites import Sites
from schedlang.schedule.actions import is_update
from schedlang.schedule.kinds import TRANSFERS, Kind, op_of

#: The most updates by which a microbatch of a program without a flush may be ahead.
_MOST_UPDATES_ON = 4


@define
class Calls:
    """The calls of a program, and its layout: the pipelines in `lines`, whether there are edges or
    skips, and the number of slices.
    """

    sites: Sites
    evaluator: Evaluator
    lines: Sequence[Line]
    has_edges: bool
    slices: isl.PwAff
    in_base: bool
    where: isl.Set
    calls: list[Call]

    @property
    def is_stream(self) -> bool:
        """Whether the program has no flush."""
        return bool(self.sites.parts)

    def statements(self) -> tuple[Statement, ...]:
        """The statements of all calls."""
        if self.is_stream:
            for call in self.calls:
                if call.location in self.sites.unnumbered:
                    raise Unreadable(
                        "an op of a stream that names no microbatch", call.span
                    )
        # The open parts are filled in from left to right, since each depends on the ones before it:
        #
        #     call        F(next)      W               of two stages on each rank
        #     stage       0, r         what is owed    `next` counts calls of the same stage
        #     microbatch  the count    what is owed    after all `I` have theirs
        #     unit        update, digits, slice        as cases, in each of which these are affine
        self.calls = [part for call in self.calls for part in self.with_stage(call)]
        numbered = [
            call if self.is_owed(call) else self.with_microbatch(call)
            for call in self.calls
        ]
        calls: list[Call] = []
        for call in numbered:
            calls += self.owed(call, numbered) if self.is_owed(call) else [call]
        statements: list[Statement] = []
        for call in calls:
            for statement in self.with_units(call):
                statements.append(evolve(statement, number=len(statements)))
        if any(call.kind in TRANSFERS for call in calls):
            written = [
                without(call.where, call.indices)
                for call in calls
                if call.kind in TRANSFERS
            ]
            silent = self.where - any_of(written)
            if not silent.is_empty():
                raise Unreadable("transfers that are written at some sizes only")
        return tuple(statements)

    def is_owed(self, call: Call) -> bool:
        """Whether a call is a `W` that takes the weight gradient that is owed longest."""
        return call.location in self.sites.takes_oldest

    def with_stage(self, call: Call) -> list[Call]:
        """The call with its stage, as cases in each of which the stage is affine. Its rank must
        hold the stage. A `W` that takes what its rank owes may have no stage yet.
        """
        own = self.evaluator.own_stages
        stage = call.stage
        if stage is None:
            if self.is_owed(call) and len(own) > 1:
                return [call]
            stage = own[0]
            if len(own) > 1:
                several = call.where & own[1].domain()
                what = f"`{call.site.word}` does not say which stage"
                self.evaluator.mistaken(what, several)
        held = any_of([line.holds() for line in self.lines])
        of_call = call.where & symbol(STAGE).eq_set(stage)
        wrong = without(of_call - held, [STAGE])
        what = f"`{call.site.word}` of a stage that its rank does not hold"
        self.evaluator.mistaken(what, wrong)
        where = call.where - wrong
        return [
            evolve(call, stage=stage, where=case) for case in _cases(where, [stage])
        ]

    def with_microbatch(self, call: Call) -> Call:
        """The call with its microbatch: `next` is the number of calls before it."""
        sites = self.sites
        if call.microbatch is not None:
            return call
        if sites.has_slices and call.slice is None:
            raise Unreadable("`next` in a program with slices", call.span)
        if sites.is_mixed:
            raise Unreadable("`next` beside ops that name their microbatch", call.span)
        word = sites.counted_as[call.location]
        alike = [
            other for other in self.calls if sites.counted_as[other.location] == word
        ]
        return evolve(call, microbatch=self.counted(call, alike))

    def owed(self, call: Call, calls: Sequence[Call]) -> list[Call]:
        """The cases of a `W`: it takes the first weight gradient that its rank owes, or its
        stage.
        """
        if self.sites.has_slices and call.slice is None:
            raise Unreadable("`next` in a program with slices", call.span)
        weights = [other for other in self.calls if other.kind == Kind.W]
        if any(other.location not in self.sites.takes_oldest for other in weights):
            raise Unreadable("`W` with and without a microbatch", call.span)
        if any((other.stage is None) != (call.stage is None) for other in weights):
            raise Unreadable("`W` with and without a stage", call.span)
        owing = [other for other in calls if op_of(other.kind).owes]
        taken = self.counted(call, weights)
        owed = self.counted(call, owing)
        nothing = call.where - under(taken, owed, call.where)
        self.evaluator.mistaken("`W`, but nothing is owed", nothing)
        call = evolve(call, where=call.where - nothing)
        # If gradients become owed in the order of their microbatches, the count is the microbatch.
        if call.stage is not None and all(
            self.is_in_turn(other, owing) for other in owing
        ):
            return [evolve(call, microbatch=taken)]
        result = []
        for other in owing:
            # Both may be in different rounds of one loop, so rename the symbols of the other one;
            # they share the rank.
            names = {name: f"{name}_" for name in other.indices if name != RANK}
            assert other.stage is not None
            assert other.microbatch is not None
            # The n-th `W` takes what the n-th `I` has left: the pairs with equal counts of calls
            # before them.
            before = self.counted(
                evolve(other, stage=call.stage and other.stage), owing
            )
            both = call.where & renamed(other.where, names)
            both = same(taken, with_names(before, names), both)
            stage = with_names(Number(other.stage), names).low
            if call.stage is not None:
                both = both & stage.eq_set(call.stage)
            if both.is_empty():
                continue
            own = list(names.values())
            microbatch = with_names(other.microbatch, names)
            high = (
                None
                if microbatch.high is None
                else _through(both, own, microbatch.high)
            )
            taken_by = Number(_through(both, own, microbatch.low), high)
            result.append(
                evolve(
                    call,
                    # This equals the projection of `both`, in a simpler form of isl's.
                    where=taken_by.domain(),
                    stage=_through(both, own, stage),
                    microbatch=taken_by,
                )
            )
        return result

    def is_in_turn(self, call: Call, calls: Sequence[Call]) -> bool:
        """Whether the microbatch of a call is the number of the given calls before it."""
        assert call.microbatch is not None
        count = self.counted(call, calls)
        return bool((call.where - same(call.microbatch, count, call.where)).is_empty())

    def counted(self, call: Call, others: Sequence[Call]) -> Number:
        """How many of the given calls precede a call on its rank, of the same stage if both have
        one.
        """
        own, *alike = (
            Many(each.where, each.indices, each.order, each.stage)
            for each in (call, *others)
        )
        try:
            counted = [how_many_before(own, other) for other in alike]
        except Unreadable:
            what = "`next` cannot be counted through these loops"
            raise Unreadable(what, call.span) from None
        total = reduce(Number.plus, counted, of_number(0)).within(call.where)
        return Number(simplified(total.low), total.high)

    def reaching(self, call: Call, where: isl.Set) -> isl.Set:
        """Where the other side of a transfer is on another rank; elsewhere the transfer is left
        out.
        """
        if self.has_edges or self.is_stream:
            raise Unreadable(
                "transfers of its own, beside edges or without a flush", call.span
            )
        assert call.stage is not None
        reached = nowhere()
        for line in self.lines:
            other = call.stage.add(number(TRANSFERS[call.kind].distance))
            end = line.first.add(line.stages)
            both = between(line.first, call.stage, end) & between(
                line.first, other, end
            )
            rank = renamed(line.holds(), {RANK: "_rank"}) & symbol(STAGE).eq_set(other)
            away = both & rank & symbol("_rank").ne_set(symbol(RANK))
            reached = reached | without(away, [STAGE, "_rank"])
        return where & reached

    def with_units(self, call: Call) -> list[Statement]:
        """The statements of a call: cases of its stage and microbatch in each of which both are
        affine.
        """
        assert call.stage is not None
        assert call.microbatch is not None
        where = call.where
        slice = call.slice if call.slice is not None else number(0)
        if self.sites.has_slices and not is_update(call.kind):
            right = between(number(0), slice, self.slices)
            what = f"`{call.site.word}` of a slice that there is not"
            self.evaluator.mistaken(what, where - right)
            where = where & right
        update = symbol(UPDATE) if UPDATE in call.indices else number(0)
        cases: list[tuple[isl.Set, isl.PwAff, Number]] = []
        if is_update(call.kind):
            cases.append((where, update, of_number(0)))
            where = nowhere()
        for line in self.lines:
            here = where & between(line.first, call.stage, line.first.add(line.stages))
            if not here.is_empty():
                cases += self.of_line(call, line, here, update)
        statements = []
        for there, of_update, microbatch in cases:
            if there.is_empty():
                continue
            group, index = self.digits(microbatch, there)
            for case in _cases(there, [call.stage, group, index, slice]):
                statements.append(
                    Statement(
                        0, call.kind, call.span, call.indices, case,
                        call.stage, (of_update, group, index, slice), call.order, call.batch,
                    )
                )  # fmt: skip
        return statements

    def digits(self, microbatch: Number, where: isl.Set) -> tuple[isl.PwAff, isl.PwAff]:
        """The two digits of a microbatch; without a base, 0 and the microbatch."""
        if self.in_base:
            high, low = digits(microbatch, where)
            return simplified(high), simplified(low)
        return number(0), plain(microbatch, where)

    def of_line(
        self, call: Call, line: Line, where: isl.Set, update: isl.PwAff
    ) -> list[tuple[isl.Set, isl.PwAff, Number]]:
        """For a call of a stage of this pipeline: the cases of its update, with the microbatch in
        that.
        """
        assert call.microbatch is not None
        microbatch = call.microbatch
        what = f"`{call.site.word}` of a microbatch that there is not"
        if not self.is_stream:
            right = are_between(of_number(0), microbatch, line.microbatches, where)
            self.evaluator.mistaken(what, where - right)
            if call.kind in TRANSFERS:
                right = self.reaching(call, right)
            return [(right, update, microbatch)]
        negative = under(microbatch, of_number(0), where)
        self.evaluator.mistaken(what, negative)
        rest = where - negative
        count = known(line.microbatches, where)
        if count is not None:
            # If the number of microbatches is constant, the number of updates ahead is a quotient.
            whole = floor_by(plain(microbatch, rest), count)
            later = update.add(whole)
            there = rest & later.lt_set(symbol(UPDATES))
            return [(there, later, microbatch.minus(Number(whole).times(count)))]
        cases = []
        # A microbatch beyond those of its update belongs to the next update, or to a later one.
        for on in range(_MOST_UPDATES_ON):
            low = line.microbatches.times(on)
            case = are_between(low, microbatch, low.plus(line.microbatches), rest)
            rest = rest - case
            later = update.add(number(on))
            # Ops of updates after the last one are left out.
            case = case & later.lt_set(symbol(UPDATES))
            cases.append((case, later, microbatch.minus(low)))
        if not rest.is_empty():
            raise Unreadable("a microbatch of an update that may be far on", call.span)
        return cases


def _through(where: isl.Set, names: Sequence[str], function: isl.PwAff) -> isl.PwAff:
    """A function of some symbols as a function of the others, where a condition determines these
    symbols.
    """
    values = without(where & symbol("_value").eq_set(function), names)
    return isl.PwMultiAff.from_set(points(values, ["_value"])).get_pw_aff(0).coalesce()


def _cases(where: isl.Set, functions: Sequence[isl.PwAff]) -> list[isl.Set]:
    """A condition, cut into cases in each of which all of some functions are one affine
    function.
    """
    cases = [where]
    for function in functions:
        pieces = [
            piece
            for piece, _ in function.intersect_domain(where).coalesce().get_pieces()
        ]
        if len(pieces) > 1:
            cases = [case & piece for case in cases for piece in pieces]
    return [case.coalesce() for case in cases if not case.is_empty()]
