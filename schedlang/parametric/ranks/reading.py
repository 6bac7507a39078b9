"""Syntax tree → statements over sets of instances, with the sizes of a program as symbols.

A statement is an op as it is written. Its instances are one for each rank and round of the loops
around it, as an integer set; what an instance does (stage, update, microbatch, slice) is an affine
function of these; and so is where it stands in the order of its rank: a vector in which the places
of statements and the variables of loops take turns, compared by its first entries that differ
(Feautrier 1992, "Some efficient solutions to the affine scheduling problem", part II).

    rank r {
        for m in 0 .. warmup { F(m) }            S0[r, m]    order (0, m, 0)
        for m in warmup .. microbatches {
            F(m)                                 S1[r, m]    order (1, m, 0)
            B(m - warmup)                        S2[r, m]    order (1, m, 1)
        }
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import islpy as isl
from attrs import define, evolve, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.language import expressions, syntax
from schedlang.language.arithmetic import steps_of
from schedlang.language.codegen import generate
from schedlang.language.sites import CallSite, Sites
from schedlang.parametric.ranks.counting import RANK, Many, Order, how_many_before, renamed
from schedlang.parametric.ranks.symbols import (
    between,
    constant,
    everywhere,
    nowhere,
    number,
    points,
    simplified,
    symbol,
    without,
)
from schedlang.parametric.ranks.values import Evaluator, Mistake, Scope, StageFunction, Unreadable
from schedlang.schedule.kinds import TRANSFERS, Kind

#: The sizes of a program that are symbols, unless they are given.
SIZES = ("ranks", "microbatches", "slices")
#: The symbols that no program names: how many updates of a stream, of which update a round is, a
#: stage; and a rank, RANK.
UPDATES, UPDATE, STAGE = "updates", "_u", "_s"
#: A loop of at most so many rounds, whatever the sizes, is read round by round.
_FEW_ROUNDS = 16
#: A microbatch of a stream may be of at most so many updates later.
_MOST_UPDATES_ON = 4
#: How many stages of a rank are told apart by their number at most.
_MOST_CHUNKS = 16

#: An update, a microbatch of it, and a slice of that.
Unit = tuple[isl.PwAff, isl.PwAff, isl.PwAff]


@frozen(eq=False)
class Statement:
    """An op as it is written, and all that it does: for each point of its `domain`, a condition of
    sizes and of the symbols `indices` (the rank, then the loops around it).

    `batch` is a number of its own for the ops that are issued together, or 0. `loops` are the
    variables as the program calls them.
    """

    number: int
    kind: Kind
    span: Span
    indices: tuple[str, ...]
    loops: tuple[str, ...]
    domain: isl.Set
    stage: isl.PwAff
    unit: Unit
    order: Order
    batch: int = 0

    @property
    def name(self) -> str:
        """Its name among sets."""
        return f"S{self.number}"


@frozen(eq=False)
class Line:
    """The stages of a pipeline, `first` and the `stages` from it on: `rank` holds the one that the
    symbol STAGE counts from the pipeline's first.
    """

    name: str
    first: isl.PwAff
    stages: isl.PwAff
    microbatches: isl.PwAff
    rank: isl.PwAff

    def holds(self) -> isl.Set:
        """Which stage (STAGE, counted through all pipelines) is on which rank (RANK)."""
        own = between(number(0), symbol(STAGE), self.stages)
        there = own & symbol(RANK).eq_set(self.rank)
        return shifted(there, self.first)


def shifted(condition: isl.Set, by: isl.PwAff) -> isl.Set:
    """A condition of STAGE for a stage that is so many further on."""
    at = condition.find_dim_by_name(isl.dim_type.param, STAGE)
    moved = condition.set_dim_name(isl.dim_type.param, at, "_before")
    moved = moved & symbol(STAGE).eq_set(symbol("_before").add(by))
    return without(moved, ["_before"])


@frozen(eq=False)
class Reading:
    """A program as sets: its symbolic `sizes`, the `domain` of them for which it is meant, and what
    is wrong with it where.

    `delay` is by how many updates its weights are delayed; None where ops read the latest.
    """

    name: str
    sizes: tuple[str, ...]
    domain: isl.Set
    lines: tuple[Line, ...]
    skips: isl.Set
    slices: isl.PwAff
    #: The stages of a rank (RANK), by their numbers, where it has as many.
    own_stages: tuple[isl.PwAff, ...]
    statements: tuple[Statement, ...]
    mistakes: tuple[Mistake, ...]
    is_stream: bool
    delay: int | None

    @property
    def held(self) -> isl.Set:
        """Which stage (STAGE) is on which rank (RANK)."""
        parts = [line.holds() for line in self.lines]
        return _any(parts) & self.domain


def read(tree: syntax.Schedule, given: Mapping[str, int]) -> Reading:
    """A program for all sizes but those that are given; Unreadable with what it cannot be."""
    return _Reader(tree, given).read()


def _any(parts: Sequence[isl.Set]) -> isl.Set:
    result = nowhere()
    for part in parts:
        result = result | part
    return result.coalesce()


@frozen(eq=False)
class _Call:
    """An op where it is read: what it leaves open is None."""

    site: CallSite
    location: int
    kind: Kind
    span: Span
    indices: tuple[str, ...]
    loops: tuple[str, ...]
    where: isl.Set
    stage: isl.PwAff | None
    microbatch: isl.PwAff | None
    slice: isl.PwAff | None
    order: Order
    batch: int


@define
class _Place:
    """Where in the order the reader stands: the entries before, and how many statements came."""

    before: Order = ()
    indices: tuple[str, ...] = (RANK,)
    loops: tuple[str, ...] = ()
    count: int = 0

    def next(self) -> Order:
        """The order of the next statement here."""
        self.count += 1
        return (*self.before, self.count - 1)


@define
class _Reader:
    """Reads one program."""

    tree: syntax.Schedule
    given: Mapping[str, int]
    scope: Scope = field(factory=Scope)
    evaluator: Evaluator = field(factory=Evaluator)
    where: isl.Set = field(factory=everywhere)
    sizes: list[str] = field(factory=list)
    lines: list[Line] = field(factory=list)
    skips: list[isl.Set] = field(factory=list)
    calls: list[_Call] = field(factory=list)
    delay: int | None = None
    batches: int = 0
    rounds: int = 0
    sites: Sites = field(init=False)
    at: dict[Span, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        code = generate(self.tree, frozenset(), False)
        self.sites = code.sites
        self.at = {code.spans[location]: location for location in code.sites.ops}

    def read(self) -> Reading:
        """The whole program."""
        for item in self.tree.items:
            if isinstance(item, syntax.Pass | syntax.Fill | syntax.Recompute):
                raise Unreadable("a pass changes the order for each size in its own way", item.span)
        order: syntax.Rank | None = None
        later: list[syntax.Weights] = []
        for item in self.tree.items:
            match item:
                case syntax.Rank():
                    order = item
                case syntax.Weights():
                    later.append(item)
                case syntax.Repeated():
                    raise Unreadable(
                        "a building block is drawn for given sizes", item.interval.span
                    )
                case _:
                    self.item(item)
        if order is None:
            raise Unreadable("there is no `rank`", self.tree.name.span)
        for size in ("ranks", "microbatches"):
            if size not in self.scope.values:
                raise Unreadable(f"the program has no `{size}`", self.tree.name.span)
        if self.sites.parts:
            self.where = self.where & symbol(UPDATES).ge_set(number(1))
        self.lay_out()
        for line in later:
            self.weights(line)
        self.order(order)
        is_stream = bool(self.sites.parts)
        statements = self.statements(is_stream)
        return Reading(
            self.tree.name.text,
            tuple([*self.sizes, UPDATES] if is_stream else self.sizes),
            self.where,
            tuple(self.lines),
            _any(self.skips),
            self.size("slices") if "slices" in self.scope.values else number(1),
            tuple(self.evaluator.own_stages),
            statements,
            tuple(self.evaluator.mistakes),
            is_stream,
            self.delay,
        )

    # What stands before the order

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
            case syntax.Skip():
                self.skip(item)
            case syntax.Link():
                raise Unreadable("copies on shared links wait for each other by time", item.span)
            case syntax.Cost() | syntax.Capacity():
                if not isinstance(item.value, expressions.Number | expressions.Decimal):
                    raise Unreadable("a cost that is computed may be wrong", item.span)
            case syntax.Import() | syntax.Assert() | syntax.Objective():
                # These change no order.
                pass
            case _:
                word = type(item).__name__.lower()
                raise Unreadable(f"`{word}` cannot be read for all sizes yet", item.span)

    def param(self, item: syntax.Param) -> None:
        """A parameter: a symbol if it is a size, else its value or its default."""
        name = item.name.text
        if name in self.given:
            value = number(self.given[name])
        elif name in SIZES:
            value = symbol(name)
            self.sizes.append(name)
        elif item.default is None:
            raise Unreadable(f"the parameter `{name}` has no value", item.span)
        else:
            value = self.evaluator.value(item.default, self.scope, self.where)
        self.scope.values[name] = value
        if name in SIZES:
            self.where = self.where & value.ge_set(number(1))

    def line(self, name: str, stage: syntax.Stage, microbatches: object) -> None:
        """Lay out the stages of a pipeline."""
        if not isinstance(microbatches, isl.PwAff):
            raise Unreadable("a pipeline's microbatches cannot be read", stage.span)
        evaluator, where = self.evaluator, self.where
        start = evaluator.value(stage.range.start, self.scope, where)
        stop = evaluator.value(stage.range.stop, self.scope, where)
        amiss = where & (start.ne_set(number(0)) | stop.lt_set(number(1)))
        evaluator.mistaken("placement", "the stages must start from 0", stage, amiss)
        none = where & microbatches.lt_set(number(1))
        evaluator.mistaken("pipelines", "the pipeline runs no microbatches", stage, none)
        if self.lines:
            if not (name and self.lines[0].name):
                raise Unreadable("a schedule has one `stage` line, or pipelines", stage.span)
            unlike = where & stop.ne_set(self.lines[0].stages)
            evaluator.mistaken("pipelines", "pipelines have as many stages", stage, unlike)
        inside = self.scope.inner()
        inside.values[stage.name.text] = symbol(STAGE)
        there = where & between(number(0), symbol(STAGE), stop)
        rank = evaluator.value(stage.rank, inside, there)
        is_rank = between(number(0), rank, self.size("ranks"))
        evaluator.mistaken("no-such-rank", "a stage is on no rank", stage.rank, there - is_rank)
        first = number(0)
        if self.lines:
            first = self.lines[-1].first.add(self.lines[-1].stages)
        line = Line(name, first, stop, microbatches, rank.intersect_domain(there))
        self.lines.append(line)
        if name:
            self.scope.pipelines[name] = _stage_function(line)

    def size(self, name: str) -> isl.PwAff:
        """A size, which stands above."""
        value = self.scope.values[name]
        if not isinstance(value, isl.PwAff):
            raise Unreadable(f"`{name}` cannot be read")
        return value

    def lay_out(self) -> None:
        """Check the layout; by default there is one stage on each rank."""
        ranks, microbatches = self.size("ranks"), self.size("microbatches")
        if not self.lines:
            self.lines.append(Line("", number(0), ranks, microbatches, symbol(STAGE)))
        together = self.lines[0].microbatches
        for line in self.lines[1:]:
            together = together.add(line.microbatches)
        unlike = self.where & together.ne_set(microbatches)
        name = self.tree.name
        self.evaluator.mistaken("pipelines", "the pipelines run other microbatches", name, unlike)
        held = _any([line.holds() for line in self.lines]) & self.where
        every = self.where & between(number(0), symbol(RANK), ranks)
        idle = every - without(held, [STAGE])
        self.evaluator.mistaken("placement", "a rank holds no stage", name, idle)
        self.evaluator.own_stages = _chunks(held)

    def skip(self, item: syntax.Skip) -> None:
        """The skips of a line, as a condition of their earlier stage STAGE and later one `_later`:
        for one pipeline.
        """
        if len(self.lines) > 1 or any(line.name for line in self.lines):
            raise Unreadable("skips of several pipelines", item.span)
        stages = self.lines[0].stages if self.lines else self.size("ranks")
        inside = self.scope.inner()
        index = self.new_loop()
        inside.values[item.name.text] = symbol(index)
        where = self.where
        start = self.evaluator.value(item.range.start, self.scope, where)
        stop = self.evaluator.value(item.range.stop, self.scope, where)
        there = where & between(start, symbol(index), stop)
        earlier = self.evaluator.value(item.earlier, inside, there)
        later = self.evaluator.value(item.later, inside, there)
        is_right = (
            between(number(0), earlier, stages)
            & between(number(0), later, stages)
            & later.gt_set(earlier.add(number(1)))
        )
        self.evaluator.mistaken("skip", "a skip leads nowhere", item, there - is_right)
        ends = there & symbol(STAGE).eq_set(earlier) & symbol("_later").eq_set(later)
        self.skips.append(without(ends, [index]))

    def weights(self, item: syntax.Weights) -> None:
        """Which version of their weights stages read."""
        if item.stages is not None:
            raise Unreadable("rules for the weights of some stages", item.span)
        if item.rule.name == "latest":
            self.delay = None
        elif item.rule.name == "delay" and item.rule.updates is not None:
            updates = self.evaluator.value(item.rule.updates, self.scope, self.where)
            self.delay = constant(updates, self.where)
            if self.delay is None or self.delay < 0:
                raise Unreadable("a delay of the weights that depends on sizes", item.span)
        else:
            raise Unreadable("weights that are stashed", item.span)

    # The order

    def order(self, order: syntax.Rank) -> None:
        """Read what ranks do."""
        scope = self.scope.inner()
        scope.values[order.name.text] = symbol(RANK)
        where = self.where & between(number(0), symbol(RANK), self.size("ranks"))
        self.block(order.body, scope, where, _Place())
        if self.sites.parts and "steady" not in self.sites.parts:
            raise Unreadable("there is no `steady`", order.span)

    def new_loop(self) -> str:
        """The symbol of a loop."""
        self.rounds += 1
        return f"_i{self.rounds}"

    def block(self, block: syntax.Block, scope: Scope, where: isl.Set, place: _Place) -> None:
        """Read a block where a condition holds; what it brings into scope ends with it."""
        scope = scope.inner()
        for statement in block.statements:
            self.statement(statement, scope, where, place)

    def statement(self, node: syntax.Node, scope: Scope, where: isl.Set, place: _Place) -> None:
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
                negative = where & rounds.lt_set(number(0))
                self.evaluator.mistaken("negative-repeat", "`repeat` counts down", times, negative)
                self.loop("", number(0), rounds, body, scope, where, place)
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
                inner = _Place(place.next(), place.indices, place.loops)
                self.block(sequence.body, inside, where, inner)
            case syntax.Part(name, body):
                self.part(name, body, scope, where, place)
            case syntax.Exchange(parts) | syntax.Overlap(parts):
                self.batches += 1
                order = place.next()
                for part in parts:
                    self.op(part, scope, where, place, order, self.batches)
            case syntax.Op() | syntax.Transfer():
                self.op(node, scope, where, place, place.next(), 0)
            case syntax.Assert():
                pass
            case _:
                raise Unreadable("this cannot be read", node.span)

    def part(
        self, name: str, body: syntax.Block, scope: Scope, where: isl.Set, place: _Place
    ) -> None:
        """Read `warmup`, or `steady`, which is done for each update."""
        if name == "warmup":
            self.block(body, scope, where, _Place((0,), place.indices, place.loops))
            return
        within = where & between(number(0), symbol(UPDATE), symbol(UPDATES))
        self.block(body, scope, within, _Place((1, UPDATE), (*place.indices, UPDATE), place.loops))

    def step(self, node: syntax.Node, scope: Scope, where: isl.Set) -> int:
        """The step of a range, which must be the same wherever the loop runs."""
        step = constant(self.evaluator.value(node, scope, where), where)
        if step is None:
            raise Unreadable("a range by a step that depends on sizes", node.span)
        if step == 0:
            self.evaluator.mistaken("step", "a range by steps of 0", node, where)
        return step or 1

    def loop(
        self,
        name: str,
        start: isl.PwAff,
        stop: isl.PwAff,
        body: syntax.Block,
        scope: Scope,
        where: isl.Set,
        place: _Place,
        step: int = 1,
    ) -> None:
        """Read a loop: few rounds one by one, many as one statement with a symbol."""
        first, last = constant(start, where), constant(stop, where)
        if name and first is not None and last is not None and last - first <= _FEW_ROUNDS:
            begin, rounds = steps_of(first, last, step, 0)
            for round in range(begin, begin + step * max(rounds, 0), step):
                inside = scope.inner()
                inside.values[name] = number(round)
                order = place.next()
                self.block(body, inside, where, _Place(order, place.indices, place.loops))
            return
        index = self.new_loop()
        inside = scope.inner()
        loops = place.loops
        at = symbol(index)
        if step != 1:
            # The symbol counts the rounds from 0: what is later must be larger, also where a range
            # is gone through from its last number down.
            where = where & at.ge_set(number(0))
            first_number = start if step > 0 else stop.sub(number(1))
            at = first_number.add(at.scale_val(isl.Val(step)))
        if name:
            inside.values[name] = at
            loops = (*loops, name if step == 1 else "")
        else:
            loops = (*loops, "")
        within = where & between(start, at, stop)
        order = (*place.next(), index)
        self.block(body, inside, within, _Place(order, (*place.indices, index), loops))

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
        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            raise Unreadable("copies to the host", node.span)
        if kind == Kind.U and batch:
            raise Unreadable("an update that overlaps with other ops", node.span)
        args: list[isl.PwAff | None] = [
            None if isinstance(arg, expressions.Next) else self.evaluator.value(arg, scope, where)
            for arg in node.args
        ]
        if where.is_empty():
            return
        slices = 1 if self.sites.has_slices else 0
        stages: Sequence[isl.PwAff | None]
        if kind == Kind.U:
            stages = args if args else self.evaluator.own_stages
            args = [None, number(0), *[number(0)] * slices]
        else:
            missing = 2 + slices - len(args)
            args = [*[None] * missing, *args]
            stages = args[:1]
        for part, stage in enumerate(stages):
            # A bare `U` is one for each stage of its rank, in order.
            part_order = (*order, part) if len(stages) > 1 else order
            there = where if stage is None else where & stage.domain()
            call = _Call(
                site, location, kind, node.span, place.indices, place.loops, there,
                stage, args[1], args[2] if slices else number(0), part_order, batch,
            )  # fmt: skip
            self.calls.append(call)

    # What ops leave open

    def statements(self, is_stream: bool) -> tuple[Statement, ...]:
        """The calls as statements, with all that they leave open."""
        if is_stream:
            for call in self.calls:
                if call.location in self.sites.unnumbered:
                    raise Unreadable("an op of a stream that names no microbatch", call.span)
        self.calls = [self.with_stage(call) for call in self.calls]
        calls = [self.with_microbatch(call) for call in self.calls]
        statements: list[Statement] = []
        for call in calls:
            for statement in self.with_units(call, is_stream):
                statements.append(evolve(statement, number=len(statements)))
        if any(call.kind in TRANSFERS for call in calls):
            written = [
                without(call.where, call.indices) for call in calls if call.kind in TRANSFERS
            ]
            silent = self.where - _any(written)
            if not silent.is_empty():
                raise Unreadable("transfers that are written at some sizes only")
        return tuple(statements)

    def mistaken(self, code: str, message: str, span: Span, holds: isl.Set) -> None:
        """Something is wrong with a call."""
        if not holds.is_empty():
            self.evaluator.mistakes.append(Mistake(code, message, span, holds))

    def with_stage(self, call: _Call) -> _Call:
        """The call with its stage, which its rank must hold."""
        own = self.evaluator.own_stages
        stage = call.stage
        if stage is None:
            if call.location in self.sites.takes_oldest and len(own) > 1:
                raise Unreadable("`W` of the stage that owes one longest", call.span)
            stage = own[0]
            if len(own) > 1:
                several = call.where & own[1].domain()
                what = f"`{call.site.word}` does not say which stage"
                self.mistaken("which-stage", what, call.span, several)
        held = _any([line.holds() for line in self.lines])
        of_call = call.where & symbol(STAGE).eq_set(stage)
        wrong = without(of_call - held, [STAGE])
        what = f"`{call.site.word}` of a stage that its rank does not hold"
        self.mistaken("not-on-this-rank", what, call.span, wrong)
        return evolve(call, stage=stage, where=call.where - wrong)

    def with_microbatch(self, call: _Call) -> _Call:
        """The call with its microbatch: `next` counts the calls before it, a `W` takes the first
        that is owed.
        """
        sites = self.sites
        if call.microbatch is not None:
            return call
        if sites.has_slices and call.slice is None:
            raise Unreadable("`next` in a program with slices", call.span)
        if call.location in sites.takes_oldest:
            named = [other for other in self.calls if other.kind == Kind.W]
            if any(other.location not in sites.takes_oldest for other in named):
                raise Unreadable("`W` with and without a microbatch", call.span)
            owing = [other for other in self.calls if other.kind == Kind.I]
            taken = self.counted(call, named)
            owed = self.counted(call, owing)
            # The first one that is owed is the one of the count, if that is how they became owed.
            for other in owing:
                if other.microbatch is None:
                    continue
                in_turn = other.where & other.microbatch.ne_set(self.counted(other, owing))
                if not in_turn.is_empty():
                    raise Unreadable("`W` of microbatches that are not in order", call.span)
            nothing = call.where & taken.ge_set(owed)
            self.mistaken("nothing-next", "`W`, but nothing is owed", call.span, nothing)
            return evolve(call, microbatch=taken, where=call.where - nothing)
        if sites.is_mixed:
            raise Unreadable("`next` beside ops that name their microbatch", call.span)
        word = sites.counted_as[call.location]
        alike = [other for other in self.calls if sites.counted_as[other.location] == word]
        return evolve(call, microbatch=self.counted(call, alike))

    def counted(self, call: _Call, others: Sequence[_Call]) -> isl.PwAff:
        """How many of some calls stand before one on its rank, for the same stage."""
        total = number(0)
        for other in others:
            assert other.stage is not None
            assert call.stage is not None
            counted = how_many_before(
                Many(call.where, call.indices, call.order, call.stage),
                Many(other.where, other.indices, other.order, other.stage),
            )
            if counted is None:
                raise Unreadable("`next` cannot be counted through these loops", call.span)
            total = total.add(counted)
        return simplified(total.intersect_domain(call.where))

    def reaching(self, call: _Call, where: isl.Set) -> isl.Set:
        """Where a transfer has another rank to reach; elsewhere it becomes nothing."""
        if self.skips or self.sites.parts:
            raise Unreadable("transfers of its own, beside skips or without a flush", call.span)
        assert call.stage is not None
        reached = nowhere()
        for line in self.lines:
            other = call.stage.add(number(TRANSFERS[call.kind].distance))
            end = line.first.add(line.stages)
            both = between(line.first, call.stage, end) & between(line.first, other, end)
            rank = renamed(line.holds(), {RANK: "_rank"}) & symbol(STAGE).eq_set(other)
            away = both & rank & symbol("_rank").ne_set(symbol(RANK))
            reached = reached | without(away, [STAGE, "_rank"])
        return where & reached

    def with_units(self, call: _Call, is_stream: bool) -> list[Statement]:
        """The statements of a call: one for each case of its stage and microbatch."""
        assert call.stage is not None
        assert call.microbatch is not None
        where = call.where
        slice = call.slice if call.slice is not None else number(0)
        if self.sites.has_slices and call.kind != Kind.U:
            right = between(number(0), slice, self.size("slices"))
            what = f"`{call.site.word}` of a slice that there is not"
            self.mistaken("no-such-slice", what, call.span, where - right)
            where = where & right
        update = symbol(UPDATE) if UPDATE in call.indices else number(0)
        found: list[tuple[isl.Set, isl.PwAff, isl.PwAff]] = []
        if call.kind == Kind.U:
            found.append((where, update, number(0)))
            where = nowhere()
        for line in self.lines:
            own = between(line.first, call.stage, line.first.add(line.stages))
            here = where & own
            if here.is_empty():
                continue
            if not is_stream:
                right = here & between(number(0), call.microbatch, line.microbatches)
                what = f"`{call.site.word}` of a microbatch that there is not"
                self.mistaken("no-such-microbatch", what, call.span, here - right)
                if call.kind in TRANSFERS:
                    right = self.reaching(call, right)
                found.append((right, update, call.microbatch))
                continue
            negative = here & call.microbatch.lt_set(number(0))
            what = f"`{call.site.word}` of a microbatch that there is not"
            self.mistaken("no-such-microbatch", what, call.span, negative)
            rest = here - negative
            for on in range(_MOST_UPDATES_ON):
                low = line.microbatches.scale_val(isl.Val(on))
                case = rest & between(low, call.microbatch, low.add(line.microbatches))
                rest = rest - case
                later = update.add(number(on))
                # Of updates that do not come, the drain leaves ops out.
                case = case & later.lt_set(symbol(UPDATES))
                found.append((case, later, call.microbatch.sub(low)))
            if not rest.is_empty():
                raise Unreadable("a microbatch of an update that may be far on", call.span)
        statements = []
        for there, of_update, microbatch in found:
            for case in _cases(there, [call.stage, microbatch, slice]):
                statements.append(
                    Statement(
                        0, call.kind, call.span, call.indices, call.loops, case,
                        call.stage, (of_update, microbatch, slice), call.order, call.batch,
                    )
                )  # fmt: skip
        return statements


def _cases(where: isl.Set, functions: Sequence[isl.PwAff]) -> list[isl.Set]:
    """A condition cut into cases, in each of which some functions are one affine function."""
    cases = [where]
    for function in functions:
        pieces = [piece for piece, _ in function.intersect_domain(where).coalesce().get_pieces()]
        if len(pieces) > 1:
            cases = [case & piece for case in cases for piece in pieces]
    return [case.coalesce() for case in cases if not case.is_empty()]


def _chunks(held: isl.Set) -> list[isl.PwAff]:
    """The stages of a rank, by their numbers, where it has as many."""
    chunks: list[isl.PwAff] = []
    rest = held
    while not rest.is_empty():
        if len(chunks) == _MOST_CHUNKS:
            raise Unreadable("the number of stages on a rank depends on sizes")
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
