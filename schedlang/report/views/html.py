"""Pictures as one page that needs no other file: page.html with its style, its scripts and the data
written into it.

The data are what a schedule is called and how it looks, and packed columns of numbers with a row
for each box (packing.py). The scripts stand in page/, each with what it does in its first lines.
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

import numpy as np

from schedlang.report.alignment import Change, align
from schedlang.report.bubbles.attribution import CAUSES
from schedlang.report.views import palette
from schedlang.report.views.boxes import Box
from schedlang.report.views.causes import PARTS, Causes, causes_of
from schedlang.report.views.packing import Packer, Ticks
from schedlang.report.views.picture import Picture
from schedlang.schedule.arrays import counts_of
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.naming import Names

_HERE = Path(__file__).parent / "page"
#: The scripts, in the order in which they are put together.
_SCRIPTS = (
    "text.js",
    "data.js",
    "schedule.js",
    "waits.js",
    "looks.js",
    "timeline.js",
    "rows.js",
    "bands.js",
    "lanes.js",
    "memory.js",
    "overlays.js",
    "measured.js",
    "svg.js",
    "tip.js",
    "state.js",
    "export.js",
    "page.js",
    "served.js",
)


def page(pictures: Sequence[Picture], served: dict[str, Any] | None = None) -> str:
    """The page, with the schedules on one axis of time; of two it is marked what differs between
    them.

    A page that is `served` has a slider for each of the `parameters` of its program, and says what
    is `wrong` with that; it asks for new data when the program changes.
    """
    title = " and ".join(picture.title for picture in pictures) or "schedlang"
    return Template(_read("page.html")).substitute(
        title=escape(title),
        style=_read("page.css"),
        looks=_written(_looks()),
        data=_written(page_data(pictures)),
        served=_written(served),
        script="".join(map(_read, _SCRIPTS)),
    )


def page_data(pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """The data of all schedules on a page."""
    marks = marks_of(*pictures) if len(pictures) == 2 else [[] for _ in pictures]
    both = zip(pictures, marks, _roles(pictures), strict=True)
    return [_data(picture, of_picture, role) for picture, of_picture, role in both]


def _roles(pictures: Sequence[Picture]) -> list[str]:
    """For a run and its prediction which is which; nothing for other pictures."""
    measured = [picture.measured for picture in pictures]
    if len(pictures) != 2 or all(measured) or not any(measured):
        return [""] * len(pictures)
    return ["measured" if each else "predicted" for each in measured]


def _written(data: Any) -> str:
    """Data as they stand in an element of the page: in their text, `</script>` would end it."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


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
            # The orders of a rank as texts are: equal runs, and between them what moved, went or
            # came.
            for run in align(_names(before, row), _names(after, row_after)):
                for places, of_side in zip(
                    (run.before, run.after), of_row, strict=True
                ):
                    of_side[places.start : places.stop] = [_MARKS[run.change]] * len(
                        places
                    )
            for of_picture, of_side in zip(marks, of_row, strict=True):
                of_picture += of_side
    return marks


def _names(picture: Picture, row: Sequence[Box]) -> list[str]:
    """The names of boxes, which are the same for the same actions of any picture."""
    names = Names(picture.layout)
    return [names.action(*box.bar[:3]) for box in row]


def _figures(picture: Picture, marks: Sequence[Mark]) -> str:
    """What stands beside the title of a picture."""
    if not marks:
        return picture.figures
    count = Counter(marks)
    return f"{picture.figures}; ops only here: {count[Mark.ONLY_HERE]}, moved: {count[Mark.MOVED]}"


def _looks() -> dict[str, Any]:
    """How idle time of each cause looks and what it means, and the patterns."""
    return {
        "causes": [[cause, CAUSES[cause], *palette.IDLE[cause]] for cause in CAUSES],
        "patterns": palette.PATTERNS,
        "tile": palette.TILE,
        "shares": palette.IDLE_SHARES,
        "parts": PARTS,
    }


def _data(picture: Picture, marks: Sequence[Mark], role: str) -> dict[str, Any]:
    """The data of a picture; data.js and schedule.js say what they read."""
    timeline = picture.timeline
    layout = picture.layout
    names = picture.names
    units = range(max(map(layout.units, range(len(layout.placement)))))
    causes = causes_of(picture)
    chunk_of = {box.bar.stage: box.chunk for box in picture.boxes}
    return {
        "title": f"{picture.title}, predicted"
        if role == "predicted"
        else picture.title,
        "role": role,
        "notes": picture.notes,
        "figures": picture.figures if role else _figures(picture, marks),
        "wrong": picture.wrong_texts,
        "wrongRanks": picture.wrong_ranks,
        "seconds": picture.seconds,
        "unitText": picture.share.axis if picture.share else "",
        "memoryUnit": picture.memory_unit,
        "idle": timeline.idle,
        "slices": layout.slices,
        "stages": [names.stage(stage) for stage in range(len(layout.placement))],
        "chunks": [chunk_of.get(stage, 0) for stage in range(len(layout.placement))],
        "microbatches": [names.microbatch(unit) for unit in units],
        "labels": [names.label(unit) for unit in units],
        "prefixes": names.prefixes,
        "labelNotes": [note for note in (names.tags_note, names.label_note) if note],
        "stagesBeside": []
        if names.are_ranks
        else [names.stages_beside(rank) for rank in range(len(picture.ops))],
        "pipelines": [
            [pipeline.name, pipeline.start, pipeline.stop]
            for pipeline in layout.pipelines
        ],
        "kinds": {int(kind): _kind(kind, picture.chunks) for kind in picture.kinds},
        "versions": palette.VERSIONS if picture.has_versions else [],
        "causeTimes": [sum(times) for times in causes.idle.of_ranks().values()],
        # A page is sent to others, who have the files elsewhere.
        "resources": [lane.resource for lane in picture.lanes],
        "lines": [[_file_name(line.where), line.text] for line in picture.lines],
        "last": causes.last,
        **_packed(picture, marks, causes),
    }


def _file_name(where: str) -> str:
    """A place in a file, without the folders."""
    return where.replace("\\", "/").rpartition("/")[2]


def _packed(picture: Picture, marks: Sequence[Mark], causes: Causes) -> dict[str, Any]:
    """The columns of a picture, packed together, in the order in which data.js has them; and the
    ticks that times and amounts of memory count.
    """
    boxes = picture.boxes
    ranks = range(len(picture.ops))
    starts = np.array([box.bar.start for box in boxes], float)
    ends = np.array([box.bar.end for box in boxes], float)
    idle = causes.idle
    path = causes.path
    path_starts = np.array([part.start for part, _ in path], float)
    path_ends = np.array([part.end for part, _ in path], float)
    memory_times = np.array(
        [time for steps in picture.memory for time, _ in steps], float
    )
    amounts = np.array(
        [amount for steps in picture.memory for _, amount in steps], float
    )
    components = [box for lane in picture.lanes for row in lane.rows for box in row]
    lane_starts = np.array([box.bar.start for box in components], float)
    lane_ends = np.array([box.bar.end for box in components], float)
    times = (
        starts,
        ends,
        causes.delay,
        idle.start,
        idle.end,
        path_starts,
        path_ends,
        memory_times,
        lane_starts,
        lane_ends,
    )
    ticks = Ticks.of(times)
    memory_ticks = Ticks.of([amounts])
    sources, targets = np.array(picture.arrows, np.int64).reshape(-1, 2).T
    columns = {
        "ops": list(map(len, picture.ops)),
        "copies": list(map(len, picture.copies)) if picture.has_copies else [],
        "kind": [box.bar.kind for box in boxes],
        "stage": [box.bar.stage for box in boxes],
        "unit": [box.bar.microbatch for box in boxes],
        "start": ticks.count(starts),
        "length": ticks.count(ends) - ticks.count(starts),
        "line": [box.line for box in boxes],
        "version": [box.version for box in boxes],
        "overlap": [box.overlap for box in boxes],
        "mark": list(map(int, marks)),
        # Boxes before the one that waits, or needs: that repeats along a rank.
        "makerBefore": np.where(
            causes.maker < 0, 0, np.arange(len(boxes)) - causes.maker
        ),
        "delay": ticks.count(causes.delay),
        "needed": counts_of(targets, minlength=len(boxes)),
        "needBefore": targets - sources,
        "idleOf": counts_of(idle.rank, minlength=len(ranks)),
        "idleStart": ticks.count(idle.start),
        "idleEnd": ticks.count(idle.end),
        "cause": idle.cause,
        "behind": causes.behind,
        "about": idle.about,
        "other": idle.other,
        "pathPart": [PARTS.index(part.kind) for part, _ in path],
        "pathBox": [box for _, box in path],
        "pathStart": ticks.count(path_starts),
        "pathEnd": ticks.count(path_ends),
        "laneOf": [len(row) for lane in picture.lanes for row in lane.rows],
        "laneBox": _box_numbers(components, boxes),
        "laneStart": ticks.count(lane_starts),
        "laneEnd": ticks.count(lane_ends),
        "memoryOf": [len(steps) for steps in picture.memory],
        "memoryTime": ticks.count(memory_times),
        "memoryAmount": memory_ticks.count(amounts),
    }
    packer = Packer()
    return {
        "tick": [ticks.numerator, ticks.denominator],
        "memoryTick": [memory_ticks.numerator, memory_ticks.denominator],
        "columns": [[name, packer.whole(column)] for name, column in columns.items()],
        "packed": packer.packed(),
    }


def _box_numbers(components: Sequence[Box], boxes: Sequence[Box]) -> list[int]:
    """For each component of an op the number of the op's own box."""
    # Most pictures have none.
    if not components:
        return []
    numbers = {(box.rank, *box.bar[:3]): number for number, box in enumerate(boxes)}
    return [numbers[component.rank, *component.bar[:3]] for component in components]


def _kind(kind: Kind, chunks: int) -> dict[str, Any]:
    """How boxes of a kind look, and what they are called."""
    # For each chunk the colour of a box, and that of what is written on it.
    fills = [palette.fill(kind, chunk, chunks) for chunk in range(chunks)]
    return {
        "letters": kind.name,
        "name": OPS[kind].name,
        "fills": fills,
        "inks": [palette.ink(fill) for fill in fills],
        "lines": [palette.lines(fill) for fill in fills],
        "pattern": OPS[kind].pattern,
        "hatched": OPS[kind].is_hatched,
        "step": OPS[kind].is_update,
    }
