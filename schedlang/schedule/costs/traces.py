"""The actions in a trace in Chrome's format: those that a run has recorded, or another tool."""

import re
from collections.abc import Iterable
from math import isfinite
from typing import Any

from schedlang.schedule.actions import (
    NO_MICROBATCH,
    WORD,
    is_send,
    is_transfer,
)
from schedlang.schedule.kinds import TRANSFERS, Kind
from schedlang.schedule.letters import letters_of
from schedlang.schedule.timeline import Bar

#: What a rank did, with times in microseconds, the format's unit.
Traced = tuple[int, Bar]

#: An op as torch's own pipelining names its range; older versions write `BW` for a whole backward.
#: Sends and receives are begun in such ranges and end later: these say nothing of a transfer.
_TORCH_WORD = re.compile(r"PP:(\d{1,9})(F|BW|B|I|W)(\d{1,9})")
#: The ranges of torch's schedules that have one stage on each rank.
_WITHOUT_STAGE = re.compile(r"(?:Forward|Backward) \d+")
#: The category of a range on a stream of the device, where a CPU thread has one of the same name.
_ON_DEVICE = "gpu_user_annotation"
_TRANSFERS = frozenset(Kind(kind).name for kind in TRANSFERS)


def traced_actions(events: Any) -> list[Traced]:
    """The complete events ("X") that are actions, in order of their starts.

    An event is named as actions are in a plan, `2F0`, or as torch names them, `PP:2F0`, or has the
    first as its argument `action`. Their processes (`pid`) are the ranks. ValueError for a time
    that is none.
    """
    complete = [
        event
        for event in (events if isinstance(events, list) else ())
        if _is_complete(event)
    ]
    complete = _on_device(complete)
    of_torch = filter(None, (_TORCH_WORD.fullmatch(each["name"]) for each in complete))
    letters = letters_of(match[2] for match in of_torch)
    actions: list[Traced] = []
    for event in complete:
        match = _TORCH_WORD.fullmatch(event["name"])
        kind = letters.get(match[2], match[2]) if match else ""
        match = match or WORD.fullmatch(_action(event) or event["name"])
        if match:
            stage, written, number = match.groups()
            microbatch = NO_MICROBATCH if number is None else int(number)
            rank, start, duration = _times(event)
            end = start + duration
            bar = Bar(Kind[kind or written], int(stage), microbatch, start, end)
            actions.append((rank, bar))
    return sorted(actions, key=lambda action: action[1].start)


def why_no_actions(events: Any) -> str:
    """Why a trace has no actions."""
    for event in events if isinstance(events, list) else ():
        if _is_complete(event) and _WITHOUT_STAGE.fullmatch(event["name"]):
            return (
                f"its ranges, such as `{event['name']}`, have no stage: torch's schedules of one "
                "stage a rank name them so; record the run of a plan, or of an action table"
            )
    return (
        "the trace has no actions, such as an event `2F0` or `PP:2F0` with a duration"
    )


def _is_complete(event: Any) -> bool:
    match event:
        case {"ph": "X", "name": str(), "dur": int() | float()}:
            return True
    return False


def _times(event: dict[str, Any]) -> tuple[int, float, float]:
    """The rank of an event, its start and its duration; ValueError for what is none."""
    name = event["name"]
    duration = event["dur"]
    start = event.get("ts", 0)
    rank = event.get("pid", 0)
    if not (isfinite(duration) and duration >= 0):
        raise ValueError(f"`{name}` lasts {duration}, it must be a number from 0")
    is_time = isinstance(start, int | float) and isfinite(start)
    if not is_time or not isinstance(rank, int):
        message = f"`{name}` starts at {start} on process {rank}"
        raise ValueError(f"{message}, both must be numbers")
    return rank, start, duration


def _on_device(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without what is there twice: where torch's profiler has ranges of a device, those
    of the threads that launched its kernels do not count, nor those of its streams for messages.

    ValueError for a kind of op that has no range on the device: how long it takes is not known.
    """
    busy: dict[Any, dict[str, float]] = {}
    on_threads: set[str] = set()
    for event in events:
        kind = _kind_of_op(event)
        if kind and event.get("cat") != _ON_DEVICE:
            on_threads.add(kind)
        elif kind:
            of_device = busy.setdefault(event.get("pid"), {})
            stream = str(event.get("tid"))
            of_device[stream] = of_device.get(stream, 0.0) + event["dur"]
    if not busy:
        return events
    streams = {
        device: max(times, key=times.__getitem__) for device, times in busy.items()
    }
    kept = [
        event
        for event in events
        if event.get("cat") == _ON_DEVICE
        and streams.get(event.get("pid")) == str(event.get("tid"))
    ]
    launched = on_threads - {_kind_of_op(event) for event in kept}
    if launched:
        raise ValueError(
            f"the trace has no range of `{min(launched)}` on the device, only on the thread that "
            "launches its kernels, which does not show how long they take: `schedc run --trace` "
            "measures all ops of a plan"
        )
    return kept


def _kind_of_op(event: dict[str, Any]) -> str | None:
    """The kind of op that the name of an event is of; None for a transfer, and for all else."""
    name = event["name"]
    match = _TORCH_WORD.fullmatch(name) or WORD.fullmatch(name)
    return match[2] if match and match[2] not in _TRANSFERS else None


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
