"""Plans and executions in a notebook: a line of text, and the page of `schedc view` in a frame; and
`%%sched`, the magic of a cell that is a program.
"""

import shlex
from html import escape
from typing import Any

from attrs import frozen

from schedlang.compiler import compile
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.files.sources import source_of
from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.python.sweep import load
from schedlang.report.model_share import MODEL, STAGE, at_shares
from schedlang.report.views.html import page
from schedlang.report.views.picture import lay_out
from schedlang.schedule.costs import UNIT

#: The most actions that are drawn: a notebook keeps the pages of all its cells in its file.
MOST_ACTIONS = 20_000
# The height of a frame, in pixels: for what stands around the rows, for a row, and at most.
_AROUND = 260
_ROW = 46
_HIGHEST = 720


def html(shown: Plan | Execution) -> str | None:
    """A plan with its execution at unit costs or its program's, or an execution; None for one that
    is not of a plan.
    """
    schedule = shown.schedule if isinstance(shown, Execution) else shown
    return view(shown)._repr_html_() if isinstance(schedule, Plan) else None


@frozen
class View:
    """Plans and executions on one page, which a notebook shows."""

    shown: tuple[Plan | Execution, ...]

    @property
    def plans(self) -> list[Plan]:
        """The plans of all that is shown."""
        schedules = (
            each.schedule if isinstance(each, Execution) else each
            for each in self.shown
        )
        return [plan for plan in schedules if isinstance(plan, Plan)]

    def _repr_html_(self) -> str:
        text = "; ".join(map(repr, self.shown))
        if sum(len(rank) for plan in self.plans for rank in plan.ranks) > MOST_ACTIONS:
            way_out = 'write_view(plan, simulate(plan), "plan.html") draws it on a page'
            return _block(f"{text}: {way_out}")
        executions = [
            each if isinstance(each, Execution) else simulate(each)
            for each in self.shown
        ]
        # Executions have costs of their own; plans are compared at those of their programs.
        has_costs = any(isinstance(each, Execution) for each in self.shown)
        compared = at_shares(executions, UNIT, STAGE if has_costs else MODEL)
        pictures = [
            lay_out(plan, execution, share=share)
            for plan, (execution, share) in zip(self.plans, compared, strict=True)
        ]
        ranks = max(len(plan.ranks) for plan in self.plans)
        height = min(_AROUND + _ROW * ranks, _HIGHEST)
        return _block(text, _framed(page(pictures), height))


def view(*schedules: Plan | Execution | Source | str) -> View:
    """Schedules side by side in a notebook: programs by their name in the gallery, path or text,
    plans and executions. What two of them do otherwise is marked.
    """
    return View(
        tuple(
            each
            if isinstance(each, Plan | Execution)
            else load(source_of(each, "schedules"))
            for each in schedules
        )
    )


def sched(line: str, cell: str, names: dict[str, Any]) -> Plan | None:
    """What the magic `%%sched` does: compile the program in a cell, and show its picture.

    The line has parameters, `ranks=8`, and maybe a first word, which names the plan for the cells
    that follow. What is wrong with the program is printed, with a repair if one is proved.
    """
    words = shlex.split(line)
    name = words.pop(0) if words and "=" not in words[0] else None
    params: dict[str, int] = {}
    for word in words:
        param, equals, value = word.partition("=")
        if not equals or not value.lstrip("-").isdecimal():
            raise ValueError(f"`{word}` is not NAME=VALUE with a whole number")
        params[param] = int(value)
    try:
        plan = compile(Source("cell", cell), params)
    except CompileError as error:
        print(error)
        return None
    if name is not None:
        names[name] = plan
    return plan


def register(shell: Any) -> None:
    """Give IPython the magic: `%load_ext schedlang` calls it."""

    def magic(line: str, cell: str) -> Plan | None:
        return sched(line, cell, shell.user_ns)

    shell.register_magic_function(magic, "cell", "sched")


def _framed(document: str, height: int) -> str:
    """A page in a frame of its own, so that its style and its names are no others'."""
    return (
        f'<iframe srcdoc="{escape(document)}" sandbox="allow-scripts allow-downloads" '
        f'title="schedules" style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def _block(text: str, picture: str = "") -> str:
    return (
        f'<div><div style="font-family: monospace">{escape(text)}</div>{picture}</div>'
    )
