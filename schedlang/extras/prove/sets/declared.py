"""What stands before the order of a program: its parameters, its stages, rules for its weights."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import islpy as isl
from attrs import define, evolve, field

from schedlang.extras.prove.sets.counting import RANK, renamed
from schedlang.extras.prove.sets.evaluator import (
    Evaluator,
    Scope,
    StageFunction,
    Unread,
)
from schedlang.extras.prove.sets.isl_functions import (
    between,
    everywhere,
    number,
    points,
    rational,
    scaled,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    Number,
    Unreadable,
    joined,
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
from schedlang.language import expressions, syntax
from schedlang.schedule.schedule import WeightRule

#: How many stages of a rank are told apart by their number at most.
_MOST_CHUNKS = 16


@define
class Layout:
    """Reads what stands before the order; `in_base`, microbatches are numbers of two digits."""

    tree: syntax.Schedule
    given: Mapping[str, int]
    in_base: bool
    scope: Scope = field(factory=Scope)
    evaluator: Evaluator = field(factory=Evaluator)
    where: isl.Set = field(factory=everywhere)
    sizes: list[str] = field(factory=list)
    lines: list[Line] = field(factory=list)
    edges: list[isl.Set] = field(factory=list)
    skips: list[isl.Set] = field(factory=list)
    claims: list[Claim] = field(factory=list)
    rules: list[Weights] = field(factory=list)

    def item(self, item: syntax.Node) -> None:
        """Read what stands before the order."""
        match item:
            case syntax.Param():
                self.param(item)
            case syntax.Require(condition):
                self.where = self.evaluator.truth(condition, self.scope, self.where)
            case syntax.Let():
                self.evaluator.bind(item, self.scope, self.where)
            case syntax.Seq(name):
                self.scope.sequences[name.text] = (item, self.scope)
            case syntax.List(name, values):
                self.scope.lists[name.text] = values
            case syntax.Fn(name):
                self.scope.functions[name.text] = (item, self.scope)
            case syntax.Stage():
                self.line("", item, self.scope.values["microbatches"])
            case syntax.Pipeline("model"):
                raise Unreadable("several models", item.span)
            case syntax.Pipeline(_, name, None, None, microbatches, stage):
                share = self.evaluator.value(microbatches, self.scope, self.where)
                self.line(name.text, stage, share)
            case syntax.Pipeline():
                raise Unreadable("pipelines with numbers", item.span)
            case syntax.Link():
                raise Unreadable(
                    "copies on shared links wait for each other by time", item.span
                )
            case syntax.Capacity():
                if not isinstance(item.value, expressions.Number | expressions.Decimal):
                    raise Unreadable("a capacity that is computed", item.span)
            case syntax.Assert(condition, for_all):
                if for_all:
                    self.claims.append(Claim(condition, self.scope, everywhere()))
            case syntax.Import() | syntax.Objective():
                # These change no order.
                pass
            case _:
                word = type(item).__name__.lower()
                raise Unreadable(
                    f"`{word}` cannot be read for all sizes yet", item.span
                )

    def param(self, item: syntax.Param) -> None:
        """A parameter: a symbol if it is a size, else its value or its default."""
        name = item.name.text
        if name in self.given:
            value = of_number(self.given[name])
        elif name == "microbatches" and self.in_base:
            value = Number(symbol(REST), symbol(GROUPS))
            self.sizes += [GROUPS, REST]
            digits = between(number(0), symbol(REST), self.size("ranks"))
            self.where = self.where & digits & symbol(GROUPS).ge_set(number(0))
        elif name in SIZES:
            value = of_symbol(name)
            self.sizes.append(name)
        elif item.default is None:
            raise Unreadable(f"the parameter `{name}` has no value", item.span)
        else:
            value = self.evaluator.value(item.default, self.scope, self.where)
        self.scope.values[name] = value
        if name in SIZES:
            self.where = self.where - under(value, of_number(1), self.where)

    def line(self, name: str, stage: syntax.Stage, microbatches: object) -> None:
        """Lay out the stages of a pipeline."""
        if not isinstance(microbatches, Number):
            raise Unreadable("a pipeline's microbatches cannot be read", stage.span)
        evaluator = self.evaluator
        where = self.where
        start = evaluator.plain(stage.range.start, self.scope, where)
        stop = evaluator.plain(stage.range.stop, self.scope, where)
        amiss = where & (start.ne_set(number(0)) | stop.lt_set(number(1)))
        evaluator.mistaken("the stages must start from 0", amiss)
        none = under(microbatches, of_number(1), where)
        evaluator.mistaken("the pipeline runs no microbatches", none)
        if self.lines:
            if not (name and self.lines[0].name):
                raise Unreadable(
                    "a schedule has one `stage` line, or pipelines", stage.span
                )
            unlike = where & stop.ne_set(self.lines[0].stages)
            evaluator.mistaken("pipelines have as many stages", unlike)
        inside = self.scope.inner()
        inside.values[stage.name.text] = of_symbol(STAGE)
        there = where & between(number(0), symbol(STAGE), stop)
        rank = evaluator.plain(stage.rank, inside, there)
        is_rank = between(number(0), rank, self.size("ranks"))
        evaluator.mistaken("a stage is on no rank", there - is_rank)
        first = number(0)
        if self.lines:
            first = self.stages()
        line = Line(name, first, stop, microbatches, rank.intersect_domain(there))
        self.lines.append(line)
        if name:
            self.scope.pipelines[name] = _stage_function(line)

    def size(self, name: str) -> isl.PwAff:
        """A size that stands above."""
        return plain(self.count(name), self.where)

    def count(self, name: str) -> Number:
        """A size that stands above, of maybe two digits."""
        value = self.scope.values.get(name)
        if not isinstance(value, Number):
            raise Unreadable(f"`{name}` cannot be read", self.tree.name.span)
        return value

    def lay_out(self) -> None:
        """Check the layout; by default there is one stage on each rank."""
        ranks = self.size("ranks")
        microbatches = self.count("microbatches")
        if not self.lines:
            self.lines.append(Line("", number(0), ranks, microbatches, symbol(STAGE)))
        together = self.lines[0].microbatches
        for line in self.lines[1:]:
            together = together.plus(line.microbatches)
        unlike = self.where - same(together, microbatches, self.where)
        self.evaluator.mistaken("the pipelines run other microbatches", unlike)
        held = any_of([line.holds() for line in self.lines]) & self.where
        every = self.where & between(number(0), symbol(RANK), ranks)
        idle = every - without(held, [STAGE])
        self.evaluator.mistaken("a rank holds no stage", idle)
        self.evaluator.own_stages = _chunks(held)
        stages = between(number(0), symbol(STAGE), self.stages())
        self.rules.append(Weights(WeightRule().name, stages, number(0)))

    def edge(self, item: syntax.Edge) -> None:
        """The edges or skips of a line, as a condition of their earlier stage STAGE and later one
        LATER: for one pipeline.
        """
        (line, *others) = self.lines
        is_skip = isinstance(item, syntax.Skip)
        word = "skip" if is_skip else "edge"
        if others or line.name:
            raise Unreadable(f"{word}s of several pipelines", item.span)
        inside = self.scope.inner()
        index = "_edge"
        inside.values[item.name.text] = of_symbol(index)
        where = self.where
        start = self.evaluator.plain(item.range.start, self.scope, where)
        stop = self.evaluator.plain(item.range.stop, self.scope, where)
        there = where & between(start, symbol(index), stop)
        earlier = self.evaluator.plain(item.earlier, inside, there)
        later = self.evaluator.plain(item.later, inside, there)
        is_right = (
            between(number(0), earlier, line.stages)
            & between(number(0), later, line.stages)
            & later.gt_set(earlier.add(number(int(is_skip))))
        )
        nowhere = there - is_right
        self.evaluator.mistaken(f"{word}: it leads nowhere", nowhere)
        ends = there & symbol(STAGE).eq_set(earlier) & symbol(LATER).eq_set(later)
        # Two numbers of the line have it: the same ends, with another number.
        another = renamed(ends, {index: "_another"}) & symbol(index).lt_set(
            symbol("_another")
        )
        twice = without(ends & another, [STAGE, LATER, index, "_another"])
        ends = without(ends, [index])
        for other in [*self.edges, *self.skips]:
            twice = twice | without(other & ends, [STAGE, LATER])
        self.evaluator.mistaken(f"{word}: it is there already", twice)
        (self.skips if is_skip else self.edges).append(ends)

    def onward(self) -> isl.Set:
        """From which stage (STAGE) to which (LATER) what it makes goes, within a pipeline."""
        chain = symbol(LATER).eq_set(symbol(STAGE).add(number(1)))
        edges = any_of(self.edges)
        # At sizes at which there is no edge, the stages are a chain.
        return any_of([edges, chain - without(edges, [STAGE, LATER]), *self.skips])

    def weights(self, item: syntax.Weights) -> None:
        """Which version of their weights stages read; a later line overrides an earlier one."""
        start = number(0)
        stop = every = self.stages()
        if item.stages is not None:
            start = self.evaluator.plain(item.stages.start, self.scope, self.where)
            stop = self.evaluator.plain(item.stages.stop, self.scope, self.where)
        are_there = number(0).le_set(start) & start.le_set(stop) & stop.le_set(every)
        what = "`weights` of stages that there are not"
        self.evaluator.mistaken(what, self.where - are_there)
        delay = number(0)
        if item.rule.updates is not None:
            delay = self.evaluator.plain(item.rule.updates, self.scope, self.where)
        ahead = self.where & delay.lt_set(number(0))
        what = "weights are delayed by 0 updates or more"
        self.evaluator.mistaken(what, ahead)
        stages = between(start, symbol(STAGE), stop)
        self.rules = [evolve(rule, stages=rule.stages - stages) for rule in self.rules]
        self.rules.append(Weights(item.rule.name, stages, delay))

    def price(self, item: syntax.Cost) -> None:
        """A cost, which changes no order: it must have a value, and a duration is not negative."""
        inside = self.scope.inner()
        where = self.where
        if item.indices:
            if len(item.indices) > 1 or item.word == "send":
                raise Unreadable(
                    "a cost of microbatches or of links that is computed", item.span
                )
            inside.values[item.indices[0].text] = of_symbol(STAGE)
            where = where & between(number(0), symbol(STAGE), self.stages())
        amount, _ = self.amount(item.value, inside, where)
        if not isinstance(item, syntax.Memory):
            negative = where & scaled(amount)[0].lt_set(number(0))
            what = "a duration is 0 or more"
            self.evaluator.mistaken(what, negative)

    def amount(
        self, value: syntax.Node, scope: Scope, where: isl.Set
    ) -> tuple[isl.PwAff, bool]:
        """The value of a cost, which may be no whole number; and whether it has decimals, as its
        arithmetic is exact then.
        """
        match value:
            case expressions.Decimal(text):
                return rational(Fraction(text)), True
            case expressions.Reference(name):
                known = scope.values[name]
                if isinstance(known, Unread):
                    return self.amount(known.value, scope, where)
            case expressions.Conditional(condition, then, otherwise):
                holds = self.evaluator.truth(condition, scope, where)
                cases = [(holds, then), (where - holds, otherwise)]
                parts = [
                    (case, *self.amount(part, scope, case))
                    for case, part in cases
                    if not case.is_empty()
                ]
                pieces = [amount.intersect_domain(case) for case, amount, _ in parts]
                is_exact = any(is_exact for _, _, is_exact in parts)
                return joined(pieces) if pieces else number(0), is_exact
            case expressions.Unary("-", operand):
                amount, is_exact = self.amount(operand, scope, where)
                return amount.neg(), is_exact
            case expressions.Binary("+" | "-" | "*" | "/" as operator, left, right):
                one, is_one = self.amount(left, scope, where)
                other, is_other = self.amount(right, scope, where)
                if is_one or is_other:
                    return _exact(operator, one, other, value), True
        return self.evaluator.plain(value, scope, where), False

    def stages(self) -> isl.PwAff:
        """How many stages there are in all pipelines."""
        return self.lines[-1].first.add(self.lines[-1].stages)


def _exact(
    operator: str, one: isl.PwAff, other: isl.PwAff, node: syntax.Node
) -> isl.PwAff:
    """An operation on numbers that may be no whole ones."""
    if operator == "+":
        return one.add(other)
    if operator == "-":
        return one.sub(other)
    if operator == "*" and not one.is_cst():
        one, other = other, one
    factor = one if operator == "*" else other
    if not factor.is_cst() or factor.n_piece() != 1:
        raise Unreadable("decimals, times or over what depends on sizes", node.span)
    ((_, constant),) = factor.get_pieces()
    value = constant.get_constant_val()
    if operator == "*":
        return other.scale_val(value)
    if value.is_zero():
        raise Unreadable("a division by zero", node.span)
    return one.scale_down_val(value)


def _chunks(held: isl.Set) -> list[isl.PwAff]:
    """The stages of a rank, by their numbers, where it has as many."""
    chunks: list[isl.PwAff] = []
    rest = held
    while not rest.is_empty():
        if len(chunks) == _MOST_CHUNKS:
            raise Unreadable("the number of stages on a rank depends on sizes")
        # The lowest stage of each rank is its first chunk, the lowest of the others the next, and
        # so on.
        lowest = points(rest, [STAGE]).dim_min(0).coalesce()
        chunks.append(lowest)
        rest = rest - symbol(STAGE).eq_set(lowest)
    return chunks


def _stage_function(line: Line) -> StageFunction:
    """The function that gives a stage of a pipeline by its number there; -1 for none."""

    def stage(own: isl.PwAff) -> isl.PwAff:
        there = between(number(0), own, line.stages)
        inside = line.first.add(own).intersect_domain(there)
        return inside.union_add(number(-1).intersect_domain(there.complement()))

    return stage
