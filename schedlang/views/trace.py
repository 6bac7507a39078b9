"""A picture as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: the Trace Event Format, as JSON.

A rank is a process with a thread for its ops, one for its copies and a counter of its memory; what crosses ranks is a
flow arrow. One unit of time is a millisecond there.
"""

import json
from collections.abc import Iterator
from typing import Any

from schedlang.views import palette
from schedlang.views.picture import Box, Picture

_MICROSECONDS = 1000.0
_OPS, _COPIES = 0, 1
#: An arrow starts within its slice: at the slice's very end, viewers no longer find it.
_BEFORE_END = 0.001

_Event = dict[str, Any]


def trace(picture: Picture) -> str:
    """The document, an event a line."""
    events = [*_names(picture), *_slices(picture), *_flows(picture), *_memory(picture)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    title = json.dumps({"schedule": picture.title, "time": "1 unit is 1 ms"})
    return f'{{"displayTimeUnit":"ms","otherData":{title},"traceEvents":[\n{lines}\n]}}\n'


def _names(picture: Picture) -> Iterator[_Event]:
    for rank in range(len(picture.ops)):
        stages = ", ".join(map(str, picture.layout.stages_of(rank)))
        yield _about("process_name", rank, _OPS, name=f"rank {rank} (stages {stages})")
        yield _about("process_sort_index", rank, _OPS, sort_index=rank)
        yield _about("thread_name", rank, _OPS, name="ops")
        if picture.has_copies:
            yield _about("thread_name", rank, _COPIES, name="copies")


def _about(what: str, rank: int, thread: int, **args: Any) -> _Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _slices(picture: Picture) -> Iterator[_Event]:
    """One slice per box, with what hovering shows elsewhere."""
    for box, thread in _threads(picture):
        args = {"stage": box.bar.stage, "microbatch": box.label, "weights": box.version,
                "source": picture.places[box.place].where}  # fmt: skip
        yield {
            "ph": "X", "name": str(box.bar), "cat": palette.NAMES[box.bar.kind], "pid": box.rank, "tid": thread,
            "ts": box.bar.start * _MICROSECONDS, "dur": (box.bar.end - box.bar.start) * _MICROSECONDS, "args": args,
        }  # fmt: skip


def _threads(picture: Picture) -> list[tuple[Box, int]]:
    """All boxes, in the order in which arrows count them, with their threads."""
    rows = [(row, thread) for thread, rows in ((_OPS, picture.ops), (_COPIES, picture.copies)) for row in rows]
    return [(box, thread) for row, thread in rows for box in row]


def _flows(picture: Picture) -> Iterator[_Event]:
    """From the end of what made something to the start of what needed it on another rank."""
    boxes = _threads(picture)
    for number, (source, target) in enumerate(picture.arrows):
        (made, thread), (needed, other) = boxes[source], boxes[target]
        if made.rank != needed.rank:
            start = max(made.bar.end * _MICROSECONDS - _BEFORE_END, made.bar.start * _MICROSECONDS)
            common = {"name": "transfer", "cat": "transfer", "id": number}
            yield {"ph": "s", **common, "pid": made.rank, "tid": thread, "ts": start}
            yield {"ph": "f", "bp": "e", **common, "pid": needed.rank, "tid": other,
                   "ts": needed.bar.start * _MICROSECONDS}  # fmt: skip


def _memory(picture: Picture) -> Iterator[_Event]:
    for rank, steps in enumerate(picture.memory):
        for time, amount in steps:
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": time * _MICROSECONDS, "args": {"held": amount}}
