"""A picture as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, in the Trace Event
Format.

A rank is a process. It has a thread for its ops, one for its copies, and a counter of its memory.
What goes from rank to rank is a flow, which viewers draw as an arrow. A unit of time that nobody
has named is a millisecond there; a recorded run has the times that it took.
"""

import json
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from schedlang.report.views.boxes import Box
from schedlang.report.views.picture import Picture
from schedlang.schedule.actions import is_beside
from schedlang.schedule.kinds import OPS
from schedlang.schedule.naming import Names

#: A flow starts so many microseconds before the end of its slice. At the very end, viewers would
#: not find the slice.
_BEFORE_END = 0.001

_Event = dict[str, Any]


@frozen
class _Thread:
    """A thread of a rank: that of its ops, or that of its copies.

    Viewers keep process 0 for idle time, and want thread numbers that no other process has.
    """

    rank: int
    copies: bool

    def ids(self) -> dict[str, int]:
        return {"pid": self.rank + 1, "tid": 2 * self.rank + 1 + self.copies}


def _microseconds(picture: Picture) -> float:
    """How many microseconds a unit of time is; where nobody knows, it is shown as a millisecond."""
    return 1000.0 if picture.seconds is None else picture.seconds * 1e6


def trace(picture: Picture) -> str:
    """The document, with a line for each event."""
    events = [*_names(picture), *_slices(picture), *_flows(picture), *_memory(picture)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    about = {"schedule": picture.title}
    if picture.seconds is None:
        about["time"] = "1 unit is 1 ms"
    head = f'"displayTimeUnit":"ms","otherData":{json.dumps(about)}'
    return f'{{{head},"traceEvents":[\n{lines}\n]}}\n'


def _names(picture: Picture) -> Iterator[_Event]:
    """What processes and threads are called, and in which order they stand."""
    names = Names(picture.layout)
    for rank in range(len(picture.ops)):
        name = f"rank {rank} ({names.stages(picture.layout.stages_of(rank))})"
        ops = _Thread(rank, copies=False)
        yield _about(ops, "process_name", name=name)
        yield _about(ops, "process_sort_index", sort_index=rank)
        yield _about(ops, "thread_name", name="ops")
        if picture.has_copies:
            kinds = {box.bar.kind for row in picture.copies for box in row}
            beside = ", ".join(sorted({OPS[kind].stream for kind in kinds}))
            yield _about(_Thread(rank, copies=True), "thread_name", name=beside)


def _about(thread: _Thread, what: str, **args: Any) -> _Event:
    """An event that only says something about a thread, or its process."""
    return {"ph": "M", "name": what, **thread.ids(), "args": args}


def _slices(picture: Picture) -> Iterator[_Event]:
    """A slice for each box, with what the page shows of it on hover."""
    scale = _microseconds(picture)
    names = Names(picture.layout)
    for box, thread in _threads(picture):
        args = {
            "action": str(box.bar),
            "stage": names.stage(box.bar.stage),
            "microbatch": box.label,
            "weights": box.version,
            "source": picture.lines[box.line].where,
        }
        yield {
            "ph": "X",
            "name": names.action(*box.bar[:3]),
            "cat": OPS[box.bar.kind].name,
            **thread.ids(),
            "ts": box.bar.start * scale,
            "dur": (box.bar.end - box.bar.start) * scale,
            "args": args,
        }


def _threads(picture: Picture) -> list[tuple[Box, _Thread]]:
    """All boxes with their threads, in the order in which arrows count them."""
    return [(box, _Thread(box.rank, is_beside(box.bar.kind))) for box in picture.boxes]


def _flows(picture: Picture) -> Iterator[_Event]:
    """A flow from the end of an op to the start of the op on another rank that needs it."""
    boxes = _threads(picture)
    scale = _microseconds(picture)
    for number, (source, target) in enumerate(picture.arrows):
        maker, maker_thread = boxes[source]
        user, user_thread = boxes[target]
        if maker.rank == user.rank:
            continue
        begin = max(maker.bar.end * scale - _BEFORE_END, maker.bar.start * scale)
        end = user.bar.start * scale
        common = {"name": "transfer", "cat": "transfer", "id": number}
        yield {"ph": "s", **common, **maker_thread.ids(), "ts": begin}
        yield {"ph": "f", "bp": "e", **common, **user_thread.ids(), "ts": end}


def _memory(picture: Picture) -> Iterator[_Event]:
    """A counter of what each rank holds."""
    scale = _microseconds(picture)
    for rank, steps in enumerate(picture.memory):
        # Of several steps at one time only the last: viewers would draw the others as dents.
        for time, amount in dict(steps).items():
            yield {
                "ph": "C",
                "name": "memory",
                "pid": rank + 1,
                "ts": time * scale,
                "args": {"held": amount},
            }
