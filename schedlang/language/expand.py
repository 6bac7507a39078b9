"""Syntax tree + parameters → schedule: the program is run once per rank, and its calls are turned
into actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from attrs import define, field

from schedlang.diagnostics.diagnostic import (
    CompileError,
    Diagnostic,
    ParameterError,
    values_text,
)
from schedlang.diagnostics.source import Label, Source
from schedlang.diagnostics.wrong_arguments import Params
from schedlang.language import syntax
from schedlang.language.declarations import (
    Declarations,
    Unfinished,
    declare,
)
from schedlang.language.faults import Fault
from schedlang.language.names import check_names
from schedlang.language.record import Calls, record
from schedlang.language.trees import Itself
from schedlang.on_demand import on_demand
from schedlang.schedule.actions import Actions
from schedlang.schedule.columns import actions_of, columns_of
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.kinds import MAKERS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import MESSAGE_TYPES, OBJECTIVES, Schedule, Slots

if TYPE_CHECKING:
    from schedlang.language.block import run_block
    from schedlang.language.hints import nearest
    from schedlang.language.met import Met, diagnostics
    from schedlang.language.pricing import program_costs
    from schedlang.language.steady import make_stream
    from schedlang.language.variables import trace
    from schedlang.schedule.frozen import in_use
else:
    # For programs that declare such things: a building block, a steady part, costs, frozen stages.
    run_block = on_demand("schedlang.language.block.run_block")
    make_stream = on_demand("schedlang.language.steady.make_stream")
    program_costs = on_demand("schedlang.language.pricing.program_costs")
    in_use = on_demand("schedlang.schedule.frozen.in_use")
    # For programs that are wrong.
    Met = on_demand("schedlang.language.met.Met")
    diagnostics = on_demand("schedlang.language.met.diagnostics")
    nearest = on_demand("schedlang.language.hints.nearest")
    trace = on_demand("schedlang.language.variables.trace")


def expand(
    source: Source,
    tree: syntax.Schedule,
    params: Params,
    costs: Costs = UNIT,
) -> Schedule:
    """The schedule of a program for some parameters, with its passes and claims as data.
    CompileError with everything that is wrong.

    `costs` go before those of the program. ValueError if they are for another number of stages.
    """
    check_text(source, tree, params)
    try:
        return _expand(source, tree, params, costs)
    except (RecursionError, MemoryError, SyntaxError):
        label = Label(tree.name.span)
        raise CompileError(
            [
                Diagnostic(
                    "nesting", "the program is nested too deeply", (label,), source
                )
            ]
        ) from None


def check_text(source: Source, tree: syntax.Schedule, params: Params) -> None:
    """CompileError with what is wrong with a program before it runs, or with the names of given
    parameters.
    """
    wrong_params = _check_params(source, tree, params)
    wrong = _check_names(source, Itself(tree))
    if wrong:
        raise CompileError(wrong + wrong_params)
    if wrong_params:
        raise ParameterError(wrong_params)


@lru_cache(16)
def _check_names(source: Source, tree: Itself[syntax.Schedule]) -> list[Diagnostic]:
    """The mistakes of a program that do not depend on its parameters."""
    return check_names(source, tree.it)


def parameters(tree: syntax.Schedule, given: Params) -> dict[str, int]:
    """The parameters of a program that compiles, with their defaults; lists are left out."""
    try:
        return declare(tree, given).params
    except Unfinished as unfinished:
        return unfinished.declared.params


def _expand(
    source: Source, tree: syntax.Schedule, params: Params, costs: Costs
) -> Schedule:
    try:
        declared = declare(tree, params)
    except Unfinished as unfinished:
        raise _met(source, unfinished.declared, unfinished.fault) from None
    try:
        return _Expansion(source, declared, costs).schedule()
    except Fault as fault:
        raise _met(source, declared, fault) from None


def _met(source: Source, declared: Declarations, fault: Fault) -> CompileError:
    """The error for a fault that no rank alone has met."""
    met = Met(fault, None, values_text(declared.params))
    return CompileError(diagnostics(source, declared.spans, [met]))


def _check_params(
    source: Source, tree: syntax.Schedule, params: Params
) -> list[Diagnostic]:
    """What is wrong with the parameters that a user gives."""
    numbers = {
        item.name.text: item for item in tree.items if isinstance(item, syntax.Param)
    }
    lists = {
        item.name.text: item
        for item in tree.items
        if isinstance(item, syntax.List) and item.is_param
    }
    wrong = []

    def report(code: str, message: str, name: syntax.Name, help: str) -> None:
        label = Label(name.span)
        wrong.append(Diagnostic(code, message, (label,), source, help=help))

    known = [*numbers, *lists]
    for name in params.keys() - {*known}:
        message = f"the schedule `{tree.name.text}` has no parameter `{name}`"
        close = nearest(name, known)
        has = ", ".join(f"`{parameter}`" for parameter in known)
        help = close.text if close else f"it has {has}"
        report("unknown-parameter", message, tree.name, help)
    for name, param in numbers.items():
        if isinstance(params.get(name), Sequence):
            message = f"`{name}` is given a list, it is one number"
            report("parameter", message, param.name, f"give one: -p {name}=4")
        elif param.default is None and name not in params:
            message = f"the parameter `{name}` has no value"
            report("missing-parameter", message, param.name, f"give one: -p {name}=4")
    for name, item in lists.items():
        if not item.values and name not in params:
            message = f"the parameter `{name}` has no values"
            help = f"give a list: -p {name}=3,2,1"
            report("missing-parameter", message, item.name, help)
    return wrong


@define
class _Expansion:
    """A program while it runs: what it declares, and the faults of its order so far."""

    source: Source
    declared: Declarations
    costs: Costs
    faults: list[Met] = field(factory=list)

    def schedule(self) -> Schedule:
        """The schedule, with passes, claims and costs of the program."""
        declared = self.declared
        layout = declared.layout()
        self.costs.check(layout)
        slots: Slots | None = None
        if isinstance(declared.order, syntax.Repeated):
            ranks, slots = run_block(declared, layout)
        else:
            ranks = self.run_ranks(layout)
        stream = None
        if declared.sites.parts:
            stream = make_stream(layout, declared.sites, ranks)
        costs = self.costs
        if declared.prices:
            own = program_costs(declared.prices, layout, declared.sites)
            costs = costs.over(own)
        message_type = _chosen(declared.tree, "send", "")
        if message_type:
            costs = costs.over(Costs(sent_share=MESSAGE_TYPES[message_type]))
        return Schedule(
            name=declared.tree.name.text,
            params=declared.params,
            layout=layout,
            # A stream has its ops in `stream`, of one update; for how many updates it runs is said
            # later.
            ranks=tuple(Actions() for _ in ranks) if stream else ranks,
            source=self.source,
            spans=declared.spans,
            weights=declared.weight_rules(layout),
            slots=slots,
            stream=stream,
            claims=tuple(declared.claims),
            passes=declared.passes(layout),
            warnings=tuple(self.warnings(ranks, costs)),
            lists=declared.lists,
            costs=costs,
            objective=_chosen(declared.tree, "objective", OBJECTIVES[0]),
            message_type=message_type,
        )

    def warnings(self, ranks: Sequence[Actions], costs: Costs) -> Iterator[Diagnostic]:
        """Warnings about ops that may be missing by mistake, and about a capacity without bytes."""
        declared = self.declared

        def warning(code: str, message: str, location: int, help: str) -> Diagnostic:
            label = Label(declared.spans[location])
            notes = (f"here with {values_text(declared.params)}",)
            return Diagnostic(
                code, message, (label,), self.source, notes, help, severity="warning"
            )

        for location, (start, stop) in declared.empty_ranges().items():
            message = (
                f"the range `{start} .. {stop}` is empty, here and wherever it is met"
            )
            help = "ranges count up: for the other way round, write `for m in 0 .. n by -1`"
            yield warning("empty-range", message, location, help)
        kinds = declared.sites.kinds
        backward = next((at for at in kinds if kinds[at] in MAKERS[Kind.B]), None)
        if backward is not None and not any(
            {*MAKERS[Kind.B]} & set(own.kind) for own in ranks
        ):
            message = "no backward ever runs: what is left is an inference"
            help = (
                "see which loop or `if` leaves them all out; or leave them out yourself"
            )
            yield warning("forward-only", message, backward, help)
        if costs.capacity_bytes is not None and not costs.gives_bytes:
            of_program = (
                price for price in declared.prices if price.word == "capacity"
            )
            location = next((price.location for price in of_program), 0)
            message = "a capacity is given, and nothing says how many bytes ranks hold"
            help = "give `activation_bytes` and `weights_bytes` with --costs"
            yield warning("capacity", message, location, help)

    def run_ranks(self, layout: Layout) -> Sequence[Actions]:
        """The actions of every rank. CompileError with the first fault of each rank."""
        declared = self.declared
        ranks: list[Actions] = []
        for rank in declared.every_rank():
            # A rank with a fault has taken steps and made claims that are to be forgotten: only so
            # all ranks are looked at, each by itself.
            steps = declared.steps
            claims = len(declared.claims)
            calls: Calls = []
            is_cut = False
            declared.begin(rank, layout)
            try:
                declared.names["program"](
                    rank, calls.extend, *declared.stages_of_rank()
                )
            except (Fault, KeyError):
                is_cut = True
            order = record(rank, layout, declared.sites, calls)
            # A call may be wrong long before the run ended: the first of the two is what is told.
            if order.fault or is_cut:
                declared.steps = steps
                del declared.claims[claims:]
                self.meet(rank, order.fault, len(order.locations))
            else:
                ranks.append(order.actions())
        if self.faults:
            spans = declared.spans
            raise CompileError(diagnostics(self.source, spans, self.faults))
        # The program is written as though all were trained; what frozen stages do not need is left
        # out here.
        if layout.frozen:
            return actions_of(len(ranks), in_use(columns_of(ranks), layout))
        return tuple(ranks)

    def meet(self, rank: int, fault: Fault | None, index: int) -> None:
        """Record the first fault of a rank: of one of its calls, or else the one that ended its
        run.
        """
        # The program runs once more, slowly, and tells its variables: only for a rank with a fault.
        traced = trace(self.declared, [index], rank)
        values = traced.values[index] if fault else traced.now
        first = fault or traced.fault
        assert first is not None
        self.faults.append(Met(first, rank, values_text(values)))


def _chosen(tree: syntax.Schedule, word: str, default: str) -> str:
    """The name behind a word that chooses one, if the program has it."""
    choices = [item for item in tree.items if isinstance(item, syntax.Choice)]
    return next((item.name.text for item in choices if item.word == word), default)
