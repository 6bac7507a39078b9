"""What a program with symbolic sizes says before its order: its parameters, its stages, the rules
for its weights. The program's Python calls what is here, as it calls `Declarations` at one size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import islpy as isl
from attrs import define, evolve, field

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.sets.counting import RANK, renamed
from schedlang.extras.prove.sets.evaluator import Evaluator, Symbolic
from schedlang.extras.prove.sets.isl_functions import (
    between,
    everywhere,
    number,
    points,
    scaled,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    Number,
    Unreadable,
    of_number,
    of_symbol,
    plain,
    same,
    under,
)
from schedlang.extras.prove.sets.statements import (
    GROUPS,
    LATER,
    REST,
    SIZES,
    STAGE,
    Claim,
    Line,
    Weights,
    any_of,
)
from schedlang.language.declarations import Declarations, Price, StageLine
from schedlang.schedule.schedule import WeightRule

#: The most stages of a rank that are told apart by the numbers of its chunks.
_MOST_CHUNKS = 16
#: What cannot be read, by the functions of the program's Python for it, and why.
_UNREAD = {
    "pipelines": "pipelines with numbers",
    "param_list": "a list with a length",
    "check_length": "a list with a length",
    "link": "copies on shared links wait for each other by time",
    "keeper": "`keeper` cannot be read for all sizes yet",
    "frozen": "`frozen` cannot be read for all sizes yet",
    "frozen_model": "`frozen` cannot be read for all sizes yet",
}


@define
class Declared(Declarations):
    """One run of a program with symbolic sizes. With `in_base`, microbatches have two digits.

    `domain` are the sizes that the program does not refuse.
    """

    in_base: bool = field(kw_only=True)
    evaluator: Evaluator = field(kw_only=True)
    domain: isl.Set = field(factory=everywhere)
    values: dict[str, Number] = field(factory=dict)
    sizes: list[str] = field(factory=list)
    lines: list[Line] = field(factory=list)
    edge_sets: list[isl.Set] = field(factory=list)
    skip_sets: list[isl.Set] = field(factory=list)
    claims_for_all: list[Claim] = field(factory=list)
    rules: list[Weights] = field(factory=list)

    def run(self) -> None:
        """Run what stands before the order, and check what it lays out."""
        self.names |= self.evaluator.names()
        self.names |= {word: self.unread(reason) for word, reason in _UNREAD.items()}
        self.names["require"] = self.require
        self.run_items()
        for size in ("ranks", "microbatches"):
            if size not in self.values:
                raise Unreadable(f"the program has no `{size}`", self.tree.name.span)

    def unread(self, reason: str) -> Callable[..., None]:
        """A function of the program's Python for an item that cannot be read."""

        def fail(*values: Any) -> None:
            # The last number is a location in the item.
            location = next(of for of in reversed(values) if isinstance(of, int))
            raise Unreadable(reason, self.item_span(location))

        return fail

    def item_span(self, location: int) -> Span:
        """The place of the whole item in which a location is."""
        at = self.spans[location].start
        spans = (item.span for item in self.tree.items)
        return next(span for span in spans if span.start <= at < span.end)

    def narrowed(self, where: isl.Set) -> None:
        """Leave only some of the sizes."""
        self.domain = self.evaluator.where = where

    def require(self, holds: Any, _: str | None, __: int) -> None:
        """Leave only the sizes at which a requirement holds."""
        self.narrowed(self.evaluator.truth(holds))

    def param(self, name: str, default: Callable[[], Any] | None, location: int) -> Any:
        """A parameter: a symbol if it is a size that is not given, else a number."""
        if name in self.given:
            value: Any = self.given[name]
        elif name == "microbatches" and self.in_base:
            value = self.symbolic(Number(symbol(REST), symbol(GROUPS)))
            self.sizes += [GROUPS, REST]
            digits = between(number(0), symbol(REST), self.count_of("ranks"))
            self.narrowed(self.domain & digits & symbol(GROUPS).ge_set(number(0)))
        elif name in SIZES:
            value = self.symbolic(of_symbol(name))
            self.sizes.append(name)
        elif default is None:
            span = self.spans[location]
            raise Unreadable(f"the parameter `{name}` has no value", span)
        else:
            value = default()
        if name in SIZES:
            self.values[name] = self.evaluator.number(value)
            self.narrowed(
                self.domain - under(self.values[name], of_number(1), self.domain)
            )
        return value

    def symbolic(self, value: Number) -> Symbolic:
        """A number as a value of the program."""
        return Symbolic(self.evaluator, value)

    def claim(self, location: int, values: dict[str, Any]) -> None:
        """Keep a claim `for all` sizes."""
        self.claim_where(location, values, everywhere())

    def claim_where(
        self, location: int, values: dict[str, Any], where: isl.Set
    ) -> None:
        """Keep a claim `for all` sizes to which the program comes under a condition."""
        site = self.sites.claims[location]
        if site.for_all:
            stages = {
                line.name: self.stage_of(line) for line in self.lines if line.name
            }
            claim = Claim(site, self.evaluator, values | stages, where)
            self.claims_for_all.append(claim)

    # Stages

    def only_pipeline(self, line: StageLine) -> None:
        """Lay out the stages of a program with one pipeline, which runs all microbatches."""
        self.line("", line, self.number_of("microbatches"))

    def pipeline(
        self, name: str, share: int, line: StageLine, microbatches: Any
    ) -> Any:
        """Lay out one of several pipelines; the function that gives its stages."""
        if self.models:
            raise Unreadable("several models", self.item_span(share))
        return self.stage_of(self.line(name, line, self.evaluator.number(microbatches)))

    def line(self, name: str, stage: StageLine, microbatches: Number) -> Line:
        """Lay out the stages of a pipeline."""
        evaluator = self.evaluator
        where = self.domain
        start = evaluator.plain(stage.start, stage.location)
        stop = evaluator.plain(stage.stop, stage.location)
        amiss = where & (start.ne_set(number(0)) | stop.lt_set(number(1)))
        evaluator.mistaken("the stages must start from 0", amiss)
        none = under(microbatches, of_number(1), where)
        evaluator.mistaken("the pipeline runs no microbatches", none)
        if self.lines:
            if not (name and self.lines[0].name):
                what = "a schedule has one `stage` line, or pipelines"
                raise Unreadable(what, self.spans[stage.location])
            unlike = where & stop.ne_set(self.lines[0].stages)
            evaluator.mistaken("pipelines have as many stages", unlike)
        there = where & between(number(0), symbol(STAGE), stop)
        with evaluator.within(there):
            rank_of: Callable[[Any], Any] = stage.rank_of
            of_stage = rank_of(self.symbolic(of_symbol(STAGE)))
            rank = evaluator.plain(of_stage, stage.rank_location)
        is_rank = between(number(0), rank, self.count_of("ranks"))
        evaluator.mistaken("a stage is on no rank", there - is_rank)
        first = self.stages() if self.lines else number(0)
        line = Line(name, first, stop, microbatches, rank.intersect_domain(there))
        self.lines.append(line)
        return line

    def stage_of(self, line: Line) -> Callable[[Any], Symbolic]:
        """The function that gives a stage of a pipeline by its number there; -1 for none."""

        def stage(own: Any) -> Symbolic:
            at = self.evaluator.plain(own)
            there = between(number(0), at, line.stages)
            inside = line.first.add(at).intersect_domain(there)
            outside = number(-1).intersect_domain(there.complement())
            return self.symbolic(Number(inside.union_add(outside)))

        return stage

    def number_of(self, name: str) -> Number:
        """A size that stands above, maybe with two digits."""
        value = self.values.get(name)
        if value is None:
            raise Unreadable(f"`{name}` cannot be read", self.tree.name.span)
        return value

    def count_of(self, name: str) -> isl.PwAff:
        """A size that stands above."""
        return plain(self.number_of(name), self.domain)

    def stages(self) -> isl.PwAff:
        """The number of stages in all pipelines."""
        return self.lines[-1].first.add(self.lines[-1].stages)

    def lay_out(self) -> None:
        """Check the layout; by default there is one stage on each rank."""
        ranks = self.count_of("ranks")
        microbatches = self.number_of("microbatches")
        if not self.lines:
            self.lines.append(Line("", number(0), ranks, microbatches, symbol(STAGE)))
        together = self.lines[0].microbatches
        for line in self.lines[1:]:
            together = together.plus(line.microbatches)
        unlike = self.domain - same(together, microbatches, self.domain)
        self.evaluator.mistaken("the pipelines run other microbatches", unlike)
        held = any_of([line.holds() for line in self.lines]) & self.domain
        every = self.domain & between(number(0), symbol(RANK), ranks)
        idle = every - without(held, [STAGE])
        self.evaluator.mistaken("a rank holds no stage", idle)
        self.evaluator.own_stages = _chunks(held)
        stages = between(number(0), symbol(STAGE), self.stages())
        self.rules.append(Weights(WeightRule().name, stages, number(0)))
        for is_skip, kept in ((False, self._edges), (True, self._skips)):
            for each in kept:
                self.edge(is_skip, each)
        for rule in self._weights:
            self.weights(rule)
        for price in self.prices:
            self.price(price)

    def edge(self, is_skip: bool, item: Any) -> None:
        """Record the edges or skips of a line, as a condition on the earlier stage STAGE and the
        later one LATER. The program has one pipeline.
        """
        (line, *others) = self.lines
        evaluator = self.evaluator
        word = "skip" if is_skip else "edge"
        if others or line.name:
            what = f"{word}s of several pipelines"
            raise Unreadable(what, self.spans[item.location])
        index = "_edge"
        start, stop = (
            evaluator.plain(end, item.location) for end in (item.start, item.stop)
        )
        there = self.domain & between(start, symbol(index), stop)
        with evaluator.within(there):
            ends = item.ends(self.symbolic(of_symbol(index)))
            earlier, later = (evaluator.plain(end, item.location) for end in ends)
        is_right = (
            between(number(0), earlier, line.stages)
            & between(number(0), later, line.stages)
            & later.gt_set(earlier.add(number(int(is_skip))))
        )
        evaluator.mistaken(f"{word}: it leads nowhere", there - is_right)
        ends = there & symbol(STAGE).eq_set(earlier) & symbol(LATER).eq_set(later)
        # Twice: the line has the same ends for another number, or an earlier line has them.
        another = renamed(ends, {index: "_another"}) & symbol(index).lt_set(
            symbol("_another")
        )
        twice = without(ends & another, [STAGE, LATER, index, "_another"])
        ends = without(ends, [index])
        for other in [*self.edge_sets, *self.skip_sets]:
            twice = twice | without(other & ends, [STAGE, LATER])
        evaluator.mistaken(f"{word}: it is there already", twice)
        (self.skip_sets if is_skip else self.edge_sets).append(ends)

    def onward(self) -> isl.Set:
        """The condition that what the stage STAGE makes goes to the stage LATER, within a
        pipeline.
        """
        chain = symbol(LATER).eq_set(symbol(STAGE).add(number(1)))
        edges = any_of(self.edge_sets)
        # At sizes without any edge, the stages are a chain.
        return any_of([edges, chain - without(edges, [STAGE, LATER]), *self.skip_sets])

    # Weights and costs

    def weights(self, item: Any) -> None:
        """The rule for which version of their weights some stages read; a later line overrides an
        earlier one.
        """
        every = self.stages()
        plain_value = self.evaluator.plain
        start = plain_value(item.start, item.range_location)
        stop = every
        if item.stop is not None:
            stop = plain_value(item.stop, item.range_location)
        are_there = number(0).le_set(start) & start.le_set(stop) & stop.le_set(every)
        what = "`weights` of stages that there are not"
        self.evaluator.mistaken(what, self.domain - are_there)
        delay = plain_value(item.delay, item.location)
        ahead = self.domain & delay.lt_set(number(0))
        what = "weights are delayed by 0 updates or more"
        self.evaluator.mistaken(what, ahead)
        stages = between(start, symbol(STAGE), stop)
        self.rules = [evolve(rule, stages=rule.stages - stages) for rule in self.rules]
        self.rules.append(Weights(item.name, stages, delay))

    def price(self, price: Price) -> None:
        """Check a cost, which changes no order: it has a value, and no duration is negative."""
        if price.word == "capacity":
            # `prove_for_all_ranks` proves nothing of a program with a capacity.
            return
        if price.word == "send" and price.is_memory:
            raise Unreadable("messages that take memory", self.spans[price.location])
        where = self.domain
        indices = []
        if price.indices:
            if price.indices > 1 or price.word == "send":
                what = "a cost of microbatches or of links that is computed"
                raise Unreadable(what, self.spans[price.location])
            indices = [self.symbolic(of_symbol(STAGE))]
            where = where & between(number(0), symbol(STAGE), self.stages())
        with self.evaluator.within(where):
            amount = self.evaluator.plain(price.of(*indices), price.value_location)
        if not price.is_memory:
            negative = where & scaled(amount)[0].lt_set(number(0))
            self.evaluator.mistaken("a duration is 0 or more", negative)


def _chunks(held: isl.Set) -> list[isl.PwAff]:
    """The stages of a rank by the numbers of its chunks; each is defined where the rank has it."""
    chunks: list[isl.PwAff] = []
    rest = held
    while not rest.is_empty():
        if len(chunks) == _MOST_CHUNKS:
            raise Unreadable("the number of stages on a rank depends on sizes")
        # The chunks of a rank are its stages in ascending order.
        lowest = points(rest, [STAGE]).dim_min(0).coalesce()
        chunks.append(lowest)
        rest = rest - symbol(STAGE).eq_set(lowest)
    return chunks
