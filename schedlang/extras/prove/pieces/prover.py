"""Proves a program at given ranks for any number of microbatches (docs/proof.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from schedlang.compiler import NO_PARAMS, ops_of, wrong_ops
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.extras.prove.open_program import Program, program_of
from schedlang.extras.prove.pieces.computing import (
    all_trained,
    computing,
    in_use,
    only_computing,
)
from schedlang.extras.prove.pieces.coverage import check_coverage
from schedlang.extras.prove.pieces.deadlocks import check_deadlock
from schedlang.extras.prove.pieces.expansion import Budget, expand_for_all
from schedlang.extras.prove.pieces.formulas import (
    Figures,
    claim_holds,
    expression,
    figures_of,
    in_microbatches,
    named,
)
from schedlang.extras.prove.pieces.linear import (
    Affine,
    NeedsBase,
    NeedsPeriod,
    NotLinear,
    Searched,
    Undecided,
    holds_from,
    number,
    settled,
)
from schedlang.extras.prove.pieces.orders_certificate import certified
from schedlang.extras.prove.pieces.pattern import pattern_of
from schedlang.extras.prove.pieces.pieces import Orders, later
from schedlang.extras.prove.pieces.size_sets import Sizes
from schedlang.extras.prove.pieces.start_times import (
    NoStamps,
    Stamped,
    rules_of,
    stamp,
    walked,
)
from schedlang.extras.prove.pieces.streams import check_stream, part_of
from schedlang.extras.prove.pieces.written_transfers import (
    NotRepeated,
    Repeated,
    repeated,
)
from schedlang.extras.prove.result import Law, Proof, Verdict
from schedlang.language.codegen import generate
from schedlang.language.expand import check_text, expand, parameters
from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.proof import claim_figures as simulated
from schedlang.proof.presence import presence
from schedlang.proof.prove import ideal_execution
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.actions import is_transfer, is_update
from schedlang.schedule.columns import Columns, columns_of
from schedlang.schedule.schedule import Claim, Schedule
from schedlang.schedule.transports import PORTABLE

#: The number of sizes from which a pattern is derived.
_LOOKED_AT = 3
#: For orders of search passes: the number of sizes at which they are compared, the periods that are
#: tried, and the most microbatches for each rank up to which a pattern is looked for.
_SEEN = 7
_PERIODS_OF_SEARCHES = (2, 6)
_SEARCHED_PER_RANK = 12
#: How many rounds of all loops are taken as one, in the order of the attempts.
_UNROLLED = (1, 2, 3, 4, 6)
#: The largest base that is tried: a constant, and so many more for each rank.
_MOST_BASE = 200
_BASE_PER_RANK = 16
#: The most classes of microbatches by their remainder.
_MOST_CLASSES = 64

#: If nothing is proved of all sizes, those up to this many microbatches for each rank are compiled.
_LOOKED_UP_TO = 2

_REFUSED = "require"


@frozen
class Class:
    """The numbers of microbatches base + period * n. `outcome` is `proved`, `followed`, `wrong`,
    `refused` or `unknown`; the last has a reason.
    """

    base: int
    period: int
    #: How many rounds of all loops are taken as one.
    unrolled: int = 1
    outcome: str = ""
    reason: str = ""
    figures: Figures | None = None
    #: Makes the class's parts of the certificate, if it has any.
    certify: Callable[[], list[dict[str, Any]]] | None = None
    #: For a program that writes its transfers: the part that repeats, or why there is none.
    transfers: Repeated | str | None = None
    #: Whether search passes make the order.
    is_searched: bool = False
    #: The number of microbatches up to which the passes were seen to follow the pattern.
    seen: int = 0


def prove_for_all(
    source: Source | str | Path,
    params: Mapping[str, int] = NO_PARAMS,
    transports_asked: Iterable[str] = (PORTABLE,),
) -> Proof:
    """Prove a program for any number of microbatches, at given values of the other parameters.

    `source` and `params` are those of `schedlang.compile`, without `microbatches`. The verdict on
    each transport says at which numbers the program is proved, and at which it is wrong.
    CompileError for a program that cannot be read, TypeError or ValueError for wrong arguments.
    """
    return prover_of(program_of(source, params, transports_asked)).proof()


def prover_of(program: Program) -> Prover:
    """The prover of a program. CompileError, or ValueError if `microbatches` is given."""
    if "microbatches" in program.params:
        raise ValueError("`microbatches` is any: leave it out")
    smallest = {**program.params, "microbatches": 1}
    check_text(program.whole, program.tree, smallest)
    if "ranks" not in parameters(program.tree, smallest):
        # The program ends with a fault before its parameters; this raises it with its place.
        expand(program.whole, program.tree, smallest)
    return Prover(program)


@define
class _Size:
    """The result of compiling one size."""

    #: For each transport, the codes of the errors there.
    codes: Mapping[str, frozenset[str]]
    #: The figures by name, if there is no error on any transport, and a flush.
    figures: Mapping[str, Any] | None

    def on(self, transport: str) -> str:
        """The outcome on a transport: `proved`, `wrong` or `refused`."""
        codes = self.codes[transport]
        if not codes:
            return "proved"
        return (
            "refused"
            if all(of == {_REFUSED} for of in self.codes.values())
            else "wrong"
        )


@define
class Prover:
    """Proves a program, one class of its numbers of microbatches after the other."""

    program: Program
    sizes: dict[int, _Size] = field(factory=dict)
    schedules: dict[int, Schedule] = field(factory=dict)
    budget: Budget = field(factory=Budget)
    #: For each period, the multiple of it from which on a class of that period was decided.
    begins: dict[int, int] = field(factory=dict)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return parameters(
            self.program.tree, {**self.program.params, "microbatches": 1}
        )["ranks"]

    def proof(self) -> Proof:
        """Decide all classes, and compile the sizes before them one by one."""
        done: list[Class] = []
        # At first all microbatches are one class. A question about a remainder divides it:
        #
        #     1 + n   ──NeedsPeriod(2)──►   1 + 2n,  2 + 2n        each proved by itself
        waiting = [Class(1, 1)]
        count = 1
        while waiting:
            one = waiting.pop()
            # A base that one class needed is probably needed by the next one of this period too.
            base = one.base % one.period + self.begins.get(one.period, 0) * one.period
            one = evolve(one, base=max(one.base, base))
            doing(f"{self.program.name}: microbatches = {one.base} + {one.period} n")
            try:
                done.append(self.looked_at(self.judged(one)))
                self.begins[one.period] = done[-1].base // one.period
            except NeedsPeriod as needs:
                count += needs.factor - 1
                if count > _MOST_CLASSES:
                    reason = f"what it does repeats itself after {one.period * needs.factor} only"
                    done.append(evolve(one, outcome="unknown", reason=reason))
                    continue
                waiting += [
                    Class(one.base + number * one.period, one.period * needs.factor)
                    for number in range(needs.factor)
                ]
        done.sort(key=lambda one: one.base)
        return self.told(done)

    # One class

    def looked_at(self, one: Class) -> Class:
        """The class itself; if it is unknown, the class without its small sizes, which are
        compiled.
        """
        periods = -(-(_LOOKED_UP_TO * self.ranks + 1 - one.base) // one.period)
        if one.outcome != "unknown" or periods <= 0 or self.budget.is_spent:
            return one
        return evolve(one, base=one.base + periods * one.period)

    def judged(self, one: Class) -> Class:
        """The class with its outcome. Its base may grow until the proof succeeds."""
        attempt = 0
        few = -(-self.ranks // one.period)
        more = (2, few, few, 0)
        most = _MOST_BASE + _BASE_PER_RANK * self.ranks
        #: Why the orders that passes make have no pattern from this base on.
        no_pattern = ""
        while True:
            if one.base > most:
                reason = f"no pattern was found up to {one.base} microbatches"
                return evolve(one, outcome="unknown", reason=reason)
            try:
                if no_pattern:
                    one = self.later(one, no_pattern)
                return (
                    one
                    if one.outcome
                    else self.tried(one, _UNROLLED[attempt // len(more)])
                )
            except NeedsBase as needs:
                one = evolve(one, base=one.base + needs.least * one.period)
            except NoStamps as error:
                if one.is_searched:
                    no_pattern = str(error)
                    continue
                # Try larger bases first, then more rounds taken as one.
                one = evolve(
                    one, base=one.base + more[attempt % len(more)] * one.period
                )
                attempt += 1
                if attempt == len(_UNROLLED) * len(more):
                    return evolve(one, outcome="unknown", reason=str(error))
            except NeedsPeriod:
                raise
            except Searched as error:
                if one.is_searched:
                    return evolve(one, outcome="unknown", reason=str(error))
                one = evolve(one, is_searched=True)
            except NotLinear as error:
                place = (
                    "" if error.location is None else f" ({self.where(error.location)})"
                )
                return evolve(one, outcome="unknown", reason=f"{error}{place}")
            except (TypeError, ZeroDivisionError, RecursionError):
                reason = (
                    "it does with `microbatches` what is no arithmetic of this kind"
                )
                return evolve(one, outcome="unknown", reason=reason)
            except Undecided as error:
                return evolve(
                    one, outcome="unknown", reason=str(error) or "it is undecided"
                )
            except Fault as fault:
                outcome = "refused" if fault.code == _REFUSED else "wrong"
                return evolve(one, outcome=outcome, reason=fault.message)

    def later(self, one: Class, reason: str) -> Class:
        """A class of orders made by search passes that have no pattern yet: with a larger base, or
        unknown. NeedsPeriod if they have a pattern with a longer period.
        """
        for period in _PERIODS_OF_SEARCHES if one.period == 1 else ():
            longer = evolve(one, period=period)
            try:
                pattern_of([self.expanded(longer, n) for n in range(_LOOKED_AT)])
            except NoStamps:
                continue
            self.begins[period] = one.base // period
            raise NeedsPeriod(period)
        if one.base > _SEARCHED_PER_RANK * self.ranks + _SEEN:
            return evolve(one, outcome="unknown", reason=reason)
        periods = -(-max(self.ranks // 4, 2) // one.period)
        return evolve(one, base=one.base + periods * one.period)

    def tried(self, one: Class, unroll: int) -> Class:
        """Try to prove a class, with `unroll` rounds of all loops taken as one. The result is
        proved, or wrong because of a claim. Otherwise an exception says what is needed.
        """
        one = evolve(one, unrolled=unroll)
        if one.is_searched:
            return self.followed(one)
        with settled():
            expansion = expand_for_all(
                self.program.tree,
                self.program.params,
                one.base,
                one.period,
                self.budget,
                unroll,
            )
        schedules = [self.expanded(one, n) for n in range(_LOOKED_AT)]
        orders = in_use(expansion.orders, schedules[0].layout)
        claims = expansion.claims
        if expansion.sites.parts:
            return self.streamed(one, orders, expansion.sites, schedules, claims)
        return self.timed(one, orders, schedules, claims)

    def streamed(
        self,
        one: Class,
        orders: Orders,
        sites: Sites,
        schedules: list[Schedule],
        claims: Sequence[Claim],
    ) -> Class:
        """A class of a program without a flush, for any number of updates, with its claims
        checked.
        """
        parts = [part_of(orders, sites, name) for name in ("warmup", "steady")]
        streams = [schedule.stream for schedule in schedules if schedule.stream]
        _check_same(parts[0], [columns_of(stream.warmup) for stream in streams])
        _check_same(parts[1], [columns_of(stream.steady) for stream in streams])
        with settled():
            figures = check_stream(parts[0], parts[1], schedules)
            holds = [claim_holds(claim, figures, schedules[0]) for claim in claims]
        return evolve(one, outcome="proved" if all(holds) else "wrong")

    def followed(self, one: Class) -> Class:
        """A class whose orders follow a pattern at the first sizes."""
        # The first sizes give the pattern. The others must follow it, and give the start times.
        schedules = [self.expanded(one, n) for n in range(_LOOKED_AT)]
        orders = later(pattern_of(schedules), _LOOKED_AT)
        schedules += [self.expanded(one, n) for n in range(_LOOKED_AT, _SEEN)]
        begin = _LOOKED_AT
        of_sizes = (schedule.claims for schedule in schedules[begin:])
        claims = [_claim(of) for of in zip(*of_sizes, strict=True)]
        after = evolve(one, base=one.base + begin * one.period)
        judged = self.timed(after, orders, schedules[begin:], claims)
        if judged.outcome == "proved":
            return evolve(
                judged, outcome="followed", seen=one.base + (_SEEN - 1) * one.period
            )
        return evolve(
            judged, outcome="unknown", reason="a claim fails at the sizes of a pattern"
        )

    def timed(
        self,
        one: Class,
        all_orders: Orders,
        schedules: list[Schedule],
        claims: Sequence[Claim],
    ) -> Class:
        """A class with start times and figures for all n, with its claims checked."""
        writes = any(is_transfer(op.kind) for op in all_orders.ops)
        _check_same(all_orders, [schedule.columns for schedule in schedules])
        first = schedules[0]
        layout = first.layout
        with_idle = computing(all_orders, evolve(layout, frozen=()))
        orders = computing(all_orders, layout)
        if any(set(follow_weights(schedule).held) != {1} for schedule in schedules):
            raise NotLinear("it has several versions of weights")
        with settled():
            check_coverage(with_idle, layout)
            _check_collectives(schedules)
            stamped = _stamped(orders, schedules)
            figures = figures_of(stamped.timed, schedules)
            proved = [(stamped, figures, schedules)]
            if layout.frozen:
                # Transfers are placed in orders that still have the backwards of frozen stages. An
                # execution in which these take time shows that they do not deadlock.
                trained = list(map(all_trained, schedules))
                busy = _stamped(with_idle, trained)
                proved.append((busy, figures_of(busy.timed, trained), trained))
            outcome = "proved"
            for claim in claims:
                if not claim_holds(claim, figures, first):
                    outcome = "wrong"
        return evolve(
            one,
            outcome=outcome,
            figures=figures,
            certify=_certify(one, proved),
            transfers=_repeated(all_orders, schedules) if writes else None,
        )

    def expanded(self, one: Class, n: int) -> Schedule:
        """The schedule of ops at a size of a class; NotLinear if the compiler refuses it."""
        microbatches = one.base + one.period * n
        if microbatches not in self.schedules:
            # A rank runs at least a forward and a backward of each microbatch.
            self.budget.spend(2 * self.ranks * microbatches)
        try:
            return self.ops(microbatches)
        except CompileError as error:
            message = error.diagnostics[0].message
            raise NotLinear(f"at {microbatches} microbatches: {message}") from None

    def ops(self, microbatches: int) -> Schedule:
        """The schedule of ops for a number of microbatches; CompileError."""
        if microbatches not in self.schedules:
            params = {**self.program.params, "microbatches": microbatches}
            self.schedules[microbatches] = ops_of(
                self.program.whole, self.program.tree, params
            )
        return self.schedules[microbatches]

    def where(self, location: int) -> str:
        """The place of a location in the program, as `file:line`."""
        span = generate(self.program.tree, frozenset(), False).spans[location]
        return self.program.whole.where(span.start)

    # All classes

    def at(self, microbatches: int) -> _Size:
        """The result of compiling a size."""
        if microbatches not in self.sizes:
            doing(f"{self.program.name}: {microbatches} microbatches")
            self.sizes[microbatches] = self._compiled(microbatches)
            # The schedule may be large, and is not needed any more.
            self.schedules.pop(microbatches, None)
        return self.sizes[microbatches]

    def _compiled(self, microbatches: int) -> _Size:
        try:
            schedule = self.ops(microbatches)
            codes = {
                name: frozenset(diagnostic.code for diagnostic in wrong)
                for name, wrong in wrong_ops(schedule, self.program.transports).items()
            }
        except CompileError as error:
            common = frozenset(diagnostic.code for diagnostic in error.diagnostics)
            return _Size(dict.fromkeys(self.program.transports, common), None)
        if any(codes.values()) or schedule.stream:
            return _Size(codes, None)
        execution = ideal_execution(only_computing(schedule))
        assert execution
        return _Size(codes, named(simulated.Figures(execution)))

    def told(self, classes: list[Class]) -> Proof:
        """The proof that results from the classes and from the sizes before them."""
        small = sorted(
            {
                size
                for one in classes
                for size in range(
                    one.base % one.period or one.period, one.base, one.period
                )
            }
        )
        for size in small:
            if not self.budget.is_spent:
                # `spend` would end the whole proof; here only the remaining sizes stay unknown.
                self.budget.spent += 2 * self.ranks * size
                self.at(size)
        verdicts = {
            name: self.verdict(name, classes, small) for name in self.program.transports
        }
        laws = tuple(self.laws(classes, small))
        return Proof(
            self.program.name,
            self.fixed(),
            ("microbatches",),
            verdicts,
            laws,
            self.program.claims,
            argument="it follows from the text of the program" if laws else "",
            certify=partial(self.certificate, classes),
        )

    def fixed(self) -> dict[str, int]:
        """The parameters that do not depend on `microbatches`."""
        # Parameters that are the same for few and for many microbatches.
        few, many = (
            parameters(
                self.program.tree, {**self.program.params, "microbatches": microbatches}
            )
            for microbatches in (1, _MOST_BASE)
        )
        return {name: value for name, value in few.items() if many.get(name) == value}

    def certificate(self, classes: list[Class]) -> dict[str, Any] | None:
        """The certificate of all proved classes, or None. ValueError if search passes make all
        orders.
        """
        parts = []
        is_followed = False
        for one in classes:
            outcomes = {
                self.outcome_on(name, one)[0] for name in self.program.transports
            }
            is_followed |= "followed" in outcomes
            if outcomes == {"proved"} and one.certify:
                parts += one.certify()
        if is_followed and not parts:
            raise ValueError(
                "passes make its orders, which are searches: that these go on as they were seen "
                "to, nothing proves; each order is proved when it is compiled"
            )
        if not parts:
            return None
        return self.program.certificate({"classes": parts})

    def verdict(self, name: str, classes: list[Class], small: list[int]) -> Verdict:
        """The verdict on a transport."""
        words = ("proved", "followed", "wrong", "refused", "unknown")
        sets = {word: Sizes() for word in words}
        reasons = []
        for one in classes:
            outcome, reason = self.outcome_on(name, one)
            sets[outcome].progressions.append((one.base, one.period))
            if outcome == "unknown" and reason not in reasons:
                reasons.append(reason)
        for size in small:
            outcome = self.sizes[size].on(name) if size in self.sizes else "unknown"
            sets[outcome].single.add(size)
        if not reasons and any(size not in self.sizes for size in small):
            reasons.append(
                "some would take too long one by one: see `schedc check --for`"
            )
        if sets["followed"]:
            # Larger sizes that were compiled and proved are reported with the pattern.
            first = sets["followed"].least
            beyond = {size for size in sets["proved"].single if size >= first}
            sets["followed"].single |= beyond
            sets["proved"].single -= beyond
        smallest = None
        diagnostics: tuple[Diagnostic, ...] = ()
        if sets["wrong"]:
            least = sets["wrong"].least
            smallest = {**self.program.params, "microbatches": least}
            diagnostics = self.program.errors_at(smallest, name)
        return Verdict(
            **{word: of.text() for word, of in sets.items()},
            reason="; ".join(reasons),
            pattern=_pattern(classes),
            smallest=smallest,
            diagnostics=diagnostics,
        )

    def outcome_on(self, name: str, one: Class) -> tuple[str, str]:
        """The outcome of a class on a transport, and its reason."""
        if one.outcome == "unknown":
            return one.outcome, one.reason
        if one.outcome in ("proved", "followed") and one.transfers:
            return self.with_transfers(name, one)
        # The compiler must agree at the first two sizes; a proof that it contradicts is none.
        for n in range(2):
            said = self.at(one.base + n * one.period).on(name)
            if said != ("proved" if one.outcome == "followed" else one.outcome):
                what = f"at {one.base + n * one.period} microbatches the compiler says {said}"
                return "unknown", what
        return one.outcome, ""

    def with_transfers(self, name: str, one: Class) -> tuple[str, str]:
        """The outcome on a transport of a class whose program writes its transfers, and its
        reason.
        """
        if isinstance(one.transfers, str):
            return "unknown", f"it writes its own transfers, and {one.transfers}"
        assert one.transfers
        outcome = one.transfers.on(name)
        for n in range(2):
            said = self.at(one.base + n * one.period).on(name)
            if outcome not in (said, "unknown"):
                return "unknown", f"the compiler says {said} of some"
        if outcome == "proved":
            return one.outcome, ""
        return outcome, "no state was found that its ranks come back to" * (
            outcome == "unknown"
        )

    def laws(self, classes: list[Class], small: list[int]) -> Iterator[Law]:
        """The figures as formulas."""
        of_classes = [
            (one, named(one.figures))
            for one in classes
            if one.figures and one.outcome != "unknown"
        ]
        compiled = [(size, self.sizes[size]) for size in small if size in self.sizes]
        for figure in of_classes[0][1] if of_classes else ():
            pieces: dict[Affine, Sizes] = {}
            for one, figures in of_classes:
                law = in_microbatches(figures[figure], one.base, one.period)
                sizes = pieces.setdefault(law, Sizes())
                sizes.progressions.append((one.base, one.period))
            for size, of in compiled:
                for law, sizes in pieces.items():
                    # The formula also covers the small sizes whose simulation agrees with it.
                    if of.figures and law.at(size) == of.figures[figure]:
                        sizes.single.add(size)
            texts = ((sizes.text(), expression(law)) for law, sizes in pieces.items())
            yield Law(figure, tuple(texts))


def _certify(
    one: Class, proved: Sequence[tuple[Stamped, Figures, Sequence[Schedule]]]
) -> Callable[[], list[dict[str, Any]]] | None:
    """A function that makes the class's parts of the certificate: one, or two if frozen stages have
    backwards that do nothing. None if certificates do not cover the program.
    """
    stamped, _, schedules = proved[0]
    has_updates = any(is_update(op.kind) for op in stamped.orders.ops)
    costs = schedules[0].costs
    if has_updates or costs.overlap_times or costs.components:
        return None
    return lambda: [
        certified(one.base, one.period, one.unrolled, *each, is_idle=bool(number))
        for number, each in enumerate(proved)
    ]


def _pattern(classes: list[Class]) -> str:
    """The condition under which search passes follow their pattern, as text."""
    seen = [one.seen for one in classes if one.seen]
    if not seen:
        return ""
    return f"if its passes go on as they were seen to up to microbatches == {min(seen)}"


def _claim(claims: tuple[Claim, ...]) -> Claim:
    """The claim for all n, from the claims at n = 0, 1, …; NotLinear if a value in it is not linear
    in n.
    """
    values = {}
    for name, first in claims[0].values.items():
        by_n = claims[1].values[name] - first
        if any(
            claim.values[name] != first + by_n * n for n, claim in enumerate(claims)
        ):
            raise NotLinear(f"`{name}` in a claim")
        values[name] = number(first, by_n)
    return evolve(claims[0], values=values)


def _check_same(orders: Orders, columns: Sequence[Columns]) -> None:
    """NoStamps unless the orders are those of the compiler at n = 0, 1, …"""
    for n, real in enumerate(columns):
        is_first = real.batch == np.arange(len(real))
        # An optimizer step has no microbatch.
        microbatch = np.maximum(real.microbatch, 0)
        table = np.stack([real.kind, real.stage, microbatch, is_first])
        for rank, (begin, end) in enumerate(pairwise(real.first.tolist())):
            if not np.array_equal(orders.table(rank, n), table[:, begin:end]):
                raise NoStamps(f"the order of rank {rank} is not that of the compiler")


def _check_collectives(schedules: list[Schedule]) -> None:
    """Fault if the weights of a stage are not there when they are needed, or a gradient is not
    summed, for all n. NotLinear where ranks meet for that.

    Which weights and gradients are there after a round of a loop follows from the last op of each
    stage in it. So every further round finds what the second one finds, and at n = 2 each loop that
    grows has two.
    """
    layout = schedules[0].layout
    columns = schedules[0].columns
    stages = np.unique(columns.stage[columns.is_collective]).tolist()
    if any(len(layout.replicas(stage)) > 1 for stage in stages):
        raise NotLinear(
            "it gathers or sums stages of which it has replicas, or passes on to them, and "
            "each of them goes on meanwhile"
        )
    if not stages:
        return
    findings = [presence(schedule).findings() for schedule in schedules]
    if len(set(map(bool, findings))) > 1:
        holds_from(1)
    for finding in findings[-1]:
        raise Fault(finding.code, finding.message, finding.place)


def _repeated(orders: Orders, schedules: list[Schedule]) -> Repeated | str:
    try:
        return repeated(orders, schedules)
    except NotRepeated as error:
        return str(error)


def _stamped(orders: Orders, schedules: list[Schedule]) -> Stamped:
    """Orders with start times that are proved for all n; `schedules` are those at n = 0, 1, …"""
    schedules = list(map(only_computing, schedules))
    rules = rules_of(schedules)
    if all(ideal_execution(schedule) is None for schedule in schedules):
        check_deadlock(orders, rules, schedules)
    first = schedules[0]
    times = stamp(orders, list(map(walked, schedules)), first)
    stamped = Stamped(times, rules, orders, first.layout.slices)
    stamped.check()
    return stamped
