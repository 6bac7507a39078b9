"""What all ranks did and when, as a file for chrome://tracing or ui.perfetto.dev."""

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from schedlang.actions import is_transfer
from schedlang.timeline import Bar

#: How often two ranks compare their clocks; the quickest answer is the most exact.
_PINGS = 8


def clock_offset(of: int) -> float:
    """What to add to this rank's `time.perf_counter()` for that of rank `of`; all ranks ask together.

    An answer is taken to be from half way between question and answer (Cristian 1989), so it is off by less than half
    of the quickest round trip.
    """
    rank, offset = dist.get_rank(), 0.0
    for other in range(dist.get_world_size()):
        if other == of or rank not in (of, other):
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
                quickest, offset = answered - asked, answer[0] - (asked + answered) / 2
    return offset


def write_trace(path: Path, ranks: Sequence[Sequence[Bar]], offsets: Sequence[float]) -> None:
    """Write the bars of all ranks, in one clock: ops in one row of a rank, sends and waits for receives in another.

    OSError if it cannot be written.
    """
    all_bars = [(rank, bar) for rank, bars in enumerate(ranks) for bar in bars]
    start = min((bar.start + offsets[rank] for rank, bar in all_bars), default=0.0)
    events = [
        {
            "name": str(bar),
            "ph": "X",
            "pid": rank,
            "tid": int(is_transfer(bar.kind)),
            "ts": (bar.start + offsets[rank] - start) * 1e6,
            "dur": (bar.end - bar.start) * 1e6,
        }
        for rank, bar in all_bars
    ]
    for rank in range(len(ranks)):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(("ops", "messages")):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}})
    path.write_text(json.dumps({"traceEvents": events}))
