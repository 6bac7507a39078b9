"""Passes turn a schedule into another one: they reorder a rank's ops, add some or drop some."""

from collections.abc import Callable

from attrs import evolve

from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import (
    CompileError,
    Diagnostic,
    number_text,
    values_text,
)
from schedlang.diagnostics.source import Label
from schedlang.passes.fill import fill_weights, fill_within
from schedlang.passes.gather import gather
from schedlang.passes.greedy import greedy
from schedlang.passes.recompute import recompute
from schedlang.passes.reorder import reorder
from schedlang.passes.squeeze import squeeze
from schedlang.schedule.schedule import Pass, Schedule


def _fill(schedule: Schedule, limit: float | None = None) -> Schedule | None:
    if limit is None:
        return fill_weights(schedule)
    return fill_within(schedule, float(limit))


#: Each pass by its word in a program. It takes a schedule and the values that the program gives. It
#: raises ValueError if it cannot change this schedule, and returns None if it found no order that
#: stays within the memory limit, its first value.
PASSES: dict[str, Callable[..., Schedule | None]] = {
    "squeeze": squeeze,
    "reorder": reorder,
    "greedy": greedy,
    "recompute": recompute,
    "gather": gather,
    "fill": _fill,
}


def run_passes(schedule: Schedule) -> Schedule:
    """Apply a schedule's passes one after the other; CompileError if one of them fails."""
    passes = schedule.passes
    schedule = evolve(schedule, passes=())
    for number, each in enumerate(passes, 1):
        if schedule.stream:
            message = "a pass changes the order of one update: `steady` has none"
            raise _error(schedule, each, "pass", message)
        of_all = f"pass {number} of {len(passes)}, `{each.name}`"
        doing(f"{schedule.name}: {of_all}, on {len(schedule.columns):,} ops")
        try:
            changed = PASSES[each.name](schedule, *each.values)
        except ValueError as error:
            message = f"the ops cannot be moved: {error}"
            raise _error(schedule, each, "pass", message) from None
        if changed is None:
            limit = number_text(each.values[0])
            message = f"no order was found that holds at most {limit}"
            help = "give it more, or write an order that holds less"
            raise _error(schedule, each, "memory", message, help)
        schedule = changed
    return schedule


def _error(
    schedule: Schedule, each: Pass, code: str, message: str, help: str | None = None
) -> CompileError:
    """An error that points at the pass in the program."""
    label = Label(schedule.spans[each.location])
    notes = (f"here with {values_text(schedule.params)}",)
    return CompileError(
        [Diagnostic(code, message, (label,), schedule.source, notes, help)]
    )
