"""Pictures as one page that needs no other file: page.html with its style, its scripts and the data
written into it.

The data are columns of numbers with a row for each box. The scripts draw them on a canvas: page.js
has what the schedules on a page share, timeline.js draws one of them, and overlays.js draws what
lies over its boxes.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from schedlang.report.views import palette
from schedlang.report.views.picture import Picture
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.naming import Names

_HERE = Path(__file__).parent


def page(pictures: Sequence[Picture]) -> str:
    """The page, with the schedules side by side on one axis of time."""
    title = " and ".join(picture.title for picture in pictures)
    data = json.dumps([_data(picture) for picture in pictures], separators=(",", ":"))
    return Template(_read("page.html")).substitute(
        title=escape(title),
        style=_read("page.css"),
        # In a text of the data, `</script>` would end the element that it is in.
        data=data.replace("</", "<\\/"),
        script="".join(map(_read, ("timeline.js", "overlays.js", "page.js"))),
    )


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _data(picture: Picture) -> dict[str, Any]:
    """The data of a picture; timeline.js says what it reads."""
    timeline = picture.timeline
    layout = picture.layout
    names = Names(layout)
    units = range(max(map(layout.units, range(len(layout.placement)))))
    return {
        "title": picture.title,
        "figures": f"makespan {timeline.makespan:.10g}, {timeline.bubble_over_makespan:.1%} idle",
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
        "boxes": _columns(picture),
        "arrows": [list(ends) for ends in zip(*picture.arrows, strict=True)] or [[], []],
        "memory": [
            [[_number(time) for time, _ in steps], [_number(amount) for _, amount in steps]]
            for steps in picture.memory
        ],
        "lines": [[line.where, line.text] for line in picture.lines],
    }


def _columns(picture: Picture) -> dict[str, list[Any]]:
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
