"""Syntax tree → a program as sets, for all sizes at once."""

from __future__ import annotations

from collections.abc import Mapping

from schedlang.extras.prove.sets.declared import Layout
from schedlang.extras.prove.sets.isl_functions import number, symbol
from schedlang.extras.prove.sets.numbers import Unreadable
from schedlang.extras.prove.sets.open_calls import Calls
from schedlang.extras.prove.sets.rank_order import Orders
from schedlang.extras.prove.sets.statements import UPDATES, Reading
from schedlang.language import syntax
from schedlang.language.codegen import generate

#: Why a program with such a pass is not proved.
_SEARCH = (
    "a pass that searches: which order it finds at a size does not follow from the text; each is "
    "proved when it is compiled, and at ranks that are given `schedc check --for "
    "microbatches=any` follows them"
)


def read(tree: syntax.Schedule, given: Mapping[str, int]) -> Reading:
    """A program for all sizes but those that are given; Unreadable with what it cannot be.

    Where microbatches come in groups of `ranks`, their numbers have two digits in base `ranks`.
    """
    try:
        return _read(tree, given, False)
    except Unreadable as unreadable:
        if "ranks" in given or "microbatches" in given:
            raise
        try:
            return _read(tree, given, True)
        except Unreadable as in_base:
            # What it cannot be read for at all is said of the plainer way.
            raise (in_base if unreadable.is_large else unreadable) from None


def _read(tree: syntax.Schedule, given: Mapping[str, int], in_base: bool) -> Reading:
    for item in tree.items:
        if isinstance(item, syntax.Pass | syntax.Fill):
            raise Unreadable(_SEARCH, item.span)
        if isinstance(item, syntax.Gather | syntax.Recompute):
            raise Unreadable("a pass that cannot be read for all sizes yet", item.span)
    code = generate(tree, frozenset(), False)
    layout = Layout(tree, given, in_base)
    order: syntax.Rank | None = None
    later: list[syntax.Weights | syntax.Edge | syntax.Cost] = []
    for item in tree.items:
        match item:
            case syntax.Rank():
                order = item
            # They are of stages, which may stand below.
            case syntax.Weights() | syntax.Edge() | syntax.Cost():
                later.append(item)
            case syntax.Repeated():
                raise Unreadable(
                    "a building block is drawn for given sizes", item.interval.span
                )
            case _:
                layout.item(item)
    if order is None:
        raise Unreadable("there is no `rank`", tree.name.span)
    for size in ("ranks", "microbatches"):
        if size not in layout.scope.values:
            raise Unreadable(f"the program has no `{size}`", tree.name.span)
    is_stream = bool(code.sites.parts)
    if is_stream:
        layout.where = layout.where & symbol(UPDATES).ge_set(number(1))
    layout.lay_out()
    for line in later:
        match line:
            case syntax.Weights():
                layout.weights(line)
            case syntax.Cost():
                layout.price(line)
            case _:
                layout.edge(line)
    at = {code.spans[location]: location for location in code.sites.ops}
    orders = Orders(
        code.sites, at, layout.evaluator, layout.where, layout.size("ranks")
    )
    orders.read(order, layout.scope)
    slices = layout.size("slices") if "slices" in layout.scope.values else number(1)
    calls = Calls(
        code.sites,
        layout.evaluator,
        layout.lines,
        bool(layout.edges or layout.skips),
        slices,
        in_base,
        orders.where,
        orders.calls,
    )
    statements = calls.statements()
    return Reading(
        tree.name.text,
        tuple([*layout.sizes, UPDATES] if is_stream else layout.sizes),
        in_base,
        orders.where,
        tuple(layout.lines),
        layout.onward(),
        slices,
        tuple(layout.evaluator.own_stages),
        statements,
        tuple(layout.evaluator.mistakes),
        (*layout.claims, *orders.claims),
        is_stream,
        tuple(layout.rules),
    )
