"""Plans and executions in a notebook: a line of text, and the picture."""

from html import escape

from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.report.views.picture import lay_out
from schedlang.report.views.svg import svg

#: The most actions that are drawn: a notebook keeps the picture in its file, and of more ops than
#: that nobody reads the numbers.
MOST_ACTIONS = 20_000


def html(shown: Plan | Execution) -> str | None:
    """A plan with its execution at unit costs or its program's, or an execution; None for one that
    is not of a plan.
    """
    plan = shown.schedule if isinstance(shown, Execution) else shown
    if not isinstance(plan, Plan):
        return None
    if sum(map(len, plan.ranks)) > MOST_ACTIONS:
        way_out = 'write_view(plan, simulate(plan), "plan.html") draws it on a page'
        return _block(f"{shown!r}: {way_out}")
    execution = shown if isinstance(shown, Execution) else simulate(plan)
    return _block(repr(shown), svg(lay_out(plan, execution)))


def _block(text: str, picture: str = "") -> str:
    return (
        f'<div><div style="font-family: monospace">{escape(text)}</div>{picture}</div>'
    )
