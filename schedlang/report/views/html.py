"""Pictures as one page that needs no other file: page.html with its style, its scripts and the data
written into it.

The data are columns of numbers with a row for each box. The scripts draw them on a canvas: page.js
has what the schedules on a page share, timeline.js draws one of them, and overlays.js draws what
lies over its boxes.
"""

import json
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from html import escape
from itertools import zip_longest
from pathlib import Path
from string import Template
from typing import Any

from schedlang.report.alignment import Change, align
from schedlang.report.views import palette
from schedlang.report.views.picture import Box, Picture
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.naming import Names

_HERE = Path(__file__).parent


def page(pictures: Sequence[Picture]) -> str:
    """The page, with the schedules side by side on one axis of time; of two it is marked what
    differs between them.
    """
    title = " and ".join(picture.title for picture in pictures)
    marks = marks_of(*pictures) if len(pictures) == 2 else [[] for _ in pictures]
    both = zip(pictures, marks, strict=True)
    data = json.dumps([_data(*each) for each in both], separators=(",", ":"))
    return Template(_read("page.html")).substitute(
        title=escape(title),
        style=_read("page.css"),
        # In a text of the data, `</script>` would end the element that it is in.
        data=data.replace("</", "<\\/"),
        script="".join(map(_read, ("timeline.js", "overlays.js", "page.js"))),
    )


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


class Mark(IntEnum):
    """What a box is in comparison with another picture."""

    SAME, MOVED, ONLY_HERE = range(3)


#: What boxes of a run are, in either picture.
_MARKS = {
    Change.EQUAL: Mark.SAME,
    Change.MOVED: Mark.MOVED,
    Change.REMOVED: Mark.ONLY_HERE,
    Change.ADDED: Mark.ONLY_HERE,
}


def marks_of(before: Picture, after: Picture) -> list[list[Mark]]:
    """What every box is, of two pictures: by the order of the ops, or copies, of each rank."""
    marks: list[list[Mark]] = [[], []]
    for rows, rows_after in ((before.ops, after.ops), (before.copies, after.copies)):
        for row, row_after in zip_longest(rows, rows_after, fillvalue=()):
            of_row = [[Mark.SAME] * len(row), [Mark.SAME] * len(row_after)]
            for run in align(_names(before, row), _names(after, row_after)):
                for places, of_side in zip((run.before, run.after), of_row, strict=True):
                    of_side[places.start : places.stop] = [_MARKS[run.change]] * len(places)
            for of_picture, of_side in zip(marks, of_row, strict=True):
                of_picture += of_side
    return marks


def _names(picture: Picture, row: Sequence[Box]) -> list[str]:
    """The names of boxes, which are the same for the same actions of any picture."""
    names = Names(picture.layout)
    return [names.action(*box.bar[:3]) for box in row]


def _figures(picture: Picture, marks: Sequence[Mark]) -> str:
    """What stands beside the title of a picture."""
    timeline = picture.timeline
    figures = f"makespan {timeline.makespan:.10g}, {timeline.bubble_over_makespan:.1%} idle"
    if not marks:
        return figures
    count = Counter(marks)
    return f"{figures}; ops only here: {count[Mark.ONLY_HERE]}, moved: {count[Mark.MOVED]}"


def _data(picture: Picture, marks: Sequence[Mark]) -> dict[str, Any]:
    """The data of a picture; timeline.js says what it reads."""
    timeline = picture.timeline
    layout = picture.layout
    names = Names(layout)
    units = range(max(map(layout.units, range(len(layout.placement)))))
    return {
        "title": picture.title,
        "figures": _figures(picture, marks),
        "idle": [f"{idle:.0%} idle" for idle in timeline.idle],
        "slices": layout.slices,
        "stages": [names.stage(stage) for stage in range(len(layout.placement))],
        "microbatches": [names.microbatch(unit) for unit in units],
        "labels": [names.label(unit) for unit in units],
        "pipelines": [
            [pipeline.name, pipeline.start, pipeline.stop] for pipeline in layout.pipelines
        ],
        "kinds": {int(kind): _kind(kind, picture.chunks) for kind in picture.kinds},
        "versions": palette.VERSIONS if picture.has_versions else [],
        "ops": [len(row) for row in picture.ops],
        "copies": [len(row) for row in picture.copies] if picture.has_copies else [],
        "boxes": _columns(picture, marks),
        "arrows": [list(ends) for ends in zip(*picture.arrows, strict=True)] or [[], []],
        "memory": [
            [[_number(time) for time, _ in steps], [_number(amount) for _, amount in steps]]
            for steps in picture.memory
        ],
        "lines": [[line.where, line.text] for line in picture.lines],
    }


def _columns(picture: Picture, marks: Sequence[Mark]) -> dict[str, list[Any]]:
    """The boxes, as a column for each property."""
    boxes = picture.boxes
    columns: dict[str, list[Any]] = {
        "kind": [int(box.bar.kind) for box in boxes],
        "stage": [box.bar.stage for box in boxes],
        "chunk": [box.chunk for box in boxes],
        "unit": [box.bar.microbatch for box in boxes],
        "start": [_number(box.bar.start) for box in boxes],
        "length": [_number(box.bar.end - box.bar.start) for box in boxes],
        "line": [box.line for box in boxes],
        "version": [box.version for box in boxes],
        "overlap": [box.overlap for box in boxes],
        "mark": list(map(int, marks)),
    }
    # A column of zeros is left out; the script fills it in.
    return {name: column for name, column in columns.items() if any(column)}


def _kind(kind: Kind, chunks: int) -> dict[str, Any]:
    """How boxes of a kind look, and what they are called."""
    # For each chunk the colour of a box, and that of what is written on it.
    fills = [palette.fill(kind, chunk, chunks) for chunk in range(chunks)]
    return {
        "letters": kind.name,
        "name": OPS[kind].name,
        "fills": fills,
        "inks": [palette.ink(fill) for fill in fills],
        "hatched": kind in palette.HATCHED,
        "step": kind == Kind.U,
    }


def _number(value: float) -> float:
    """A number with as many digits as can be seen, which keeps the page small."""
    rounded = float(f"{value:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
