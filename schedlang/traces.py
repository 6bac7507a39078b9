"""The actions in a trace in Chrome's format: those that a run has recorded, or another tool."""

import re
from math import isfinite
from typing import Any

from schedlang.actions import NO_MICROBATCH
from schedlang.kinds import Kind
from schedlang.timeline import Bar

_ACTION = re.compile(rf"(\d{{1,9}})({'|'.join(sorted(Kind.__members__, key=len, reverse=True))})(\d{{1,9}})?")

#: What a rank did, with times in microseconds, the format's unit.
Traced = tuple[int, Bar]


def traced_actions(events: Any) -> list[Traced]:
    """The complete events ("X") that are named as actions are in a plan, `2F0`, in order of their starts.

    Their processes (`pid`) are the ranks. ValueError for a time that is none.
    """
    found: list[Traced] = []
    for event in events if isinstance(events, list) else ():
        match event:
            case {"ph": "X", "name": str(name), "dur": int() | float() as duration} if word := _ACTION.fullmatch(name):
                start, rank = event.get("ts", 0), event.get("pid", 0)
                if not all(isinstance(time, int | float) and isfinite(time) for time in (start, duration)):
                    raise ValueError(f"`{name}` starts at {start} and lasts {duration}")
                if duration < 0 or not isinstance(rank, int):
                    raise ValueError(f"`{name}` lasts {duration} on rank {rank}")
                microbatch = NO_MICROBATCH if word[3] is None else int(word[3])
                found.append((rank, Bar(Kind[word[2]], int(word[1]), microbatch, start, start + duration)))
    return sorted(found, key=lambda action: action[1].start)
