"""What the playground shows of a program: the compiler's answers as JSON, piece by piece, for a
page that has this package in the browser.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import evolve

from schedlang.compiler import wrong_on
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.rendering import render
from schedlang.diagnostics.source import Source
from schedlang.extras.editor.analysis import (
    Analysis,
    chosen_of,
    compiled,
    imports_of,
    read,
)
from schedlang.extras.editor.answers import fix, message, own_place
from schedlang.extras.editor.colours import coloured
from schedlang.files.package import GALLERY
from schedlang.files.programs import names, text_of, title
from schedlang.language.expand import parameters
from schedlang.plan.plan import Plan
from schedlang.proof.prove import ideal_execution, simulate
from schedlang.report.bubbles.explanation import explained, explanation_text
from schedlang.report.figures import figure_rows
from schedlang.report.views import lay_out
from schedlang.report.views.html import page_data
from schedlang.schedule.transports import NAMES, PORTABLE

#: What messages call the program.
_FILE = "program.sched"
_SMALLEST = """
schedule s { param ranks = 1  param microbatches = 1  rank r { F(next)  B(next) } }
"""


def begin() -> str:
    """The programs that can be opened: the name, what it is, and the text of each. From then on, a
    program may import what those of the gallery do, and the first answer takes no longer than
    others.
    """
    # Imports are looked for beside the program, which has no file here.
    os.chdir(GALLERY)
    # What is imported late is imported now, and not at the first key.
    list(answers(_SMALLEST, {}))
    # What is loaded is no garbage, and to look through it again and again takes time.
    gc.freeze()
    texts = {name: text_of(name) for name in names()}
    programs = [
        {"name": name, "title": title(text), "text": text}
        for name, text in texts.items()
    ]
    return json.dumps(programs)


def answers(text: str, params: Mapping[str, int]) -> Iterator[str]:
    """What is known of a text, the first thing that a reader looks at first: its colours; what is
    wrong; the picture, the figures, the idle time; and a verdict for each transport.

    Each answer is an object; its first key says what it is. Places are counted in UTF-16 units, as
    pages do. Of the parameters, those count that the program has.
    """
    units = _Units(text)
    for answer in _answers(Source(_FILE, text), params, units):
        yield json.dumps(answer, separators=(",", ":"))


class _Units:
    """Counts the UTF-16 units before the characters of a text."""

    def __init__(self, text: str) -> None:
        self._before = [0]
        for character in text:
            self._before.append(
                self._before[-1] + (2 if ord(character) > 0xFFFF else 1)
            )

    def __call__(self, offset: int) -> int:
        """Of the text of an imported file, which stands behind, the end of the text."""
        return self._before[min(offset, len(self._before) - 1)]


def _answers(
    source: Source, params: Mapping[str, int], units: _Units
) -> Iterator[dict[str, Any]]:
    pieces = coloured(source.text)
    yield {
        "colours": [
            [units(start), units(end), colour.value] for start, end, colour in pieces
        ]
    }
    analysis = Analysis(source, imports=imports_of(source))
    try:
        whole, tree = read(source)
        if not tree.span.end:
            raise CompileError([_no_schedule(source)])
    except CompileError as error:
        yield _diagnosed(analysis, error.diagnostics, units)
        return
    analysis = evolve(analysis, source=whole)
    # What is wrong with them is said when it is compiled.
    with suppress(CompileError):
        yield {"parameters": parameters(tree, chosen_of(tree, params))}
    for diagnostics, plan in compiled(source, whole, tree, params):
        yield _diagnosed(analysis, diagnostics, units)
        if plan is not None:
            yield from _of_plan(plan)


def _no_schedule(source: Source) -> Diagnostic:
    """What is wrong with a text that could only be imported."""
    help = "a program is `schedule name { … }`"
    return Diagnostic("syntax", "there is no schedule", source=source, help=help)


def _of_plan(plan: Plan) -> Iterator[dict[str, Any]]:
    """What there is to see of a program that is proved."""
    picture = lay_out(plan, simulate(plan))
    # The picture first: it is there soonest, and what people look at. Verdicts come last, since
    # each transport is a proof of its own.
    yield {"schedules": page_data([picture])}
    ideal = ideal_execution(plan)
    # A plan that is proved comes to its end.
    assert ideal is not None
    yield {"figures": figure_rows(plan, picture.account, ideal.timeline.makespan)}
    yield {"bubbles": explanation_text(explained(plan, picture.account))}
    # For the first of the names it is proved by now.
    others = wrong_on(plan, [name for name in NAMES if name != PORTABLE], plan.kernels)
    verdicts = {PORTABLE: None} | {
        name: _verdict(found) for name, found in others.items()
    }
    yield {"verdicts": list(verdicts.items())}


def _verdict(diagnostics: list[Diagnostic]) -> str | None:
    """The first thing that is wrong on a transport; None where the program is proved."""
    wrong = (each for each in diagnostics if each.severity == "error")
    return next((f"error[{each.code}]: {each.message}" for each in wrong), None)


def _diagnosed(
    analysis: Analysis, diagnostics: Sequence[Diagnostic], units: _Units
) -> dict[str, Any]:
    """What is wrong: each mistake at its place, and all of them as the command line prints them."""
    return {
        "diagnostics": [_diagnostic(analysis, each, units) for each in diagnostics],
        "text": render(list(diagnostics), "text") if diagnostics else "",
    }


def _diagnostic(
    analysis: Analysis, diagnostic: Diagnostic, units: _Units
) -> dict[str, Any]:
    place = own_place(analysis, diagnostic)
    repair = fix(analysis, diagnostic)
    edits = [
        {
            "from": units(edit.span.start),
            "to": units(edit.span.end),
            "insert": edit.text,
        }
        for edit in (repair.edits if repair else ())
    ]
    return {
        "from": units(place.start),
        "to": units(place.end),
        "severity": diagnostic.severity,
        "code": diagnostic.code,
        "message": message(diagnostic),
        "repair": {"text": repair.text, "edits": edits} if repair else None,
    }
