"""A picture as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: the Trace Event
Format, as JSON.

A rank is a process with a thread for its ops, one for its copies and a counter of its memory; what
crosses ranks is a flow arrow. One unit of time is a millisecond there; what was measured takes the
time that it took.
"""

import json
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from schedlang.report.views import palette
from schedlang.report.views.picture import Box, Picture
from schedlang.schedule.actions import is_copy

#: An arrow starts within its slice: at the slice's very end, viewers no longer find it.
_BEFORE_END = 0.001

_Event = dict[str, Any]


@frozen
class _Thread:
    """Viewers keep process 0 for what is idle, and want thread numbers that no other process
    has.
    """

    rank: int
    copies: bool

    def ids(self) -> dict[str, int]:
        return {"pid": self.rank + 1, "tid": 2 * self.rank + 1 + self.copies}


def _microseconds(picture: Picture) -> float:
    """In a unit of time."""
    return 1.0 if picture.measured else 1000.0


def trace(picture: Picture) -> str:
    """The document, an event a line."""
    events = [*_names(picture), *_slices(picture), *_flows(picture), *_memory(picture)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    about = {"schedule": picture.title} | ({} if picture.measured else {"time": "1 unit is 1 ms"})
    title = json.dumps(about)
    return f'{{"displayTimeUnit":"ms","otherData":{title},"traceEvents":[\n{lines}\n]}}\n'


def _names(picture: Picture) -> Iterator[_Event]:
    for rank in range(len(picture.ops)):
        stages = ", ".join(map(str, picture.layout.stages_of(rank)))
        ops = _Thread(rank, copies=False)
        yield _about(
            ops, "process_name", name=f"rank {rank} (stage{'s' if ',' in stages else ''} {stages})"
        )
        yield _about(ops, "process_sort_index", sort_index=rank)
        yield _about(ops, "thread_name", name="ops")
        if picture.has_copies:
            yield _about(_Thread(rank, copies=True), "thread_name", name="copies")


def _about(thread: _Thread, what: str, **args: Any) -> _Event:
    return {"ph": "M", "name": what, **thread.ids(), "args": args}


def _slices(picture: Picture) -> Iterator[_Event]:
    """One slice per box, with what hovering shows elsewhere."""
    scale = _microseconds(picture)
    for box, thread in _threads(picture):
        args = {
            "stage": box.bar.stage,
            "microbatch": box.label,
            "weights": box.version,
            "source": picture.places[box.place].where,
        }
        yield {
            "ph": "X",
            "name": str(box.bar),
            "cat": palette.NAMES[box.bar.kind],
            **thread.ids(),
            "ts": box.bar.start * scale,
            "dur": (box.bar.end - box.bar.start) * scale,
            "args": args,
        }


def _threads(picture: Picture) -> list[tuple[Box, _Thread]]:
    """All boxes, in the order in which arrows count them, with their threads."""
    return [(box, _Thread(box.rank, is_copy(box.bar.kind))) for box in picture.boxes]


def _flows(picture: Picture) -> Iterator[_Event]:
    """From the end of what made something to the start of what needed it on another rank."""
    boxes = _threads(picture)
    scale = _microseconds(picture)
    for number, (source, target) in enumerate(picture.arrows):
        (made, maker) = boxes[source]
        (needed, user) = boxes[target]
        if made.rank != needed.rank:
            start = max(made.bar.end * scale - _BEFORE_END, made.bar.start * scale)
            common = {"name": "transfer", "cat": "transfer", "id": number}
            yield {"ph": "s", **common, **maker.ids(), "ts": start}
            yield {"ph": "f", "bp": "e", **common, **user.ids(), "ts": needed.bar.start * scale}


def _memory(picture: Picture) -> Iterator[_Event]:
    scale = _microseconds(picture)
    for rank, steps in enumerate(picture.memory):
        # The last of the steps at one time: viewers draw the others as dents.
        for time, amount in dict(steps).items():
            yield {
                "ph": "C",
                "name": "memory",
                "pid": rank + 1,
                "ts": time * scale,
                "args": {"held": amount},
            }
