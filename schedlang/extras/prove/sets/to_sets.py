"""Reads a program as sets, for all sizes at once.

Its Python runs once, with symbols for its sizes, for the rank, and for the rounds of loops. So the
compiler says what a program means; only the numbers are others (`Evaluator`), and both sides of a
condition run (`SymbolicCodegen`).
"""

from __future__ import annotations

from collections.abc import Mapping

from schedlang.extras.prove.sets.declared import Declared
from schedlang.extras.prove.sets.evaluator import Evaluator
from schedlang.extras.prove.sets.isl_functions import everywhere, number, symbol
from schedlang.extras.prove.sets.numbers import Unreadable
from schedlang.extras.prove.sets.open_calls import Calls
from schedlang.extras.prove.sets.rank_order import Orders
from schedlang.extras.prove.sets.statements import UPDATES, Reading
from schedlang.extras.prove.sets.symbolic_code import SymbolicCodegen
from schedlang.language import syntax
from schedlang.language.codegen import generate
from schedlang.language.faults import Fault

#: Why a program with such a pass is not proved.
_SEARCH = (
    "a pass that searches: which order it finds at a size does not follow from the text; each is "
    "proved when it is compiled, and at ranks that are given `schedc check --for "
    "microbatches=any` follows them"
)


def read(tree: syntax.Schedule, given: Mapping[str, int]) -> Reading:
    """Read a program for all sizes that are not `given`; Unreadable if it cannot be read.

    If it cannot be read as it is, microbatches become numbers of two digits, in base `ranks`.
    """
    try:
        return _read(tree, given, False)
    except Unreadable as unreadable:
        if "ranks" in given or "microbatches" in given:
            raise
        try:
            return _read(tree, given, True)
        except Unreadable as in_base:
            # The reason is that of the plainer way, unless two digits might have helped.
            raise (in_base if unreadable.is_large else unreadable) from None


def _check_items(tree: syntax.Schedule) -> None:
    """Unreadable for a program whose order is the work of a pass, or drawn for one size."""
    for item in tree.items:
        match item:
            case syntax.Pass("gather" | "recompute"):
                reason = "a pass that cannot be read for all sizes yet"
                raise Unreadable(reason, item.span)
            case syntax.Pass():
                raise Unreadable(_SEARCH, item.span)
    for item in tree.items:
        if isinstance(item, syntax.Repeated):
            reason = "a building block is drawn for given sizes"
            raise Unreadable(reason, item.interval.span)


def _read(tree: syntax.Schedule, given: Mapping[str, int], in_base: bool) -> Reading:
    _check_items(tree)
    code = generate(tree, frozenset(), False, SymbolicCodegen)
    declared = Declared(
        tree,
        given,
        frozenset(),
        code,
        in_base=in_base,
        evaluator=Evaluator(code.spans, everywhere()),
    )
    declared.run()
    is_stream = bool(code.sites.parts)
    if is_stream:
        declared.narrowed(declared.domain & symbol(UPDATES).ge_set(number(1)))
    declared.lay_out()
    orders = Orders(declared, declared.domain)
    assert isinstance(declared.order, syntax.Rank)
    try:
        orders.read(declared.order)
    except Fault as fault:
        # A mistake that does not depend on any number, such as a second `warmup`.
        raise Unreadable(fault.message, code.spans[fault.location]) from None
    has_slices = "slices" in declared.values
    slices = declared.count_of("slices") if has_slices else number(1)
    calls = Calls(
        code.sites,
        declared.evaluator,
        declared.lines,
        bool(declared.edge_sets or declared.skip_sets),
        slices,
        in_base,
        orders.domain,
        orders.calls,
    )
    statements = calls.statements()
    return Reading(
        tree.name.text,
        tuple([*declared.sizes, UPDATES] if is_stream else declared.sizes),
        in_base,
        orders.domain,
        tuple(declared.lines),
        declared.onward(),
        slices,
        tuple(declared.evaluator.own_stages),
        statements,
        tuple(declared.evaluator.mistakes),
        tuple(declared.claims_for_all),
        is_stream,
        tuple(declared.rules),
    )
