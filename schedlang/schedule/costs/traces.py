"""The actions in a trace in Chrome's format: those that a run has recorded, or another tool."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

from schedlang.schedule.actions import NO_MICROBATCH, WORD, is_send, is_transfer
from schedlang.schedule.kinds import Kind
from schedlang.schedule.timeline import Bar

#: What a rank did, with times in microseconds, the format's unit.
Traced = tuple[int, Bar]


def traced_actions(events: Any) -> list[Traced]:
    """The complete events ("X") that are actions, in order of their starts.

    An event is named as actions are in a plan, `2F0`, or has that name as its argument `action`.
    Their processes (`pid`) are the ranks. ValueError for a time that is none.
    """
    actions: list[Traced] = []
    for event in events if isinstance(events, list) else ():
        match event:
            case {"ph": "X", "name": str(name), "dur": int() | float() as duration} if (
                word := WORD.fullmatch(_action(event) or name)
            ):
                start = event.get("ts", 0)
                rank = event.get("pid", 0)
                if not (isfinite(duration) and duration >= 0):
                    raise ValueError(
                        f"`{name}` lasts {duration}, it must be a number from 0"
                    )
                is_time = isinstance(start, int | float) and isfinite(start)
                if not is_time or not isinstance(rank, int):
                    message = f"`{name}` starts at {start} on process {rank}"
                    raise ValueError(f"{message}, both must be numbers")
                stage, kind, number = word.groups()
                microbatch = NO_MICROBATCH if number is None else int(number)
                bar = Bar(Kind[kind], int(stage), microbatch, start, start + duration)
                actions.append((rank, bar))
    return sorted(actions, key=lambda action: action[1].start)


def _action(event: dict[str, Any]) -> str | None:
    """The action that an event says it is, beside its name."""
    match event:
        case {"args": {"action": str(action)}}:
            return action
    return None


def ops_with_sends(actions: Iterable[Traced]) -> list[Traced]:
    """The ops among actions in order of time, each until the sends that follow it on its rank have
    begun.

    Beginning them takes the rank time, in which it does nothing else; a wait for a receive is none
    of its work.
    """
    ops: list[Traced] = []
    #: For each rank the index of its last op, as long as only sends have followed it.
    last: dict[int, int] = {}
    for rank, bar in actions:
        if not is_transfer(bar.kind):
            last[rank] = len(ops)
            ops.append((rank, bar))
        elif not is_send(bar.kind):
            last.pop(rank, None)
        elif rank in last:
            _, op = ops[last[rank]]
            ops[last[rank]] = rank, op._replace(end=bar.end)
    return ops
