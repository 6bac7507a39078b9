"""What calls leave open (their stage, their microbatch) → statements."""

from __future__ import annotations

from collections.abc import Sequence

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

#: A microbatch of a stream may be of at most so many updates later.
_MOST_UPDATES_ON = 4


@define
class Calls:
    """The calls of a program on its layout: some `lines`, maybe with edges, of so many slices."""

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
        """Whether updates follow each other without a flush."""
        return bool(self.sites.parts)

    def statements(self) -> tuple[Statement, ...]:
        """The calls as statements, with all that they leave open."""
        if self.is_stream:
            for call in self.calls:
                if call.location in self.sites.unnumbered:
                    raise Unreadable(
                        "an op of a stream that names no microbatch", call.span
                    )
        # What a call leaves open is filled in from the left, since each needs what is before it:
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
        """Whether a call is a `W` of what is owed longest."""
        return call.location in self.sites.takes_oldest

    def with_stage(self, call: Call) -> list[Call]:
        """The call with its stage, which its rank must hold, by cases of it. A `W` of what its rank
        owes longest may have none yet.
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
        """The call with its microbatch: `next` counts the calls before it."""
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
        """A `W` as what it takes: of the weight gradients that its rank owes, or those of its
        stage, the first.
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
        # The first one that is owed is the one of the count, if that is how they became owed.
        if call.stage is not None and all(
            self.is_in_turn(other, owing) for other in owing
        ):
            return [evolve(call, microbatch=taken)]
        result = []
        for other in owing:
            # Both may be in the same loop, in different rounds: so the other one's symbols get
            # names of their own. The rank is one.
            names = {name: f"{name}_" for name in other.indices if name != RANK}
            assert other.stage is not None
            assert other.microbatch is not None
            # The n-th `W` takes what the n-th `I` has left: the pair whose counts of calls before
            # are the same.
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
                    # The same as what is left of `both`, in isl's plainest words.
                    where=taken_by.domain(),
                    stage=_through(both, own, stage),
                    microbatch=taken_by,
                )
            )
        return result

    def is_in_turn(self, call: Call, calls: Sequence[Call]) -> bool:
        """Whether a call's microbatch is how many of some calls come before it."""
        assert call.microbatch is not None
        count = self.counted(call, calls)
        return bool((call.where - same(call.microbatch, count, call.where)).is_empty())

    def counted(self, call: Call, others: Sequence[Call]) -> Number:
        """How many of some calls stand before one on its rank: for its stage, if it has one."""
        total = of_number(0)
        for other in others:
            counted = how_many_before(
                Many(call.where, call.indices, call.order, call.stage),
                Many(other.where, other.indices, other.order, other.stage),
            )
            if counted is None:
                raise Unreadable(
                    "`next` cannot be counted through these loops", call.span
                )
            total = total.plus(counted)
        total = total.within(call.where)
        return Number(simplified(total.low), total.high)

    def reaching(self, call: Call, where: isl.Set) -> isl.Set:
        """Where a transfer has another rank to reach; elsewhere it becomes nothing."""
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
        """The statements of a call: one for each case of its stage and microbatch."""
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
        """A microbatch as it is among units."""
        if self.in_base:
            high, low = digits(microbatch, where)
            return simplified(high), simplified(low)
        return number(0), plain(microbatch, where)

    def of_line(
        self, call: Call, line: Line, where: isl.Set, update: isl.PwAff
    ) -> list[tuple[isl.Set, isl.PwAff, Number]]:
        """A call for stages of one pipeline, by cases of its update: the microbatch in that."""
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
            # Of as many microbatches for all sizes, the number of updates on is a quotient.
            whole = floor_by(plain(microbatch, rest), count)
            later = update.add(whole)
            there = rest & later.lt_set(symbol(UPDATES))
            return [(there, later, microbatch.minus(Number(whole).times(count)))]
        cases = []
        # A microbatch beyond those of its update is one of the next update, or of one later still.
        for on in range(_MOST_UPDATES_ON):
            low = line.microbatches.times(on)
            case = are_between(low, microbatch, low.plus(line.microbatches), rest)
            rest = rest - case
            later = update.add(number(on))
            # Of updates that do not come, the drain leaves ops out.
            case = case & later.lt_set(symbol(UPDATES))
            cases.append((case, later, microbatch.minus(low)))
        if not rest.is_empty():
            raise Unreadable("a microbatch of an update that may be far on", call.span)
        return cases


def _through(where: isl.Set, names: Sequence[str], function: isl.PwAff) -> isl.PwAff:
    """A function of some symbols as one of others, by a condition that says what they are then."""
    values = without(where & symbol("_value").eq_set(function), names)
    return isl.PwMultiAff.from_set(points(values, ["_value"])).get_pw_aff(0).coalesce()


def _cases(where: isl.Set, functions: Sequence[isl.PwAff]) -> list[isl.Set]:
    """A condition cut into cases, in each of which some functions are one affine function."""
    cases = [where]
    for function in functions:
        pieces = [
            piece
            for piece, _ in function.intersect_domain(where).coalesce().get_pieces()
        ]
        if len(pieces) > 1:
            cases = [case & piece for case in cases for piece in pieces]
    return [case.coalesce() for case in cases if not case.is_empty()]
