"""What all ranks did and when, as a file for chrome://tracing or ui.perfetto.dev."""

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

from schedlang.files.writing import write_text
from schedlang.plan.plan import Plan
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.costs.traces import Traced
from schedlang.schedule.timeline import Bar

#: How often two ranks compare their clocks; the quickest answer is the most exact.
_PINGS = 8
#: Linux has a number for each boot (random(4)).
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def clock_offset(of: int) -> float:
    """What to add to this rank's `time.perf_counter()` for that of rank `of`; all ranks ask
    together.

    Nothing on one machine. Of another machine the answer is taken for the time half way between
    question and answer (Cristian 1989), so it is off by less than half of the quickest round trip.
    """
    rank = dist.get_rank()
    clocks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(clocks, _clock(rank))
    offset = 0.0
    for other, clock in enumerate(clocks):
        # One pair at a time: an answer that waits for another pair's would seem slow.
        if clock == clocks[of] or rank not in (of, other):
            continue
        quickest = float("inf")
        for _ in range(_PINGS):
            asked = perf_counter()
            if rank == of:
                dist.recv_object_list([None], other)
                dist.send_object_list([perf_counter()], other)
                continue
            answer: list[float] = [0.0]
            dist.send_object_list([None], of)
            dist.recv_object_list(answer, of)
            answered = perf_counter()
            if answered - asked < quickest:
                quickest = answered - asked
                offset = answer[0] - (asked + answered) / 2
    return offset


def _clock(rank: int) -> str:
    """What tells the clock of this rank from those of others: all processes of a machine have one,
    which goes on from its boot. Where the system does not say which boot it was, each has its own.
    """
    try:
        return _BOOT.read_text()
    except OSError:
        return str(rank)


def aligned(ranks: Sequence[Sequence[Bar]], offsets: Sequence[float]) -> list[Traced]:
    """The bars of all ranks by one clock: microseconds since the first of them, rounded to
    nanoseconds.
    """
    starts = [
        (rank, bar, bar.start + offsets[rank])
        for rank, bars in enumerate(ranks)
        for bar in bars
    ]
    first = min((start for _, _, start in starts), default=0.0)
    traced = []
    for rank, bar, start in sorted(starts, key=lambda entry: entry[2]):
        begin = round((start - first) * 1e6, 3)
        traced.append(
            (
                rank,
                bar._replace(
                    start=begin, end=round(begin + (bar.end - bar.start) * 1e6, 3)
                ),
            )
        )
    return traced


def write_trace(path: Path, plan: Plan, actions: Sequence[Traced]) -> None:
    """Write the actions of all ranks: ops in one row of a rank, sends and waits for receives in
    another; and the plan.

    `schedlang.extras.measured` reads it. CompileError if it cannot be written.
    """
    events: list[dict[str, Any]] = [
        {
            "name": plan.names.action(*bar[:3]),
            "ph": "X",
            "pid": rank,
            "tid": int(is_transfer(bar.kind)),
            "ts": bar.start,
            "dur": round(bar.end - bar.start, 3),
            "args": {"action": str(bar)},
        }
        for rank, bar in actions
    ]
    for rank in range(len(plan.ranks)):
        events.append(
            {
                "name": "process_name",
                "ph": "M",
                "pid": rank,
                "args": {"name": f"rank {rank}"},
            }
        )
        for row, name in enumerate(("ops", "messages")):
            events.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": rank,
                    "tid": row,
                    "args": {"name": name},
                }
            )
    write_text(
        json.dumps({"traceEvents": events, "otherData": {"plan": plan.to_json()}}), path
    )
