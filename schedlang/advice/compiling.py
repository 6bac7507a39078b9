"""Compiling for a person: from the cache if it was compiled before, with advice if it fails."""

from collections.abc import Mapping
from typing import Any

from schedlang.compiler import ClaimError, compile_tree
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.files.cache import PLAN, cached
from schedlang.language.loading import load
from schedlang.plan.plan import Plan
from schedlang.schedule.costs import UNIT, Costs


def compile_with_advice(
    source: Source, params: Mapping[str, int], costs: Costs = UNIT, **choices: Any
) -> Plan:
    """The plan of a program; a CompileError comes with advice: repairs, and the smallest size.

    Advice is for the costs that the program itself gives, so with `costs` from elsewhere there is
    none, nor for claims that do not hold. `choices` are those of `compile_tree`.
    """
    try:
        whole, tree = load(source)
        # All that decides about the plan; the path is in its messages.
        key = (
            whole.path,
            whole.text,
            whole.imports,
            sorted(params.items()),
            costs,
            sorted(choices.items()),
        )

        def make() -> Plan:
            return compile_tree(whole, tree, dict(params), costs, **choices)

        return cached(PLAN, key, make)
    except ClaimError:
        raise
    except CompileError as error:
        if costs != UNIT:
            raise
        from schedlang.advice.advice import advise

        raise advise(error, source, dict(params), **choices) from None
